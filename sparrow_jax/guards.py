"""Guards: what a run does by itself when its numbers say that training is about to collapse.

Judged once a step on the step's metrics, averaged over a few steps. What a guard remembers is part of every checkpoint,
so that a resumed run acts in the same step.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from sparrow_jax.config import GuardConfig

LENGTH, ENTROPY, TAIL = 'response_length/mean', 'actor/entropy', 'sparse/alpha_p05'
PROBE_TAIL = 'sparse/probe_p05/'


@dataclasses.dataclass
class History:
    """What a guard remembers.

    Attributes:
        recent: the last values of each watched number.
        best: the largest mean over a window of each so far.
        widened: times that all budgets were doubled.
        dense: whether the sampler went dense.
    """

    recent: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    best: dict[str, float] = dataclasses.field(default_factory=dict)
    widened: int = 0
    dense: bool = False


def judge(config: GuardConfig, history: History, metrics: Mapping[str, float]) -> str | None:
    """Takes note of a step's metrics; says what is wrong where the guard should act, and then forgets the window.

    p05 of all sampled tokens, and that of the worst length bin of the probes, are judged by themselves; response length
    and entropy against the largest mean over a window so far.
    """
    seen = {name: metrics[name] for name in (LENGTH, ENTROPY, TAIL) if name in metrics}
    bins = [value for name, value in metrics.items() if name.startswith(PROBE_TAIL)]
    if bins:
        seen[PROBE_TAIL] = min(bins)
    seen = {name: value for name, value in seen.items() if not math.isnan(value)}
    for name, value in seen.items():
        history.recent[name] = [*history.recent.get(name, []), float(value)][-config.window_steps :]
    means = {name: float(np.mean(v)) for name, v in history.recent.items() if len(v) == config.window_steps}
    reason = _reason(config, history, means)
    for name, mean in means.items():
        history.best[name] = max(history.best.get(name, -math.inf), mean)
    if reason is not None:
        history.recent.clear()
    return reason


def _reason(config: GuardConfig, history: History, means: Mapping[str, float]) -> str | None:
    over = f'over {config.window_steps} steps'
    for name, of in ((TAIL, 'alpha'), (PROBE_TAIL, "alpha in the probes' worst length bin")):
        if name in means and means[name] < config.least_p05:
            return f'p05 of {of} is {means[name]:.3f} {over}, below guard.least_p05={config.least_p05}'
    for name, share, field in (
        (LENGTH, config.least_length_share, 'guard.least_length_share'),
        (ENTROPY, config.least_entropy_share, 'guard.least_entropy_share'),
    ):
        best = history.best.get(name)
        if name in means and best is not None and means[name] < share * best:
            return f'{name} has fallen from {best:.3g} to {means[name]:.3g} {over}, below {field}={share} of it'
    return None
