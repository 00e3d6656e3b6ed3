"""What the analysis reads: the folders of calibrations, and the file of a closed loop. Runs are read by `report.logs`.

Everything is checked here, so that whatever is amiss is said before anything is written.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_jax.calibrate.results import FILE, MEASURED, SCHEDULE, Point
from sparrow_jax.config import ConfigError
from sparrow_jax.json_files import read_object
from sparrow_jax.report.logs import short_names
from sparrow_jax.sparsity.calibration import QUANTILES
from sparrow_jax.sparsity.tail import CELLS, BetaTail

Interval = tuple[float, float, float]  # value, lower and upper bound; NaN where unknown
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)


class Lacking(Exception):
    """A source has not what a picture needs; the text goes on from its name."""


@dataclasses.dataclass(frozen=True)
class Described:
    """Alpha of some tokens, exact or estimated.

    Attributes:
        mean, p01, p05, p10: with their intervals.
        beta: of the tail; None where too few tokens are in it.
        counts_X: int [CELLS], histogram of 1 - alpha.
    """

    mean: Interval
    p01: Interval
    p05: Interval
    p10: Interval
    beta: BetaTail | None
    counts_X: np.ndarray


@dataclasses.dataclass(frozen=True)
class Part:
    """Tokens of a length bin, or all. `bytes` are those that a token reads, NaN where not measured."""

    low: int
    high: int
    tokens: int
    alpha: Described
    top20: Described
    bytes: float


@dataclasses.dataclass(frozen=True)
class Swept:
    """A point of a calibration; `bins` has those alone of which enough is known, by number."""

    point: Point
    all: Part
    bins: Mapping[int, Part]
    share: float  # of the dense sampler's bytes, landmarks counted

    @property
    def every_page(self) -> bool:
        return not self.point.budget_tokens


Group = Sequence[Swept]  # of one policy and page size, budgets ascending


@dataclasses.dataclass(frozen=True)
class Calibration:
    """A finished calibration.

    Attributes:
        name: short, unlike that of every other one.
        facts: as in the file.
        main: policy and page size of the configuration.
        floor: of the dense sampler, its bins by number; None where nothing was sampled.
        swept: all points.
    """

    name: str
    folder: Path
    facts: Mapping[str, Any]
    main: tuple[str, int]
    floor: tuple[Part, Mapping[int, Part]] | None
    swept: Sequence[Swept]

    def group(self, policy: str, page_tokens: int) -> list[Swept]:
        """Budgets of a policy and a page size, ascending."""
        wanted = [s for s in self.swept if (s.point.policy, s.point.page_tokens) == (policy, page_tokens)]
        return sorted((s for s in wanted if not s.every_page), key=lambda s: s.point.budget_tokens)

    @property
    def main_group(self) -> list[Swept]:
        return self.group(*self.main)

    @property
    def every_page(self) -> Swept | None:
        return next((s for s in self.swept if s.every_page), None)

    def tokens(self, swept: Swept) -> dict[str, np.ndarray]:
        """alpha, top20, length and sequence of every token of a point, each [tokens].

        Raises:
            ConfigError: the file is missing, cannot be read or is of another calibration.
        """
        return _tokens(self.folder / MEASURED / f'{swept.point.name}.npz', swept.all.tokens)

    @property
    def bin_width_tokens(self) -> int:
        part = next(iter(self.main_group[0].bins.values()))
        return part.high - part.low

    @functools.cached_property
    def lengths(self) -> dict[int, float]:
        """Mean cached tokens of each bin that the main group knows."""
        length = self.tokens(self.main_group[0])['length']
        bin_ = length // self.bin_width_tokens
        return {z: float(length[bin_ == z].mean()) for z in self.main_group[0].bins}

    @functools.cached_property
    def dense_bytes(self) -> float:
        """Bytes of the cache for each cached token: what a dense sampler reads, divided by the length."""
        first = self.main_group[0]
        page = first.point.page_tokens
        pages = -(-self.tokens(first)['length'].astype(np.int64) // page)
        return first.all.bytes / first.share / float(pages.mean() * page)


@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """A closed loop; `best` is the share of the cache that the best fixed schedule reads, by policy and target."""

    name: str
    best: Mapping[str, Mapping[float, float]]
    page_tokens: int


def read_calibrations(text: str) -> list[Calibration]:
    """The calibrations in folders, with commas between.

    Raises:
        ConfigError: a folder is missing, named twice, or holds no finished calibration that can be read.
    """
    parts = [text] if Path(text).expanduser().is_dir() else [part for part in text.split(',') if part]
    folders = [Path(part).expanduser() for part in parts]
    for folder, part in zip(folders, parts, strict=True):
        if not folder.is_dir():
            what = 'is a file; give the folder of a calibration' if folder.exists() else 'no such folder'
            raise ConfigError(f'--calibration={part}: {what}')
        if not (folder / FILE).is_file():
            raise ConfigError(f'--calibration={part}: holds no calibration (no {FILE})')
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        raise ConfigError(f'--calibration={text}: names a folder twice; give every calibration once')
    return [_calibration(folder, name) for folder, name in zip(folders, short_names(resolved), strict=True)]


def read_closed_loop(text: str) -> ClosedLoop:
    """The closed loop in a file. Raises ConfigError for a file that is none."""
    file = Path(text).expanduser()
    found = read_object(file, f'--closed_loop={text}')
    try:
        best = {
            policy: {float(target): float(one['kv_read_fraction']) for target, one in targets.items()}
            for policy, targets in found['best'].items()
        }
        return ClosedLoop('closed loop', best, int(found['config']['rollout']['page_tokens']))
    except _MALFORMED as error:
        raise ConfigError(
            f'--closed_loop={text}: is no file of python -m sparrow_jax.closed_loop ({_what(error)})'
        ) from error


def _calibration(folder: Path, name: str) -> Calibration:
    file = folder / FILE
    found = read_object(file)
    if set(found) == {'settings'}:
        raise ConfigError(f'{file}: that calibration has not ended; let the same calibrate command go on to its end')
    try:
        swept = [_swept(point) for point in found['points']]
        own = next((c for c in found['chosen'] if c['file'] == SCHEDULE), found['chosen'][0])
        floor = found['dense_floor']
        read = Calibration(
            name,
            folder,
            dict(found['facts']),
            (str(own['policy']), int(own['page_tokens'])),
            None if floor is None else (_part(floor['all'], 0, 0), _bins(floor['bins'])),
            swept,
        )
    except _MALFORMED as error:
        raise ConfigError(f'{file}: is no file of python -m sparrow_jax.calibrate ({_what(error)})') from error
    if not read.main_group:
        raise ConfigError(f'{file}: has no budget for {read.main[0]} with pages of {read.main[1]}')
    if not all(one.bins for one in read.main_group):
        raise ConfigError(
            f'{file}: no length bin has the {read.facts.get("min_count")} tokens that mismatch.min_count asks for; '
            'calibrate with more sequences or a smaller min_count'
        )
    return read


def _swept(raw: Mapping[str, Any]) -> Swept:
    point = Point(str(raw['policy']), int(raw['page_tokens']), int(raw['budget_tokens']))
    return Swept(point, _part(raw['all'], 0, 0), _bins(raw['bins']), float(raw['kv_read_fraction']))


def _bins(raw: Sequence[Mapping[str, Any]]) -> dict[int, Part]:
    return {z: _part(one, int(one['from']), int(one['to'])) for z, one in enumerate(raw) if one['enough']}


def _part(raw: Mapping[str, Any], low: int, high: int) -> Part:
    bytes_ = _number(raw.get('kv_bytes_per_token'))
    return Part(low, high, int(raw['tokens']), _described(raw['alpha']), _described(raw['top20']), bytes_)


def _described(raw: Mapping[str, Any]) -> Described:
    counts_X = np.zeros(CELLS, np.int64)
    counts_X[np.asarray(raw['histogram']['cells'], int)] = raw['histogram']['counts']
    quantiles = {name: _interval(raw[name]) for name in QUANTILES}
    return Described(
        mean=_interval(raw['mean']),
        **quantiles,
        beta=BetaTail(**raw['beta']) if raw['beta'] else None,
        counts_X=counts_X,
    )


def _interval(raw: Sequence[Any]) -> Interval:
    value, low, high = map(_number, raw)
    return value, low, high


def _number(raw: Any) -> float:
    return float('nan') if raw is None else float(raw)


def _tokens(file: Path, number: int) -> dict[str, np.ndarray]:
    if not file.is_file():
        raise ConfigError(f'{file}: no such file; the analysis needs the folder {MEASURED} of the calibration')
    try:
        with np.load(file) as arrays:
            found = {name: arrays[name] for name in ('alpha', 'top20', 'length', 'sequence')}
    except Exception as error:  # zipfile, NumPy and the file system have errors of their own
        raise ConfigError(f'{file}: cannot be read ({error})') from error
    if len(found['alpha']) != number:
        raise ConfigError(f'{file}: has {len(found["alpha"])} tokens, {FILE} beside it says {number}')
    return found


def _what(error: Exception) -> str:
    return f'no field {error}' if isinstance(error, KeyError) else str(error)
