"""The picture of compared runs: how each arm went, and what its sampler's alpha said beforehand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_jax.report.logs import Run
from sparrow_jax.run_outcomes import EARLY_STEPS, Outcome, arm_of

PANELS = {
    'critic/score/mean': 'reward',
    'val/accuracy': 'held-out accuracy, dense policy',
    'response_length/mean': 'response, tokens',
    'sparse/alpha_p05': 'p05 of alpha',
    'sparse/kv_read_fraction': 'share of the KV cache that is read',
    'sparse/budget_pages/mean': 'budget, pages of a token',
    'timing_s/gen': 'rollout, seconds of a step',
}
SCATTER = {'p05': 'p05 of alpha', 'mean': 'mean of alpha'}
COLUMNS = 3
LARGEST_GAP = 1e-4  # of alpha from 1, that is still told from 1


def plot(runs: Sequence[Run], found: Sequence[Outcome], out: Path) -> None:
    """Writes the picture.

    Args:
      runs: in any order.
      found: what became of them; gives the order of the arms.
      out: the file; its suffix says what kind.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    arms = list(dict.fromkeys(one.arm for one in found))
    shades = plt.get_cmap('viridis')(np.linspace(0, 0.9, max(len(arms) - 1, 1)))
    colours: dict[str, Any] = {'dense': '#333333'} | dict(
        zip([arm for arm in arms if arm != 'dense'], shades, strict=False)
    )
    rows = -(-(len(PANELS) + len(SCATTER)) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(4.2 * COLUMNS, 3.1 * rows), layout='constrained')
    places = iter(axes.flat)
    for name, title in PANELS.items():
        axis = next(places)
        for arm in arms:
            seeds = [run.values(name) for run in runs if arm_of(run) == arm]
            for steps, values in seeds:
                axis.plot(steps, values, color=colours[arm], linewidth=0.7, alpha=0.45)
            axis.plot(*mean_of(seeds), color=colours[arm], linewidth=2.0, label=arm)
        axis.set_xlabel('step', fontsize=9)
        if name != 'sparse/alpha_p05':
            axis.set_ylim(bottom=0)
        _finish(axis, title)
    for name, title in SCATTER.items():
        axis = next(places)
        for one in found:
            gap = max(1 - one.measures[name], LARGEST_GAP)
            axis.scatter(gap, one.accuracy_last, color=colours[one.arm], marker='o' if one.stable else 'x', s=28)
        axis.set_xscale('log')
        axis.invert_xaxis()
        axis.set_xlabel(f'1 - {title}, first {EARLY_STEPS} steps', fontsize=9)
        _finish(axis, 'final accuracy (crosses: not stable)')
    for axis in places:
        axis.set_visible(False)
    axes.flat[0].legend(fontsize=7, frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def mean_of(seeds: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Steps that all seeds have, and the mean of their values there."""
    steps = seeds[0][0]
    for other, _ in seeds[1:]:
        steps = np.intersect1d(steps, other)
    return steps, np.mean([values[np.isin(at, steps)] for at, values in seeds], axis=0)


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    axis.spines[['top', 'right']].set_visible(False)
