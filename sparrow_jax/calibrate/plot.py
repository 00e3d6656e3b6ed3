"""The pictures of a calibration, from the figures of its JSON file alone.

p05_by_length.png    p05 against cached length for every budget, floor and target beside it
cost.png             p05 against the bytes that a token reads, a line for each page size and policy
alpha.png            the distribution of alpha at every budget, and the Beta distribution of its tail
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from sparrow_jax.sparsity.tail import CELLS, TAIL_TOP, BetaTail, gap_edges

INK, FAINT, CHOSEN = '#333333', '#9a9a9a', '#c8553d'
MOST_PANELS = 4  # of a row
LOG_FROM = 8  # times the least cost, that the largest must be for a logarithmic axis
LEFT_OF_VIEW = 0.002  # of the tail's tokens
SHOWN_CELLS = 8  # of the histogram in one bar


def plot(found: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes the pictures; their paths."""
    pictures = {
        'p05_by_length.png': _by_length(found),
        'cost.png': _cost(found),
        'alpha.png': _alpha(found),
    }
    written = []
    for name, figure in pictures.items():
        if figure is not None:
            figure.savefig(folder / name, dpi=130)
            written.append(folder / name)
    return written


def _by_length(found: Mapping[str, Any]) -> Any:
    groups = _groups(found)
    figure, axes = panels(len(groups), height=3.6, sharey=True)
    budgets = sorted({p['budget_tokens'] for p in found['points'] if not p['every_page']})
    colours = dict(zip(budgets, shades(len(budgets)), strict=True))
    for axis, ((policy, page), points) in zip(axes, groups.items(), strict=False):
        for point in points:
            if point['every_page']:
                _line(axis, point['bins'], INK, 'every page', linestyle=':')
            else:
                _line(axis, point['bins'], colours[point['budget_tokens']], f'{point["budget_tokens"]:,}')
        for chosen in found['chosen']:
            if (chosen['policy'], chosen['page_tokens']) == (policy, page):
                _line(axis, chosen['bins'], CHOSEN, 'schedule', linestyle='--')
        if found['dense_floor']:
            _line(axis, found['dense_floor']['bins'], FAINT, 'dense sampler', linestyle=':')
        axis.axhline(found['facts']['target_p05'], color=INK, linewidth=0.9)
        axis.set_title(f'{policy}, pages of {page}', fontsize=10, color=INK)
        axis.set_xlabel('cached tokens', fontsize=9)
    for axis in axes[:: min(len(groups), MOST_PANELS)]:
        axis.set_ylabel('p05 of alpha', fontsize=9)
    named = {label: line for axis in axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    where = {'loc': 'outside right upper', 'title': 'budget, tokens'}
    figure.legend(named.values(), named.keys(), **where, fontsize=8, title_fontsize=8, frameon=False)
    return figure


def _line(axis: Any, bins: Sequence[Mapping[str, Any]], colour: Any, name: str, linestyle: str = '-') -> None:
    known = [b for b in bins if b['enough']]
    if not known:
        return
    middle = [(b['from'] + b['to']) / 2 for b in known]
    value, low, high = zip(*(b['alpha']['p05'] for b in known), strict=True)
    axis.plot(middle, value, color=colour, linestyle=linestyle, linewidth=1.5, marker='o', markersize=3, label=name)
    axis.fill_between(middle, low, high, color=colour, alpha=0.15, linewidth=0)


def _cost(found: Mapping[str, Any]) -> Any:
    groups = {key: [p for p in points if not p['every_page']] for key, points in _groups(found).items()}
    longest: Sequence[Any] = max((p['bins'] for points in groups.values() for p in points), key=len, default=[])
    known = [z for z, b in enumerate(longest) if b['enough']]
    if not known:
        return None
    shown = [known[i] for i in sorted({round(x) for x in np.linspace(0, len(known) - 1, MOST_PANELS)})]
    figure, axes = panels(len(shown), height=3.4, sharey=True)
    for axis, z in zip(axes, shown, strict=False):
        costs: list[float] = []
        for ((policy, page), points), colour in zip(groups.items(), shades(len(groups)), strict=True):
            there = [p['bins'][z] for p in points if z < len(p['bins']) and p['bins'][z]['enough']]
            cost = [b['kv_bytes_per_token'] / 1e6 for b in there]
            costs += cost
            axis.plot(
                cost,
                [b['alpha']['p05'][0] for b in there],
                color=colour,
                marker='o',
                markersize=3.5,
                label=f'{policy}, pages of {page}',
            )
        axis.axhline(found['facts']['target_p05'], color=INK, linewidth=0.9)
        axis.set_title(f'{longest[z]["from"]:,} to {longest[z]["to"]:,} cached tokens', fontsize=10, color=INK)
        axis.set_xlabel('MB of keys, values and landmarks a token', fontsize=9)
        if costs and max(costs) > LOG_FROM * min(costs):
            axis.set_xscale('log')
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.xaxis.set_major_formatter('{x:g}')
            axis.xaxis.set_minor_formatter('')
    axes[0].set_ylabel('p05 of alpha', fontsize=9)
    axes[0].legend(fontsize=7, frameon=False, loc='lower right')
    return figure


def _alpha(found: Mapping[str, Any]) -> Any:
    (policy, page), points = next(iter(_groups(found).items()))
    points = [p for p in points if not p['every_page']]
    if not points:
        return None
    figure, axes = panels(len(points), height=2.9, sharey=False)
    edges = 1 - gap_edges()[::-1]  # of alpha, ascending
    for axis, point in zip(axes, points, strict=False):
        described = point['all']['alpha']
        counts_X = np.zeros(CELLS)
        counts_X[described['histogram']['cells']] = described['histogram']['counts']
        counts, bars = counts_X[::-1].reshape(-1, SHOWN_CELLS).sum(axis=1), edges[::SHOWN_CELLS]
        inside = bars[1:] <= TAIL_TOP
        width = np.diff(bars)[inside]
        total = counts[inside].sum()
        axis.bar(bars[:-1][inside], counts[inside] / max(total, 1) / width, width, align='edge', color='#a9c3de')
        title = f'{point["budget_tokens"]:,} tokens'
        if described['beta']:
            beta = BetaTail(**described['beta'])
            axis.plot((bars[:-1] + bars[1:])[inside] / 2, np.diff(beta.cdf(bars))[inside] / width, color=CHOSEN)
            title += f'\nBeta({beta.a:.2f}, {beta.b:.2f}), KS {beta.ks:.3f}, {beta.share:.0%} in the tail'
        axis.set_title(title, fontsize=8, color=INK)
        axis.set_xlabel('alpha', fontsize=8)
        below = np.cumsum(counts[inside]) > LEFT_OF_VIEW * total
        axis.set_xlim(bars[:-1][inside][below][0] if below.any() else 0, 1)
    axes[0].set_ylabel('density below 0.999', fontsize=8)
    figure.suptitle(f'{policy}, pages of {page}, all lengths', fontsize=9, color=INK)
    return figure


def _groups(found: Mapping[str, Any]) -> dict[tuple[str, int], list[Mapping[str, Any]]]:
    """Points by policy and page size, budgets ascending, every page last."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for point in sorted(found['points'], key=lambda p: p['every_page']):
        groups.setdefault((point['policy'], point['page_tokens']), []).append(point)
    return groups


def panels(number: int, *, height: float, sharey: bool) -> tuple[Any, list[Any]]:
    columns = min(number, MOST_PANELS)
    rows = -(-number // columns)
    # Not by pyplot, whose backend is the caller's: a notebook goes on to draw pictures of its own.
    figure = Figure(figsize=(0.6 + 3.6 * columns, height * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey)
    flat = list(axes.flat)
    for axis in flat:
        axis.tick_params(labelsize=8, colors=INK)
        axis.grid(alpha=0.2)
        axis.spines[['top', 'right']].set_visible(False)
    for axis in flat[number:]:
        axis.set_visible(False)
    return figure, flat


def shades(number: int) -> list[Any]:
    return [matplotlib.colormaps['viridis'](x) for x in np.linspace(0.1, 0.85, number)]
