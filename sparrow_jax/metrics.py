"""The numbers of a run: `metrics.jsonl`, `samples.jsonl`, `alpha_histogram.jsonl` and TensorBoard events in the work
directory.

The training loop gives one mapping per step and some answers; a person's scripts read the files. They are the record
that a resumed run must reproduce: rows after the restored checkpoint are cut off at the start. Fields under
`timing_s/`, `perf/` and `compile/` depend on the machine and its load, all others on the configuration alone.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

import jax
import numpy as np
from tensorboardX import SummaryWriter

from sparrow_jax.config import ConfigError
from sparrow_jax.workdir import Workdir

MACHINE_PREFIXES = ('timing_s/', 'perf/', 'compile/', 'sparse/probe_overhead')


class MetricsWriter:
    """Writes one row per step; a context manager.

    Args:
        workdir: an open work directory. On a process that is not primary nothing is written.
        start_step: step of the checkpoint that was restored; None where the run begins anew. Rows of later steps, and
            a line that a kill left incomplete, are removed from all files.

    A row is on disk (flushed) when `write` returns. Write the row of step n before the checkpoint of step n is saved:
    a run killed between the two then writes the row again, and none is missing.

    Raises ConfigError where a line before the last is not a JSON object with a step.
    """

    def __init__(self, workdir: Workdir, start_step: int | None):
        self._last_step = -1 if start_step is None else start_step
        self._primary = workdir.primary
        if not self._primary:
            return
        for file in (workdir.metrics_file, workdir.samples_file, workdir.histogram_file):
            _cut_after(file, start_step)
        self._metrics = open(workdir.metrics_file, 'a', encoding='utf-8')  # noqa: SIM115
        self._samples = open(workdir.samples_file, 'a', encoding='utf-8')  # noqa: SIM115
        self._histograms = open(workdir.histogram_file, 'a', encoding='utf-8')  # noqa: SIM115
        # purge_step hides the events of steps that are done again.
        self._events = SummaryWriter(str(workdir.tensorboard), purge_step=self._last_step + 1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends the row of a step.

        Args:
            step: larger than that of any row before.
            values: names to numbers (Python, NumPy or jax scalars), strings or None. A float that is NaN or infinite
                becomes null, as JSON has no such numbers, and is left out of the events. float32 values keep their
                shortest exact form.
        """
        if step <= self._last_step:
            raise ValueError(f'row of step {step} after that of step {self._last_step}')
        self._last_step = step
        if not self._primary:
            return
        row = append_row(self._metrics, {'step': step, **values})
        del row['step']
        for name, value in row.items():
            if isinstance(value, int | float):
                self._events.add_scalar(name, value, step)
        self._events.flush()

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends answers of a step, from `measures.answer_rows`."""
        for values in rows if self._primary else ():
            append_row(self._samples, {'step': step, **values})

    def write_histogram(self, step: int, tokens_X: np.ndarray) -> None:
        """Appends how many tokens of a step each cell of alpha has, int [CELLS] (`sparsity.tail.histogram`)."""
        if self._primary:
            self._histograms.write(json.dumps({'step': step, 'tokens': tokens_X.tolist()}) + '\n')
            self._histograms.flush()

    def close(self) -> None:
        if self._primary:
            self._metrics.close()
            self._samples.close()
            self._histograms.close()
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def append_row(file: TextIO, values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes one JSON object as a line and flushes it; values as in `MetricsWriter.write`. Returns what was written."""
    row = {name: _plain(name, value) for name, value in values.items()}
    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + '\n')
    file.flush()
    return row


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The rows of a metrics or samples file, without an incomplete last line; [] where the file is absent."""
    return [row for row, _ in _rows_with_ends(file)]


class CompileCounter:
    """Counts what XLA compiles in this process; a context manager.

    Attributes:
        count: compilations since the counter was made.
        late: names of the functions compiled after `warmed_up`, in order; each is time lost that a fixed shape would
            have saved.
    """

    def __init__(self) -> None:
        self.count = 0
        self.late: list[str] = []
        self._seconds = 0.0
        self._taken = (0, 0.0)
        self._warm = False
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def warmed_up(self) -> None:
        """From now on the names of compiled functions are kept in `late`."""
        self._warm = True

    def take(self) -> dict[str, float]:
        """`compile/count` and `compile/seconds` since the last call: the fields of a step's row."""
        count, seconds = self._taken
        self._taken = (self.count, self._seconds)
        return {'compile/count': self.count - count, 'compile/seconds': self._seconds - seconds}

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _heard(self, event: str, duration_secs: float, **facts: str | int) -> None:
        if event == '/jax/core/compile/backend_compile_duration':
            self.count += 1
            self._seconds += duration_secs
            if self._warm:
                self.late.append(str(facts.get('fun_name', 'unnamed')))


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    array = np.asarray(value)
    if array.shape != ():
        raise ValueError(f'{name}: a metric is one number, not an array of shape {array.shape}')
    if array.dtype.kind in 'biu':
        return array.item()
    number = float(array)
    if not math.isfinite(number):
        return None
    # str of a float32 is the shortest text that gives it back: 0.1 instead of 0.10000000149011612.
    return float(str(np.float32(number))) if array.dtype == np.float32 else number


def _rows_with_ends(file: Path) -> list[tuple[dict[str, Any], int]]:
    """Each row with the byte position of its end, without a last line that a kill left incomplete."""
    if not file.exists():
        return []
    if not file.is_file():
        raise ConfigError(f'{file}: is no file; the rows of a run belong there')
    rows = []
    end = 0
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b'\n'):
            break
        end += len(line)
        try:
            row = json.loads(line)
            row['step'] + 0
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ConfigError(
                f'{file}, line {number}: not a row with a step; remove the line, or give another --workdir'
            ) from error
        rows.append((row, end))
    return rows


def _cut_after(file: Path, step: int | None) -> None:
    """Shortens the file to its rows up to `step` (None: to nothing). Rows stand in the order of their steps."""
    if not file.exists():
        return
    kept = [end for row, end in _rows_with_ends(file) if step is not None and row['step'] <= step]
    os.truncate(file, kept[-1] if kept else 0)
