"""Runs a notebook's code cells one after the other, in one namespace, without Jupyter.

    python tests/colab/run_notebook.py colab/tour.ipynb [--figures=FOLDER]

Ends with the first exception and its traceback. With --figures, what a notebook shows is written there.
"""

import argparse
import json
import sys
import time
import types
from pathlib import Path


def code_cells(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text('utf-8'))['cells']
    return [''.join(cell['source']) for cell in cells if cell['cell_type'] == 'code']


class Shown:
    """Stands in for IPython.display: pictures and pages become files of a folder, if there is one."""

    def __init__(self, folder: Path | None):
        self.folder, self.count = folder, 0

    def keep(self, content: bytes, ending: str) -> None:
        self.count += 1
        if self.folder:
            (self.folder / f'{self.count:02}{ending}').write_bytes(content)

    def modules(self) -> dict[str, types.ModuleType]:
        module = types.ModuleType('IPython.display')
        module.HTML = lambda text: self.keep(text.encode(), '.html')  # type: ignore[attr-defined]
        module.Image = lambda file: self.keep(Path(file).read_bytes(), '.png')  # type: ignore[attr-defined]
        module.display = lambda *_shown: None  # type: ignore[attr-defined]
        return {'IPython': types.ModuleType('IPython'), 'IPython.display': module}

    def figures(self, plt) -> None:
        """Those that a cell left open, as the inline backend would show them."""
        for number in plt.get_fignums():
            self.count += 1
            if self.folder:
                plt.figure(number).savefig(self.folder / f'{self.count:02}.png', dpi=100)
        plt.close('all')


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('notebook', type=Path)
    parser.add_argument('--figures', type=Path)
    arguments = parser.parse_args()
    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)

    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    shown = Shown(arguments.figures and arguments.figures.resolve())
    namespace: dict[str, object] = {'__name__': '__main__'}
    for number, source in enumerate(code_cells(arguments.notebook), start=1):
        began = time.monotonic()
        # For the cells that ask for it alone: other libraries take its presence for a notebook.
        stand_ins = shown.modules() if 'IPython' in source else {}
        sys.modules.update(stand_ins)
        exec(compile(source, f'{arguments.notebook.name}, code cell {number}', 'exec'), namespace)
        for name in stand_ins:
            del sys.modules[name]
        shown.figures(plt)
        print(f'code cell {number}: {time.monotonic() - began:.1f} s', flush=True)
    if matplotlib.get_backend().lower() != 'agg':
        raise SystemExit('a cell changed the backend of matplotlib: figures would not show')


if __name__ == '__main__':
    main()
