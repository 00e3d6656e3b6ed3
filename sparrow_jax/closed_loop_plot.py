"""The picture of `closed_loop`, from its figures alone: where p05 arrives, and what that reads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = {'config': '#3b6ea8', 'small': '#c8553d', 'large': '#5b8e5a'}
NAMES = {'config': 'from the configured budgets', 'small': 'from 8 times too small', 'large': 'from 8 times too large'}
READS_AT_MOST = 1.15  # times the best fixed schedule
INK, FAINT = '#333333', '#9a9a9a'


def plot(data: Mapping[str, Any], outs: Sequence[Path], within: float) -> None:
    """Writes the picture.

    Args:
        data: as in the JSON file.
        outs: files; their suffixes say of what kind.
        within: distance from the target that counts as held.
    """
    targets = sorted({loop['target'] for loop in data['closed'].values()})
    if not targets:
        return
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2,
        len(targets),
        figsize=(1.2 + 3.4 * len(targets), 5.6),
        layout='constrained',
        squeeze=False,
        sharex=True,
        sharey='row',
        gridspec_kw={'height_ratios': [3, 2]},
    )
    best = data['best'].get(data['config']['schedule']['policy'], {})
    shown: dict[str, Any] = {}
    for (top, bottom), target in zip(axes.T, targets, strict=True):
        loops = [loop for loop in data['closed'].values() if loop['target'] == target and loop['steps']]
        top.axhspan(target - within, target + within, color=FAINT, alpha=0.18, linewidth=0)
        top.axhline(target, color=INK, linewidth=0.8)
        top.set_title(f'target {target:g}', fontsize=10, color=INK)
        for loop in loops:
            colour, steps = COLOURS[loop['start']], [step['step'] for step in loop['steps']]
            for z in range(len(loop['steps'][0]['p05'])):
                points = [(s['step'], s['p05'][z]) for s in loop['steps'] if s['p05'][z] is not None]
                if points:
                    style = {'color': colour, 'alpha': 0.7, 'linewidth': 1.1, 'marker': 'o', 'markersize': 3}
                    top.plot(*zip(*points, strict=True), **style)
            reads = [step['kv_read_fraction'] for step in loop['steps']]
            [line] = bottom.plot(steps, reads, color=colour, linewidth=1.6, marker='o', markersize=4)
            shown[NAMES[loop['start']]] = line
        if str(target) in best:
            fixed = best[str(target)]['kv_read_fraction']
            shown['best fixed schedule'] = bottom.axhline(fixed, color=INK, linewidth=1, linestyle='--')
            shown[f'{READS_AT_MOST:g} times that'] = bottom.axhline(
                READS_AT_MOST * fixed, color=FAINT, linewidth=1, linestyle=':'
            )
        bottom.set_xlabel('step', fontsize=9)
        bottom.xaxis.get_major_locator().set_params(integer=True)
    axes[0][0].set_ylabel('p05 of alpha, a line for each length bin', fontsize=9)
    axes[1][0].set_ylabel('share of the KV cache read', fontsize=9)
    lows = [p for loop in data['closed'].values() for step in loop['steps'] for p in step['p05'] if p is not None]
    axes[0][0].set_ylim(max(min([*lows, targets[0] - 0.1]) - 0.02, 0), 1.005)
    axes[1][0].set_ylim(bottom=0)
    for axis in axes.flat:
        axis.tick_params(labelsize=8, colors=INK)
        axis.grid(alpha=0.2)
        axis.spines[['top', 'right']].set_visible(False)
    figure.legend(shown.values(), shown.keys(), loc='outside lower center', ncols=3, fontsize=8, frameon=False)
    for out in outs:
        figure.savefig(out, dpi=140)
    plt.close(figure)
