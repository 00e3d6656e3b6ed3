"""The folder of a calibration, and what stands in its files.

calibration.json      settings, facts, and of every measured point quantiles, histograms and Beta fits by length
schedule.json         the budgets for the configuration's policy and page size; schedules/ has those of the others
contexts/*.npz        the sequences, with the alphas of the sampler that drew them
measured/*.npz        alphas of every token at every point
"""

import dataclasses
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_jax.calibrate.contexts import Contexts
from sparrow_jax.config import ConfigError, RunConfig, differing_fields
from sparrow_jax.json_files import read_object
from sparrow_jax.sparsity.calibration import Tokens
from sparrow_jax.workdir import empty_folder, write_atomically

FILE, SCHEDULE = 'calibration.json', 'schedule.json'
CONTEXTS, MEASURED, SCHEDULES = 'contexts', 'measured', 'schedules'

HOW = {
    'dense_samples': (
        'one teacher-forced sparse pass a budget over sequences that the dense policy sampled: exact for their '
        'contexts; a sparse sampler would come to slightly different ones'
    ),
    'texts': 'one teacher-forced sparse pass a budget over given texts: exact for their contexts',
    'sparse_samples': 'sampled anew by the sparse sampler at every budget, then scored by the dense policy',
}


@dataclasses.dataclass(frozen=True)
class Point:
    """Something to be measured: a budget under a policy and a page size. 0 tokens stand for every page."""

    policy: str
    page_tokens: int
    budget_tokens: int

    @property
    def name(self) -> str:
        return f'{self.policy}_page{self.page_tokens}_{f"budget{self.budget_tokens}" if self.budget_tokens else "all"}'


def origin(run: RunConfig) -> str:
    """A key of `HOW`."""
    return 'texts' if run.calibrate.texts else run.calibrate.contexts


class Results:
    """The folder; what is in it already is taken up.

    Args:
        workdir: absent, empty, or of a calibration with the same settings.
        settings: all that decides what a point gives. Which points there are may differ from call to call.

    Raises:
        ConfigError: other settings, which are listed, or a folder of something else.
    """

    def __init__(self, workdir: str, settings: Mapping[str, Any]):
        path = Path(workdir).expanduser()
        self.settings = json.loads(json.dumps(settings))
        if (path / FILE).is_file():
            stored = read_object(path / FILE).get('settings')
            if not isinstance(stored, dict):
                raise ConfigError(f'{path / FILE}: holds no settings; give another --workdir')
            if different := differing_fields(stored, self.settings):
                raise ConfigError(
                    f'--workdir={workdir}: holds a calibration with other settings; give another --workdir, or undo '
                    'these changes:\n  ' + '\n  '.join(different)
                )
            self.path = path
        else:
            self.path = empty_folder(workdir, '--workdir')
            self.write(FILE, {'settings': self.settings})
        for folder in (CONTEXTS, MEASURED):
            (self.path / folder).mkdir(exist_ok=True)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """A JSON file."""
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps(content, indent=1, allow_nan=False) + '\n')

    def tokens(self, name: str) -> Tokens | None:
        """What was measured under a name; None where it was not yet."""
        arrays = self._load(f'{MEASURED}/{name}')
        return None if arrays is None else _tokens(arrays)

    def keep_tokens(self, name: str, tokens: Tokens) -> None:
        self._save(f'{MEASURED}/{name}', {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)})

    def contexts(self, part: int) -> tuple[Contexts, Tokens | None] | None:
        """A part of the sequences, with the alphas of the sampler that drew it, if one did."""
        arrays = self._load(f'{CONTEXTS}/{part:04}')
        if arrays is None:
            return None
        return Contexts.from_flat(arrays), _tokens(arrays) if 'alpha' in arrays else None

    def keep_contexts(self, part: int, contexts: Contexts, tokens: Tokens | None) -> None:
        arrays = contexts.flat()
        if tokens is not None:
            arrays |= {f.name: getattr(tokens, f.name) for f in dataclasses.fields(tokens)}
        self._save(f'{CONTEXTS}/{part:04}', arrays)

    def _load(self, name: str) -> dict[str, np.ndarray] | None:
        file = self.path / f'{name}.npz'
        if not file.is_file():
            return None
        try:
            with np.load(file) as arrays:
                return dict(arrays)
        except Exception as error:  # zipfile, NumPy and the file system have errors of their own
            raise ConfigError(f'{file}: cannot be read ({error}); remove it to have it measured again') from error

    def _save(self, name: str, arrays: Mapping[str, np.ndarray]) -> None:
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_atomically(self.path / f'{name}.npz', buffer.getvalue())


def _tokens(arrays: Mapping[str, np.ndarray]) -> Tokens:
    return Tokens(**{f.name: arrays[f.name] for f in dataclasses.fields(Tokens)})
