"""What a person sees of a run: a start block, one live line inside a step, a table row per step, an end summary.

The commands call it with the numbers they also give to `metrics.py`; nothing is computed here that is not shown. On a
terminal the live line is drawn over itself and the table fits the width; elsewhere (a file, a pipe, a job's log)
every message is one plain line without control codes. Control characters in what is shown are replaced.
"""

import dataclasses
import itertools
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

import rich.console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

_SPINNER = '⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏'
_SPARKS = '▁▂▃▄▅▆▇█'
_HEADER_EVERY_ROWS = 25
_BAR_CELLS = 16
_SUMMARY_RANK = 2  # columns up to this rank appear in the end block

_told: set[str] = set()
_current: 'Console | None' = None


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of the table.

    Attributes:
        title: of at most ten characters or so.
        metric: name in the step's metrics; a step without it shows a dash.
        form: format of the number: a `format` specification such as '.3f', or 'percent', 'count', 'time' (1:23).
        rank: on a narrow terminal the columns with the highest rank go first.
    """

    title: str
    metric: str
    form: str = '.3f'
    rank: int = 0


RL_COLUMNS = (
    Column('reward', 'critic/score/mean', '.3f', 0),
    Column('tokens', 'response_length/mean', 'count', 2),
    Column('cut', 'response_length/clip_ratio', 'percent', 6),
    Column('p05 alpha', 'sparse/alpha_p05', '.3f', 1),
    Column('kv read', 'sparse/kv_read_fraction', 'percent', 3),
    Column('kl', 'rollout_corr/kl', '.1e', 7),
    Column('loss', 'actor/pg_loss', '+.4f', 8),
    Column('grad', 'actor/grad_norm', '.3f', 5),
    Column('step tok/s', 'perf/throughput', 'count', 4),
    Column('time', 'timing_s/step', 'time', 1),
)
SUPERVISED_COLUMNS = (
    Column('loss', 'supervised/loss', '.4f', 0),
    Column('grad', 'actor/grad_norm', '.3f', 3),
    Column('step tok/s', 'perf/throughput', 'count', 2),
    Column('time', 'timing_s/step', 'time', 1),
)


class Console:
    """The one voice of a command; a context manager that leaves the terminal as it found it.

    Args:
        steps: total of the run, for 'step 3/100' and the time left; 0 where the command has no steps.
        columns: of the table.
        quiet: print nothing (every process of a multi-host run but the first).
        stream: where to; standard output by default.
    """

    def __init__(
        self,
        steps: int = 0,
        columns: Sequence[Column] = RL_COLUMNS,
        *,
        quiet: bool = False,
        stream: IO[str] | None = None,
    ):
        self.steps = steps
        self.columns = tuple(columns)
        self._out = rich.console.Console(file=stream or sys.stdout, quiet=quiet, highlight=False, emoji=False)
        self.live = self._out.is_terminal and not self._out.is_dumb_terminal and not quiet
        self._unicode = self._out.encoding.lower().startswith('utf')
        self._step = 0
        self._step_began = self._began = time.monotonic()
        self._step_times: deque[float] = deque(maxlen=10)
        self._history: dict[str, list[float]] = {}
        self._first_row = 0
        self._stopping = False
        self._rows_since_header = _HEADER_EVERY_ROWS
        self._header_width = 0
        self._status: tuple[str, str, float | None] = ('', '', None)
        self._display: Live | None = None

    def __enter__(self) -> Self:
        global _current
        _current = self
        return self

    def __exit__(self, *exc: object) -> None:
        global _current
        self._stop_live()
        if _current is self:
            _current = None

    # Before the first step

    def start(self, title: str, facts: Mapping[str, Any]) -> None:
        """Prints the start block: a title and named facts (model, parameters, devices, memory, work directory)."""
        self._block(title, facts)
        self._step_began = self._began = time.monotonic()

    # Inside a step

    def begin_step(self, step: int) -> None:
        """The live line shows this step from now on; 0 is what comes before the first."""
        self._step, self._step_began = step, time.monotonic()
        self.status('')

    def status(
        self, phase: str, detail: str = '', *, done: float | None = None, total: float = 0, unit: str = ''
    ) -> None:
        """Replaces the live line; may be called as often as wanted. Off a terminal nothing is printed.

        Args:
            phase: 'sampling', 'learning', ...
            detail: more numbers, '1,234 tok/s'.
            done, total, unit: progress of the phase, shown as '12/64 finished' with a bar.
        """
        if not self.live:
            return
        progress = '' if done is None else f'{done:,.0f}/{total:,.0f} {unit}'.rstrip()
        fraction = None if done is None or total <= 0 else min(max(done / total, 0.0), 1.0)
        self._status = (phase, '  '.join(part for part in (detail, progress) if part), fraction)
        if self._display is None:
            # get_renderable is called at every refresh: spinner and clock go on while the device works.
            self._display = Live(
                console=self._out,
                transient=True,
                refresh_per_second=8,
                get_renderable=self._live_line,
                redirect_stderr=False,
            )
            self._display.start()

    # After a step

    def row(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Prints the table row of a step; the same mapping that `MetricsWriter.write` gets."""
        now = time.monotonic()
        self._step_times.append(now - self._step_began)
        self._step, self._step_began = step, now
        self._first_row = self._first_row or step
        self._status = ('', '', None)
        for column in self.columns:
            value = _number(metrics.get(column.metric))
            if value is not None:
                self._history.setdefault(column.metric, []).append(value)
        if not self.live:
            self._plain(
                f'step {self._of_all(step)}',
                *(f'{c.title} {_format(metrics.get(c.metric), c.form)}' for c in self.columns if c.metric in metrics),
            )
            return
        shown = self._fitting_columns()
        if self._rows_since_header >= _HEADER_EVERY_ROWS or self._out.width != self._header_width:
            header = Text(self._cells(['step', *(c.title for c in shown)], shown), style='bold dim')
            self._out.print(header, no_wrap=True, crop=True)
            self._rows_since_header, self._header_width = 0, self._out.width
        self._rows_since_header += 1
        cells = [self._of_all(step), *(_format(metrics.get(c.metric), c.form) for c in shown)]
        line = Text(self._cells(cells, shown))
        step_cells = self._widths(shown)[0]
        line.stylize('dim', 0, step_cells)
        line.stylize('bold green', step_cells, step_cells + 2 + self._widths(shown)[1] if shown else step_cells)
        self._out.print(line, no_wrap=True, crop=True)

    # At any time

    def message(self, text: str) -> None:
        """Prints one line above the live line: an evaluation's result, a checkpoint, a change of the schedule."""
        self._say(text, '')
        self._rows_since_header = _HEADER_EVERY_ROWS

    def warn(self, text: str) -> None:
        """Prints a warning: the run goes on, but a person should know."""
        self._say(text, 'warning', 'bold yellow')

    def notice_once(self, text: str) -> None:
        """Prints a notice the first time that this process says it."""
        if text not in _told:
            _told.add(text)
            self._say(text, 'note', 'cyan')

    def stopping(self) -> None:
        """The live line says from now on that the run ends after this step.

        Nothing is printed, so that a signal handler may call it.
        """
        self._stopping = True

    # At the end

    def interrupted(self, step: int, saved: bool = True) -> None:
        """What a person reads after Ctrl-C."""
        self._stop_live()
        if saved:
            self.message(f'Stopped. Saved at step {step}; run the same command to go on.')
        else:
            self.message(f'Stopped before anything was saved (step {step}); run the same command to begin again.')

    def finish(self, title: str, facts: Mapping[str, Any]) -> None:
        """Prints the end block: how the main columns went over the run, then the named facts (files, what next)."""
        self._stop_live()
        went = {}
        for column in self.columns:
            values = self._history.get(column.metric, [])
            if len(values) > 1 and column.form != 'time' and column.rank <= _SUMMARY_RANK:
                shown = [_format(value, column.form) for value in values]
                alike = len(set(shown)) == 1  # a curve of differences that are not shown would look like news
                curve = spark([0.0] * len(values) if alike else values) if self._unicode else '->'
                went[column.title] = f'{shown[0]:>9} {curve} {shown[-1]}'
        if went and self._first_row > 1:
            went = {'curves': f'from step {self._first_row} on, where this start began', **went}
        took = _format(time.monotonic() - self._began, 'time')
        self._block(f'{title} in {took}', {**went, **facts})

    # How it is drawn

    def _say(self, text: str, label: str, style: str = '') -> None:
        if not self.live:
            self._plain(f'{label}: {text}' if label else text)
        elif label:
            self._out.print(f'[{style}]{label}:[/{style}] {escape(_printable(text))}')
        else:
            self._out.print(Text(_printable(text)))

    def _plain(self, *parts: str) -> None:
        if not self._out.quiet:
            print('  '.join(_printable(part) for part in parts), file=self._out.file, flush=True)

    def _block(self, title: str, facts: Mapping[str, Any]) -> None:
        width = max((len(name) for name in facts), default=0)
        if not self.live:
            self._plain(title)
            for name, value in facts.items():
                self._plain(f'  {name.ljust(width)}  {value}')
            return
        self._out.print()
        heading = Text(f'{_printable(title)} ', style='bold')
        rule = '─' if self._unicode else '-'
        heading.append(rule * max(self._out.width - heading.cell_len, 0), 'dim')
        self._out.print(heading, no_wrap=True, crop=True)
        for name, value in facts.items():
            line = Text.assemble('  ', (name.ljust(width), 'cyan'), '  ', _printable(str(value)))
            self._out.print(line, soft_wrap=True)  # a command to copy must stay one line
        self._out.print()

    def _stop_live(self) -> None:
        if self._display is not None:
            self._display.stop()
            self._display = None

    def _of_all(self, step: int) -> str:
        return f'{step:,}/{self.steps:,}' if self.steps else f'{step:,}'

    def _widths(self, columns: Sequence[Column]) -> list[int]:
        # '-2.9e-02' has eight characters.
        cells = (max(len(c.title), 8 if c.form.endswith('e') else 7) for c in columns)
        return [max(4, len(self._of_all(self.steps))), *cells]

    def _cells(self, cells: Sequence[str], columns: Sequence[Column]) -> str:
        return '  '.join(cell.rjust(width) for cell, width in zip(cells, self._widths(columns), strict=True))

    def _fitting_columns(self) -> list[Column]:
        shown = list(self.columns)
        while len(shown) > 1 and sum(self._widths(shown)) + 2 * len(shown) > self._out.width:
            shown.remove(max(reversed(shown), key=lambda c: c.rank))
        return shown

    def _live_line(self) -> Text:
        phase, detail, fraction = self._status
        now = time.monotonic()
        spinner = _SPINNER[int(now * 8) % len(_SPINNER)] if self._unicode else '|/-\\'[int(now * 8) % 4]
        line = Text(no_wrap=True, overflow='crop', end='')
        line.append(f'{spinner} ', 'cyan')
        if self.steps:
            line.append(f'step {self._step:,}/{self.steps:,}  ', 'bold')
        line.append(phase, 'cyan')
        if fraction is not None and self._out.width >= 70:
            full = round(fraction * _BAR_CELLS)
            filled, empty = ('━', '━') if self._unicode else ('#', '-')
            line.append('  ')
            line.append(filled * full, 'cyan')
            line.append(empty * (_BAR_CELLS - full), 'bright_black')
        if detail:
            line.append(f'  {detail}')
        if self._stopping:
            line.append('  stopping after this step (again: at once, without saving)', 'bold yellow')
        line.append(f'  {_format(now - self._step_began, "time")}', 'dim')
        if self._step_times and self.steps:
            left = statistics.median(self._step_times) * (self.steps - self._step + 1) - (now - self._step_began)
            line.append(f'  {_format(max(left, 0), "time")} left', 'dim')
        # One cell is left free: a full line would wrap on some terminals and break the redrawing.
        line.truncate(self._out.width - 1)
        return line


def notice_once(text: str) -> None:
    """Says something once in this process, through the running command's console, or else on standard error."""
    if _current is not None:
        _current.notice_once(text)
    elif text not in _told:
        _told.add(text)
        print(f'note: {text}', file=sys.stderr, flush=True)


def spark(values: Sequence[float], cells: int = 24) -> str:
    """A curve of block characters; more values than cells are averaged."""
    count = min(cells, len(values))
    edges = [i * len(values) // count for i in range(count + 1)]
    means = [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _SPARKS[3] * count
    return ''.join(_SPARKS[round((m - low) / (high - low) * (len(_SPARKS) - 1))] for m in means)


def _number(value: Any) -> float | None:
    """A metric as a finite float; None for what cannot be drawn."""
    if value is None or isinstance(value, str):
        return None
    number = float(value)
    return number if abs(number) < float('inf') else None


def _format(value: Any, form: str) -> str:
    if value is None:
        return '-'
    if isinstance(value, str):
        return value
    number = float(value)
    if not abs(number) < float('inf'):  # NaN fails the comparison too
        return str(number)
    if form == 'percent':
        return f'{100 * number:.1f}%'
    if form == 'count':
        return f'{number:,.0f}'
    if form == 'time':
        if number < 10:
            return f'{number:.1f}s'
        minutes, seconds = divmod(round(number), 60)
        return f'{minutes // 60}:{minutes % 60:02d}:{seconds:02d}' if minutes >= 60 else f'{minutes}:{seconds:02d}'
    return format(number, form)


def _printable(text: str) -> str:
    """Text without control characters, which a name or a model's answer may hold and a terminal would obey."""
    return ''.join(c if c.isprintable() or c in '\n\t' else '·' for c in text)
