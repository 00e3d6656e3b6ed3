"""The notebooks as they are committed, and their smoke form run in a fresh process each."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from run_notebook import code_cells

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / 'colab').glob('*.ipynb'))
NAMES = [notebook.stem for notebook in NOTEBOOKS]
MOST_BYTES = 20_000
SMOKE_S = 60  # of the processor's time, which other processes on the machine do not lengthen
HANGING_S = 400


def test_there_are_three():
    assert NAMES == ['calibrate', 'selection_policy', 'tour']


@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=NAMES)
class TestFile:
    def test_it_is_a_notebook_without_outputs(self, notebook):
        content = json.loads(notebook.read_text('utf-8'))
        assert (content['nbformat'], content['nbformat_minor']) == (4, 5)
        assert notebook.stat().st_size < MOST_BYTES
        cells = content['cells']
        ids = [cell['id'] for cell in cells]
        assert len(set(ids)) == len(ids)
        assert all(re.fullmatch(r'[a-zA-Z0-9_-]{1,64}', id_) for id_ in ids)
        for cell in cells:
            if cell['cell_type'] == 'code':
                assert set(cell) == {'cell_type', 'execution_count', 'id', 'metadata', 'outputs', 'source'}
                assert (cell['outputs'], cell['execution_count']) == ([], None)
            else:
                assert set(cell) == {'cell_type', 'id', 'metadata', 'source'}

    def test_all_begin_with_the_same_cell(self, notebook):
        first = code_cells(notebook)[0]
        assert 'REPOSITORY' in first
        assert first == code_cells(NOTEBOOKS[0])[0]

    def test_links_lead_to_files(self, notebook):
        cells = json.loads(notebook.read_text('utf-8'))['cells']
        text = '\n'.join(''.join(cell['source']) for cell in cells if cell['cell_type'] == 'markdown')
        for target in re.findall(r'\]\(([^)]+)\)', text):
            assert (notebook.parent / target).is_file(), target
        for target in re.findall(r'`((?:docs|configs|pallas_kernels)/[\w/]+\.\w+)`', text):
            assert (ROOT / target).is_file(), target


class FirstCell:
    """The first cell, run with commands that are noted and not run.

    Args:
        imports: exit code of the attempt to import the package.
    """

    def __init__(self, monkeypatch, folder, imports=0):
        self.commands = []
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, 'path', list(sys.path))
        monkeypatch.setattr(subprocess, 'run', self._run)
        self.imports = imports

    def _run(self, command, **_options):
        self.commands.append(command)
        if command[:2] == ['git', 'clone']:
            Path(command[-1]).mkdir()
        return subprocess.CompletedProcess(command, self.imports if '-c' in command else 0)

    def __call__(self):
        exec(code_cells(NOTEBOOKS[0])[0], {})
        return [[str(part) for part in command] for command in self.commands]


@pytest.mark.parametrize('folder', ['.', 'colab', 'tests/colab'])
def test_inside_a_checkout_the_first_cell_installs_nothing(folder, monkeypatch):
    commands = FirstCell(monkeypatch, ROOT / folder)()
    assert commands == [[sys.executable, '-c', 'import sparrow_jax.train']]
    assert Path.cwd() == ROOT
    assert sys.path[0] == str(ROOT)


def test_a_checkout_without_its_requirements_gets_them(monkeypatch):
    commands = FirstCell(monkeypatch, ROOT, imports=1)()
    assert commands[1:] == [[sys.executable, '-m', 'pip', 'install', '--quiet', '--editable', str(ROOT)]]


def test_elsewhere_the_first_cell_clones_and_installs(monkeypatch, tmp_path):
    monkeypatch.setenv('SPARROW_JAX_REPOSITORY', 'https://example.org/mine')
    commands = FirstCell(monkeypatch, tmp_path)()
    clone = str(tmp_path / 'sparrow_jax')
    assert commands == [
        ['git', 'clone', '--depth=1', 'https://example.org/mine', clone],
        [sys.executable, '-m', 'pip', 'install', '--quiet', '--editable', clone],
    ]
    assert str(Path.cwd()) == clone


def test_elsewhere_an_address_must_be_given(monkeypatch, tmp_path):
    monkeypatch.delenv('SPARROW_JAX_REPOSITORY', raising=False)
    cell = FirstCell(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match=r'^REPOSITORY=.*<owner>.*: put the address of your copy there$'):
        cell()
    assert cell.commands == []


def processor_s() -> float:
    """What the processes that this one has started and seen end have taken."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize('notebook', NOTEBOOKS, ids=NAMES)
def test_smoke_form(notebook, tmp_path, shared_folder):
    environment = os.environ | {
        'SPARROW_JAX_SMOKE': '1',
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(shared_folder / 'compiled'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'PYTHONPATH': str(ROOT),
        'TMPDIR': str(tmp_path),
    }
    used = processor_s()
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests/colab/run_notebook.py'), str(notebook), f'--figures={tmp_path}/figures'],
        cwd=notebook.parent,  # as Jupyter does
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGING_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / 'figures').iterdir())
    assert processor_s() - used < SMOKE_S


def test_a_failing_cell_fails(tmp_path):
    cells = [{'cell_type': 'code', 'source': ['print("here")\n', '1 / 0']}, {'cell_type': 'code', 'source': ['2']}]
    (tmp_path / 'bad.ipynb').write_text(json.dumps({'cells': cells}))
    command = [sys.executable, str(ROOT / 'tests/colab/run_notebook.py'), str(tmp_path / 'bad.ipynb')]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == 'here\n'
    assert 'bad.ipynb, code cell 1", line 2' in done.stderr
    assert 'ZeroDivisionError' in done.stderr
