"""The picture of whole rollouts: slots, pool and speed over time, from the figures of `whole_rollout` alone."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

WINDOW_S = 2.0  # that tokens/s are averaged over: a segment is too short for a smooth curve


def plot_occupancy(runs: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Writes a picture of one rollout, or of several on one axis.

    Args:
        runs: figures with `mode`, `slots`, `pool_pages` and `occupancy`.
        out: the file; its suffix says what kind.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.1), layout='constrained')
    for run in runs:
        series, label = run['occupancy'], run['mode']
        time_s = np.asarray(series['time_s'])
        axes[0].plot(time_s, series['running'], label=label, linewidth=1.6)
        if any(series['parked']):
            axes[0].plot(time_s, series['parked'], label=f'{label}, parked', linewidth=1.2, linestyle='--')
        axes[1].plot(time_s, np.asarray(series['pages']) / run['pool_pages'], label=label, linewidth=1.6)
        axes[2].plot(*tokens_per_s(time_s, np.asarray(series['tokens'])), label=label, linewidth=1.6)
    titles = ('sequences in slots', 'share of the pool in use', 'tokens/s')
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel('seconds', fontsize=9)
        axis.tick_params(labelsize=8)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[['top', 'right']].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def tokens_per_s(time_s: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, tokens/s) over windows of at least WINDOW_S, from the tokens sampled up to each time."""
    marks = [0]
    for i in range(1, len(time_s)):
        if time_s[i] - time_s[marks[-1]] >= WINDOW_S or i == len(time_s) - 1:
            marks.append(i)
    seconds = np.diff(time_s[marks], prepend=0.0)
    drawn = np.diff(tokens[marks], prepend=0)
    return time_s[marks], drawn / np.maximum(seconds, 1e-9)
