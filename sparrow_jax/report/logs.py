"""What a run's folder holds, as a report reads it: all that can be read, and a word on what cannot.

A person may look at a run that is being written, was killed in the middle of a line, or whose files came here without
their checkpoints, so nothing is needed but one row of `metrics.jsonl`.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_jax.config import ConfigError
from sparrow_jax.json_files import read_object
from sparrow_jax.sparsity.tail import CELLS
from sparrow_jax.workdir import CONFIG_NAME, HISTOGRAM_NAME, METRICS_NAME, SAMPLES_NAME

EVALUATION_NAME = 'evaluation.jsonl'

_STEP = re.compile(rb'\{"step": (\d+)[,}]')  # as rows of this package begin: the rest need not be parsed to know it

_MOST_STEP = 2**53  # a browser's numbers are exact up to here


@dataclasses.dataclass(frozen=True)
class Run:
    """The logs of one run.

    Attributes:
        folder: where they lie.
        name: short, and unlike that of every other run of the report.
        config: as in config.json; {} where there is none.
        steps: int [steps], ascending, of the rows of metrics.jsonl.
        metrics: name to float64 [steps]; NaN where a row lacks it.
        not_finite: name to the steps at which it was NaN or infinite.
        histograms: where each row of alpha_histogram.jsonl lies.
        samples: likewise of samples.jsonl.
        evaluations: rows of evaluation.jsonl, the last one of each step and sampler.
        notes: sentences on what could not be read.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    not_finite: dict[str, list[int]]
    histograms: 'Index'
    samples: 'Index'
    evaluations: list[dict[str, Any]]
    notes: list[str]

    def setting(self, field: str, default: Any = None) -> Any:
        """A field of the configuration, by its name with dots."""
        here: Any = self.config
        for part in field.split('.'):
            if not isinstance(here, dict) or part not in here:
                return default
            here = here[part]
        return here

    def values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric, at the steps that have it."""
        values = self.metrics.get(name, np.full(len(self.steps), np.nan))
        there = np.isfinite(values)
        return self.steps[there], values[there]


@dataclasses.dataclass(frozen=True)
class Index:
    """Where the rows of a large file begin: those of a report are few, and the others stay on disk."""

    file: Path
    begins: dict[int, list[int]]  # step to positions

    def rows(self, step: int, most: int) -> Iterator[dict[str, Any]]:
        """The first rows of a step, without those that cannot be read."""
        for begin in self.begins.get(step, [])[:most]:
            with open(self.file, 'rb') as file:
                file.seek(begin)
                row = _row(file.readline())
            if row is not None:
                yield row


def read_runs(workdirs: Sequence[str], flag: str = '--workdir') -> list[Run]:
    """Reads the logs of every folder, which `flag` named.

    Raises:
        ConfigError: a folder is missing, is none, or holds no step of a run; the same folder twice.
    """
    folders = [Path(workdir).expanduser() for workdir in workdirs]
    for folder, workdir in zip(folders, workdirs, strict=True):
        _check(folder, f'{flag}={workdir}')
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            raise ConfigError(f'{flag}: names {folder} twice; give every run once')
    return [_read(folder, name) for folder, name in zip(folders, short_names(resolved), strict=True)]


def _check(folder: Path, given: str) -> None:
    if not folder.exists():
        raise ConfigError(f'{given}: no such folder; give the folder of a run')
    if not folder.is_dir():
        raise ConfigError(f'{given}: is a file; give the folder of a run')
    if not (folder / METRICS_NAME).is_file():
        begun = (folder / CONFIG_NAME).exists()
        raise ConfigError(
            f'{given}: has no {METRICS_NAME} yet; wait for its first step'
            if begun
            else f'{given}: holds no run (no {METRICS_NAME}); give the folder of a run'
        )


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many more as tell them apart."""
    for parts in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ['/'.join(folder.parts[-parts:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _read(folder: Path, name: str) -> Run:
    notes: list[str] = []
    rows: dict[int, dict[str, Any]] = {}
    unreadable, cut = 0, False
    for _, line in _lines(folder / METRICS_NAME):
        row = _row(line)
        if row is None:
            cut = not line.endswith(b'\n')
            unreadable += not cut
            continue
        _forget_redone(rows, row['step'])
        rows[row['step']] = row
    if not rows:
        raise ConfigError(f'{folder / METRICS_NAME}: holds no step yet; wait for the first, or give another --workdir')
    if cut:
        notes.append(f'The last line of {METRICS_NAME} was cut off and is left out.')
    if unreadable:
        notes.append(f'{unreadable} lines of {METRICS_NAME} are no rows of a run and were left out.')
    config: dict[str, Any] = {}
    try:
        config = read_object(folder / CONFIG_NAME)
    except ConfigError:
        notes.append(f'Without a readable {CONFIG_NAME} the target and the settings are unknown.')
    metrics, not_finite = _columns(rows)
    return Run(
        folder,
        name,
        config,
        np.asarray(list(rows), np.int64),
        metrics,
        not_finite,
        _index(folder / HISTOGRAM_NAME),
        _index(folder / SAMPLES_NAME),
        _evaluations(folder / EVALUATION_NAME),
        notes,
    )


def _columns(rows: dict[int, dict[str, Any]]) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    columns: dict[str, np.ndarray] = {}
    not_finite: dict[str, list[int]] = {}
    for i, (step, row) in enumerate(rows.items()):
        for name, value in row.items():
            if name == 'step' or isinstance(value, str | bool | list | dict):
                continue
            number = _number(value)
            if math.isnan(number):
                not_finite.setdefault(name, []).append(step)
            columns.setdefault(name, np.full(len(rows), np.nan))[i] = number
    return columns, not_finite


def _number(value: int | float | None) -> float:
    """NaN for what is not finite, which a metrics file has as null."""
    try:
        return float(value) if value is not None and math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def _index(file: Path) -> Index:
    begins: dict[int, list[int]] = {}
    for begin, line in _lines(file):
        if not line.endswith(b'\n'):
            continue
        start = _STEP.match(line)
        row = {'step': int(start[1])} if start else _row(line)
        if row is not None:
            if row['step'] not in begins or row['step'] != next(reversed(begins)):
                _forget_redone(begins, row['step'])
            begins.setdefault(row['step'], []).append(begin)
    return Index(file, begins)


def _evaluations(file: Path) -> list[dict[str, Any]]:
    rows = (_row(line) for _, line in _lines(file))
    return list({(row['step'], str(row.get('sampler'))): row for row in rows if row is not None}.values())


def histogram_of(row: dict[str, Any]) -> np.ndarray | None:
    """Tokens of each cell, int [CELLS]; None where the row has none, or those of another version."""
    tokens = row.get('tokens')
    if not isinstance(tokens, list) or len(tokens) != CELLS or not all(isinstance(n, int) and n >= 0 for n in tokens):
        return None
    return np.asarray(tokens, np.int64)


def _forget_redone(rows: dict[int, Any], step: int) -> None:
    """A run that goes on from a checkpoint does the steps after it again: what they were before counts no more."""
    while rows and next(reversed(rows)) >= step:
        rows.popitem()


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Each line with the position of its beginning; none where the file is absent."""
    if not file.is_file():
        return
    begin = 0
    with open(file, 'rb') as lines:
        for line in lines:
            yield begin, line
            begin += len(line)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get('step') if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < _MOST_STEP else None
