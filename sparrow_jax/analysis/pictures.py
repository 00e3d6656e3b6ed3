"""The pictures, from the numbers of their JSON files alone: each function takes those of every source, by name."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from sparrow_jax.calibrate.plot import CHOSEN, FAINT, INK, MOST_PANELS, shades

Found = Mapping[str, Mapping[str, Any]]  # numbers by name of their source
BAND = 0.15  # opacity of an interval
TICKS = (1, 2, 3, 5)  # digits of a logarithmic axis of budgets or lengths
EXACT, ESTIMATE = '#3b6ea8', CHOSEN
LEAST_MOVE = 0.01  # of p05 over the budgets of a bin, to show it
HEADROOM = 1.08
SHOWN_GAP = 1e-5  # of 1 - alpha, from which on it is shown
MOST_BARS_WIDTH = 0.8  # of the distance between groups of bars


def skew(found: Found) -> Figure:
    figure, rows = _grid(found, 2, 'skew of alpha', widths=(3, 2), height=3.7)
    for (name, one), (left, right) in zip(found.items(), rows, strict=True):
        edges, highest = np.asarray(one['gap_edges']), 0.0
        sparse = [b for b in one['budgets'] if b['budget_tokens']]
        for row, colour in zip(one['budgets'], [*shades(len(sparse)), FAINT], strict=False):
            density = np.asarray(row['share_of_tokens']) / np.diff(np.log10(edges))
            label = f'{_budget(row)} ({row["share_above_0.999"]:.0%})'
            left.stairs(density, edges, color=colour, linewidth=1.3, label=label)
            highest = max(highest, density[edges[:-1] >= SHOWN_GAP].max())
            at = lambda value, density=density, edges=edges: float(
                density[min(max(int(np.searchsorted(edges, 1 - value)) - 1, 0), len(density) - 1)]
            )
            for mark, statistic in (('o', 'mean'), ('v', 'p05')):
                value = row[statistic][0]
                style = {'color': colour, 'markeredgecolor': INK, 'markersize': 6, 'linestyle': '', 'zorder': 3}
                left.plot(max(1 - value, edges[0]), at(value), marker=mark, **style)
        for mark, statistic in (('o', 'mean'), ('v', 'p05')):
            left.plot([], [], marker=mark, color='none', markeredgecolor=INK, linestyle='', label=statistic)
        left.set_xscale('log')
        left.set_xlim(SHOWN_GAP, 1)
        left.set_ylim(0, HEADROOM * highest)
        _label(left, f'{name}: {_group(one)}', '1 - alpha', 'share of tokens per decade')
        _below(left, 'budget, tokens (share of alphas above 0.999)', columns=5)
        budgets = [b['budget_tokens'] for b in sparse]
        for statistic, colour in (('mean', FAINT), ('p05', CHOSEN)):
            _band(right, budgets, [b[statistic] for b in sparse], colour, statistic)
        _log(right, budgets)
        span = one['span_over_budgets']
        moves = f'mean moves by {span["mean"]:.2f}, p05 by {span["p05"]:.2f}'
        _label(right, moves, 'budget, tokens', 'alpha, all lengths')
        right.legend(fontsize=8, frameon=False, loc='lower right')
    return figure


def by_length(found: Found) -> Figure:
    figure, axes = _row(found, 'p05 by cached length')
    for (name, one), axis in zip(found.items(), axes, strict=False):
        sparse = [b for b in one['budgets'] if b['budget_tokens']]
        for row, colour in zip(one['budgets'], [*shades(len(sparse)), INK], strict=False):
            lengths = [(b['from'] + b['to']) / 2 for b in row['bins']]
            style = ':' if not row['budget_tokens'] else '-'
            _band(axis, lengths, [b['p05'] for b in row['bins']], colour, _budget(row), style)
        if one['floor']:
            middle = [(b['from'] + b['to']) / 2 for b in one['floor']]
            _band(axis, middle, [b['p05'] for b in one['floor']], FAINT, 'dense sampler', '--')
        _label(axis, f'{name}: {_group(one)}', 'cached tokens', 'p05 of alpha')
        _outside(axis, 'budget, tokens')
    return figure


def training(found: Found) -> Figure:
    figure, rows = _grid(found, 2, 'p05 over the training steps', widths=(3, 2), height=3.6)
    for (name, one), (left, right) in zip(found.items(), rows, strict=True):
        for row, colour in zip(one['bins'], shades(len(one['bins'])), strict=True):
            steps = np.asarray(row['steps'])
            change = row['change']
            label = f'{row["from"]:,}-{row["to"]:,}: {change[0]:+.3f} ({change[1]:+.3f} to {change[2]:+.3f})'
            left.plot(steps, row['p05'], color=colour, marker='o', markersize=2.5, linewidth=0.8, alpha=0.6)
            left.plot(steps, row['intercept'] + row['slope'][0] * steps, color=colour, linewidth=1.8, label=label)
        word = 'drifts' if one['drifts'] else 'no drift beyond noise'
        _label(left, f'{name}: {one["schedule"]}, {word}', 'step', 'p05 of alpha')
        left.xaxis.get_major_locator().set_params(integer=True)
        _below(left, 'cached tokens: change over the run (interval)')
        distribution = one['distribution']
        if distribution is None:
            right.set_visible(False)
            continue
        edges = np.asarray(distribution['gap_edges'])
        for part, colour in (('first', FAINT), ('last', CHOSEN)):
            some = distribution[part]
            density = np.asarray(some['share_of_tokens']) / np.diff(np.log10(edges))
            low, high = some['steps']
            right.stairs(density, edges, color=colour, linewidth=1.5, label=f'steps {low} to {high}')
        right.set_xscale('log')
        _label(right, 'distribution, all lengths', '1 - alpha', 'share of tokens per decade')
        _below(right, None)
    return figure


def page_sizes(found: Found) -> Figure:
    return _cost_curves(found, 'pages of {}', 'page sizes')


def policies(found: Found) -> Figure:
    figure, axes = _row(found, 'selection policies at equal p05')
    for (name, one), axis in zip(found.items(), axes, strict=False):
        targets = [t for t, at in one['targets'].items() if at['least'] is not None]
        names = [row['of'] for row in one['targets'][targets[0]]['shares']] if targets else []
        width = MOST_BARS_WIDTH / max(len(names), 1)
        for i, (policy, colour) in enumerate(zip(names, shades(len(names)), strict=True)):
            shares = [one['targets'][t]['shares'][i]['share'] for t in targets]
            x = np.arange(len(targets)) + (i - (len(names) - 1) / 2) * width
            axis.bar(x, [s[0] for s in shares], width * 0.92, color=colour, label=policy)
            for at, (value, low, high) in zip(x, shares, strict=True):
                known = low is not None and high is not None
                if known:
                    axis.plot([at, at], [low, high], color=CHOSEN, linewidth=1.5)
                axis.text(at, high if known else value, f'{value:.0%}', ha='center', va='bottom', fontsize=7, color=INK)
        axis.set_xticks(range(len(targets)), targets)
        axis.margins(y=0.1)
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        _label(axis, f'{name}: pages of {one["page_tokens"]}', 'target of p05', 'share of the cache read')
        _below(axis, None, columns=3)
    return figure


def budget_by_length(found: Found) -> Figure:
    figure, rows = _grid(found, 2, 'budget by length', widths=(3, 2), height=3.6)
    for (name, one), (left, right) in zip(found.items(), rows, strict=True):
        lengths = [r['length'] for t in one['targets'].values() for r in t['bins']]
        for (target, at), colour in zip(one['targets'].items(), shades(len(one['targets'])), strict=True):
            there = [r for r in at['bins'] if r['budget_tokens'][0] is not None]
            if not there:
                continue
            x = [r['length'] for r in there]
            exponent = at['exponent']
            fitted = '' if exponent[0] is None else ': exponent {:.2f} ({:.2f} to {:.2f})'.format(*exponent)
            budgets = [r['budget_tokens'][0] for r in there]
            left.plot(x, budgets, color=colour, marker='o', markersize=4, linestyle='', label=f'{target}{fitted}')
            for r in there:
                _, low, high = r['budget_tokens']
                if low is not None and high is not None:
                    left.plot([r['length']] * 2, [low, high], color=colour, linewidth=1)
            if exponent[0] is not None:
                line = np.geomspace(min(x), max(x), 50)
                left.plot(line, at['factor'] * line ** exponent[0], color=colour, linewidth=1.2)
        _log(left, lengths)
        left.set_yscale('log')
        _plain(left.yaxis)
        _label(left, f'{name}: {_group(one)}', 'cached tokens', 'budget, tokens')
        _below(left, 'target of p05')
        if one['eta']:
            points = [(e['length'], e['eta']) for e in one['eta']]
            right.plot(*zip(*points, strict=True), color=CHOSEN, marker='o', markersize=4)
            right.margins(y=0.15)
            right.set_ylim(bottom=0)
            between = 'budget ~ (1 - p05)^-eta, from {:g} to {:g}'.format(*one['eta'][0]['between'])
            _label(right, between, 'cached tokens', 'eta')
        else:
            right.set_visible(False)
    return figure


def top20(found: Found) -> Figure:
    figure, rows = _grid(found, 3, 'exact alpha against the top-20 estimate', widths=(1, 1, 1), height=3.5)
    for (name, one), (left, middle, right) in zip(found.items(), rows, strict=True):
        budgets = [b['budget_tokens'] for b in one['budgets']]
        for kind, colour, said in (('alpha', EXACT, 'exact'), ('top20', ESTIMATE, 'top 20')):
            for statistic, style in (('mean', ':'), ('p05', '-')):
                values = [b[f'{kind}_{statistic}'] for b in one['budgets']]
                _band(left, budgets, values, colour, f'{said}, {statistic}', style)
        _log(left, budgets)
        left.set_ylim(0, 1.02)
        _label(left, f'{name}: {_group(one)}', 'budget, tokens', 'alpha, all lengths')
        left.legend(fontsize=7, frameon=False, loc='lower right')
        lines = [(f'{b["budget_tokens"]:,}', b, '-') for b in one['budgets']]
        if one['floor']:
            lines.append(('dense sampler', one['floor'], '--'))
        for (label, line, style), colour in zip(lines, [*shades(len(budgets)), FAINT], strict=False):
            known = [b for b in line['p05_difference_by_bin'] if b['length'] is not None]
            x, y = [b['length'] for b in known], [b['difference'] for b in known]
            middle.plot(x, y, color=colour, linestyle=style, marker='o', markersize=3, linewidth=1.3, label=label)
        middle.set_ylim(bottom=0)
        _label(middle, 'where they part: by length', 'cached tokens', 'p05 exact less p05 of top 20')
        _below(middle, 'budget, tokens', columns=4)
        cells = one['at_exact_alpha']
        x = [c['gap_exact'] for c in cells]
        right.plot(x, x, color=INK, linewidth=0.8, label='equal')
        _band(right, x, [c['gap_top20'] for c in cells], ESTIMATE, 'median, 5 to 95%')
        right.set_xscale('log')
        right.set_yscale('log')
        right.set_ylim(1e-6, 1.5)
        _label(right, 'where they part: by exact alpha', '1 - exact alpha of a token', '1 - its top-20 estimate')
        right.legend(fontsize=7, frameon=False, loc='lower right')
    return figure


def floor(found: Found) -> Figure:
    figure, axes = _row(found, 'what numbers alone cost')
    for (name, one), axis in zip(found.items(), axes, strict=False):
        for (kind, row), style in zip(one['floors'].items(), ('-', ':'), strict=False):
            x = [(b['from'] + b['to']) / 2 for b in row['bins']]
            mirrored = lambda name, row=row: [[1 - b[name][i] for i in (0, 2, 1)] for b in row['bins']]
            _band(axis, x, mirrored('p05'), EXACT, f'{kind}, p05', style)
            _band(axis, x, mirrored('mean'), FAINT, f'{kind}, mean', style)
            _band(axis, x, mirrored('top20_p05'), ESTIMATE, f'{kind}, p05 of top 20', style)
        axis.set_yscale('log')
        kind, row = next(iter(one['floors'].items()))
        _label(axis, f'{name}: p05 of the {kind} is {row["lost_of_p05"]:.2g} below 1', 'cached tokens', '1 - alpha')
        _below(axis, None)
    return figure


def _cost_curves(found: Found, label: str, title: str) -> Figure:
    shown = {name: _spread(_telling(one['curves'])) for name, one in found.items()}
    columns = 1 + max(len(bins) for bins in shown.values())
    figure, rows = _grid(found, columns, title, widths=(1,) * columns, height=3.5)
    for (name, one), axes in zip(found.items(), rows, strict=True):
        for curve, colour in zip(one['curves'], shades(len(one['curves'])), strict=True):
            said = label.format(curve['of'])
            points = curve['points']
            _band(axes[0], [p['share'] for p in points], [p['p05'] for p in points], colour, said)
            for axis, z in zip(axes[1:], shown[name], strict=False):
                there = [b for p in points for b in p['bins'] if b['bin'] == z]
                _band(axis, [b['share'] for b in there], [b['p05'] for b in there], colour, said)
                if there:
                    _label(axis, f'{there[0]["from"]:,} to {there[0]["to"]:,}', 'share of the cache read', '')
        for axis in axes:
            axis.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        for axis in axes[1 + len(shown[name]) :]:
            axis.set_visible(False)
        least = ', '.join(f'{t}: {at["least"]}' for t, at in one['targets'].items() if at['least'] is not None)
        best = f'\nleast read at p05 of {least}' if least else ''
        _label(axes[0], f'{name}: all lengths{best}', 'share of the cache read', 'p05 of alpha')
        axes[0].legend(fontsize=7, frameon=False, loc='lower right')
    return figure


def _telling(curves: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the bins in which p05 moves at all."""
    bins: dict[int, list[float]] = {}
    for b in (b for curve in curves for point in curve['points'] for b in point['bins']):
        bins.setdefault(b['bin'], []).append(b['p05'][0])
    return sorted(z for z, p05s in bins.items() if np.ptp(p05s) > LEAST_MOVE)


def _spread(known: Sequence[int]) -> list[int]:
    """A few of them, from first to last."""
    places = {round(x) for x in np.linspace(0, len(known) - 1, MOST_PANELS - 1)} if known else set()
    return [known[i] for i in sorted(places)]


def _grid(found: Found, columns: int, title: str, *, widths: Sequence[float], height: float) -> tuple[Figure, Any]:
    """A row of panels for each source. Not by pyplot, whose backend is the caller's."""
    figure = Figure(
        figsize=(1.0 + 3.3 * columns + (0.9 if columns < 3 else 0), 0.3 + height * len(found)), layout='constrained'
    )
    axes = figure.subplots(len(found), columns, squeeze=False, gridspec_kw={'width_ratios': widths})
    _plain_style(figure, axes.flat, title)
    return figure, axes


def _row(found: Found, title: str) -> tuple[Figure, Any]:
    """A panel for each source, with room for a legend."""
    columns = min(len(found), 2)
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(0.6 + 5.4 * columns, 0.3 + 3.7 * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False)
    _plain_style(figure, axes.flat, title)
    for axis in list(axes.flat)[len(found) :]:
        axis.set_visible(False)
    return figure, axes.flat


def _plain_style(figure: Figure, axes: Any, title: str) -> None:
    # Opaque, so that it can be read on a dark page too.
    figure.set_facecolor('white')
    figure.suptitle(title, fontsize=11, color=INK)
    for axis in axes:
        axis.tick_params(labelsize=8, colors=INK)
        axis.grid(alpha=0.2)
        axis.spines[['top', 'right']].set_visible(False)


def _band(axis: Any, x: Sequence[float], intervals: Sequence[Any], colour: Any, label: str, style: str = '-') -> None:
    """A line through values, and the interval of each where it is known."""
    value, low, high = np.asarray(intervals, float).reshape(-1, 3).T  # None becomes NaN
    axis.plot(x, value, color=colour, linestyle=style, linewidth=1.5, marker='o', markersize=3, label=label)
    axis.fill_between(x, low, high, color=colour, alpha=BAND, linewidth=0)


def _label(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=9, color=INK)
    axis.set_xlabel(x, fontsize=9, color=INK)
    axis.set_ylabel(y, fontsize=9, color=INK)


def _outside(axis: Any, title: str | None) -> None:
    place = {'loc': 'upper left', 'bbox_to_anchor': (1.0, 1.0)}
    axis.legend(fontsize=7.5, frameon=False, title=title, title_fontsize=7.5, **place)


def _below(axis: Any, title: str | None, columns: int = 2) -> None:
    place = {'loc': 'upper center', 'bbox_to_anchor': (0.5, -0.16), 'ncols': columns}
    axis.legend(fontsize=7, frameon=False, title=title, title_fontsize=7, **place)


def _log(axis: Any, values: Sequence[float]) -> None:
    if len(values) and max(values) > 2 * min(values):
        axis.set_xscale('log')
        _plain(axis.xaxis)


def _plain(axis: Any) -> None:
    """A logarithmic axis with whole numbers on it."""
    axis.set_major_locator(LogLocator(subs=TICKS))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:,.0f}'))
    axis.set_minor_formatter(NullFormatter())


def _budget(row: Mapping[str, Any]) -> str:
    return f'{row["budget_tokens"]:,}' if row['budget_tokens'] else 'every page'


def _group(one: Mapping[str, Any]) -> str:
    return f'{one["policy"]}, pages of {one["page_tokens"]}'
