"""What became of runs of one experiment, and which measure of their samplers tells beforehand: pure functions.

Takes the logs that `report.logs` reads; `compare_runs` writes what comes out. An *arm* is what a sampler was told: its
schedule, controller and adapter. Its seeds differ in nothing else.

A run is *stable* where its dense policy ends as accurate as those that were trained on dense rollouts, less a margin,
and its responses did not shrink to less than half of theirs. Measures are means over the run's first steps, when all
policies are still alike: later a policy that has collapsed writes other text, whose acceptance says nothing of what
led there.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from sparrow_jax.config import ConfigError
from sparrow_jax.report.logs import Run

EARLY_STEPS = 5  # of a run, that measures are means over; likewise its last ones, for how it ended
LEAST_LENGTH_SHARE = 0.5  # of the dense runs' final length, that a stable run's keeps
DRAWS = 2000  # of arms, for an interval
INTERVAL = (5, 95)  # percentiles
MEASURES = ('p05', 'worst bin', 'mean')  # of alpha
_ARM_SECTIONS = ('schedule', 'controller', 'distill', 'mismatch')
_BIN = re.compile(r'sparse/alpha_p05/bin_\d+_\d+')


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
      arm: its label.
      seed: of the run.
      steps: done.
      accuracy_first, accuracy_last: held-out accuracy of the dense policy.
      length_first, length_last: mean response, tokens, at first and in the end.
      reward_last: mean reward in the end.
      measures: by name of MEASURES, at first. A dense sampler's are 1 but for numerical differences.
      kv_read_fraction: mean over the run.
      pages_read: likewise, of a token; NaN where it was not logged.
      rollout_s: likewise, of a step.
      stable: see the module.
    """

    arm: str
    seed: int
    steps: int
    accuracy_first: float
    accuracy_last: float
    length_first: float
    length_last: float
    reward_last: float
    measures: Mapping[str, float]
    kv_read_fraction: float
    pages_read: float
    rollout_s: float
    stable: bool = True


@dataclasses.dataclass(frozen=True)
class Ranking:
    """How well a measure orders runs.

    Attributes:
      measure: of MEASURES.
      auc: probability that a stable run has more of it than an unstable one, ties counting half; NaN without both.
      interval: of auc, from arms drawn with replacement (seeds of an arm are no further evidence); NaN likewise.
      accuracy, length: Spearman's rank correlation with the final accuracy, and with the relative change of length.
    """

    measure: str
    auc: float
    interval: tuple[float, float]
    accuracy: float
    length: float


def arm_of(run: Run) -> str:
    """A label from the run's configuration: 'dense', 'fixed 12', 'adaptive 0.9', with '+ distill' where it was on."""
    kind = str(run.setting('schedule.kind', 'unknown'))
    value = {
        'fixed': run.setting('schedule.budget_pages'),
        'adaptive': run.setting('controller.target_p05'),
        'published': run.setting('schedule.target_p05'),
        'file': run.setting('schedule.path'),
    }.get(kind)
    label = kind if value is None else f'{kind} {value}'
    return f'{label} + distill' if run.setting('distill.enabled') else label


def outcomes(runs: Sequence[Run], margin: float) -> list[Outcome]:
    """What became of each run, in order of arms: dense first, then the label's kind and number.

    Args:
      runs: of one experiment, at least one of them dense.
      margin: of held-out accuracy, that a stable run may end below the dense ones.

    Raises:
      ConfigError: no dense run, a run that lacks a measure, or two of one arm and seed.
    """
    found = sorted((_outcome(run) for run in runs), key=lambda one: (*_order(one.arm), one.seed))
    for one, other in itertools.pairwise(found):
        if (one.arm, one.seed) == (other.arm, other.seed):
            raise ConfigError(f'--runs: names two runs of {one.arm} with seed {one.seed}; give one')
    dense = [one for one in found if one.arm == 'dense']
    if not dense:
        raise ConfigError('--runs: none of them has a dense sampler (schedule.kind=dense), which all are measured by')
    accuracy = float(np.mean([one.accuracy_last for one in dense]))
    length = float(np.mean([one.length_last for one in dense]))

    def stable(one: Outcome) -> bool:
        return one.accuracy_last >= accuracy - margin and one.length_last >= LEAST_LENGTH_SHARE * length

    return [dataclasses.replace(one, stable=stable(one)) for one in found]


def rank(found: Sequence[Outcome]) -> list[Ranking]:
    """How well each measure orders the sparse runs: dense ones say what stable is."""
    found = [one for one in found if one.arm != 'dense']
    stable = np.asarray([one.stable for one in found])
    accuracy = np.asarray([one.accuracy_last for one in found])
    change = np.asarray([one.length_last / one.length_first for one in found])
    arms = [[i for i, one in enumerate(found) if one.arm == arm] for arm in dict.fromkeys(one.arm for one in found)]
    rankings = []
    for name in MEASURES:
        values = np.asarray([one.measures[name] for one in found])
        rng, drawn = np.random.default_rng(0), []
        for _ in range(DRAWS if arms else 0):
            chosen = np.asarray([i for a in rng.integers(len(arms), size=len(arms)) for i in arms[a]], int)
            drawn.append(auc(values[chosen], stable[chosen]))
        usable = np.asarray(drawn)[np.isfinite(drawn)]
        low, high = np.percentile(usable, INTERVAL) if len(usable) else (np.nan, np.nan)
        rankings.append(
            Ranking(
                name,
                auc(values, stable),
                (float(low), float(high)),
                _correlation(values, accuracy),
                _correlation(values, change),
            )
        )
    return rankings


def auc(values: np.ndarray, stable: np.ndarray) -> float:
    """Probability that a stable run has the larger value, ties counting half; NaN where all or none are stable."""
    above, below = values[stable], values[~stable]
    if not len(above) or not len(below):
        return float('nan')
    return float(np.mean(np.sign(above[:, None] - below[None]) / 2 + 0.5))


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """Fields in which the runs differ though they should not: all but seeds and what makes an arm."""
    flat = [dict(_flat(run.config)) for run in runs]
    names = sorted({name for one in flat for name in one if name != 'seed' and name.split('.')[0] not in _ARM_SECTIONS})
    return [name for name in names if len({json.dumps(one.get(name)) for one in flat}) > 1]


def _outcome(run: Run) -> Outcome:
    def series(name: str) -> np.ndarray:
        _, values = run.values(name)
        if not len(values):
            raise ConfigError(f'{run.folder}: its metrics have no {name}, which the comparison needs')
        return values

    accuracy, length = series('val/accuracy'), series('response_length/mean')
    early = run.steps <= EARLY_STEPS
    bins = [values[early] for name, values in run.metrics.items() if _BIN.fullmatch(name)]
    means = [float(np.nanmean(values)) for values in bins if np.isfinite(values).any()]
    p05 = float(series('sparse/alpha_p05')[:EARLY_STEPS].mean())
    pages = run.values('sparse/pages_read/mean')[1]
    return Outcome(
        arm=arm_of(run),
        seed=int(run.setting('seed', 0)),
        steps=int(run.steps[-1]),
        accuracy_first=float(accuracy[0]),
        accuracy_last=float(accuracy[-1]),
        length_first=float(length[:EARLY_STEPS].mean()),
        length_last=float(length[-EARLY_STEPS:].mean()),
        reward_last=float(series('critic/score/mean')[-EARLY_STEPS:].mean()),
        measures={
            'p05': p05,
            'worst bin': min(means, default=p05),
            'mean': float(series('sparse/alpha_mean')[:EARLY_STEPS].mean()),
        },
        kv_read_fraction=float(series('sparse/kv_read_fraction').mean()),
        pages_read=float(pages.mean()) if len(pages) else float('nan'),
        rollout_s=float(np.median(series('timing_s/gen'))),
    )


def _correlation(values: np.ndarray, other: np.ndarray) -> float:
    if len(values) < 2 or np.ptp(values) == 0 or np.ptp(other) == 0:
        return float('nan')
    return float(stats.spearmanr(values, other).statistic)


def _order(arm: str) -> tuple[bool, str, float, str]:
    kind, _, rest = arm.partition(' ')
    number = re.match(r'[\d.]+', rest)
    return kind != 'dense', kind, float(number[0]) if number else 0.0, rest


def _flat(config: Mapping[str, Any], prefix: str = '') -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f'{prefix}{name}.')
        else:
            yield f'{prefix}{name}', value
