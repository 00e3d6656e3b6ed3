"""The page: one HTML file that needs nothing else, neither network nor folder.

Numbers and texts go in as JSON, which scripts draw as SVG; headline and table of last values are plain HTML, so that
they show without scripts too. Texts of a run come from a model that may write anything: Python escapes them in HTML and
JSON, the script sets them as text alone, and a content security policy allows no script but the page's own.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from sparrow_jax.report.figures import SAMPLED_STEPS, figures
from sparrow_jax.report.headline import Card, cards
from sparrow_jax.report.logs import Run

MOST_BYTES = 3_000_000  # of the file
POINTS = 400  # of a curve; a chart is some 500 pixels wide
LEAST_POINTS = 10

_HERE = Path(__file__).parent
_SCRIPTS = ('charts.js', 'readout.js', 'page.js', 'controls.js')  # later ones use what earlier ones define


def render(runs: Sequence[Run]) -> str:
    """The report of one run, or of several that are laid over each other; at most `MOST_BYTES` in UTF-8.

    Raises ValueError where even `LEAST_POINTS` of each curve are too much.
    """
    points, sampled_steps = POINTS, SAMPLED_STEPS
    while points >= LEAST_POINTS:
        text = _text(runs, figures(runs, points, sampled_steps))
        size = len(text.encode())
        if size <= MOST_BYTES:
            return text
        share = min(0.9 * MOST_BYTES / size, 0.5)
        points, sampled_steps = int(points * share), max(int(sampled_steps * share), 1)
    raise ValueError(f'the logs have too many different metrics for a report of {MOST_BYTES:,} bytes')


def _text(runs: Sequence[Run], drawn: dict[str, Any]) -> str:
    script = '\n'.join((_HERE / name).read_text('utf-8') for name in _SCRIPTS)
    style = (_HERE / 'page.css').read_text('utf-8')
    names = ', '.join(run.name for run in runs)
    # A lone surrogate, which JSON can name, has no UTF-8.
    return (
        Template((_HERE / 'page.html').read_text('utf-8'))
        .substitute(
            title=escape(f'{names} · sparrow_jax'),
            heading=escape(names if len(runs) == 1 else f'{len(runs)} runs'),
            facts=''.join(_facts(i, run) for i, run in enumerate(runs)),
            notes=''.join(f'<p class="note">{escape(note)}</p>' for note in _notes(runs, drawn)),
            cards=''.join(_card(card, runs) for card in cards(runs)),
            table=_table(runs),
            class_='single' if len(runs) == 1 else 'several',
            data=json.dumps(drawn, ensure_ascii=False, allow_nan=False, separators=(',', ':')).replace('<', '\\u003c'),
            style=style,
            style_hash=_hash(style),
            script=script,
            script_hash=_hash(script),
        )
        .encode('utf-8', 'replace')
        .decode()
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _swatch(i: int, runs: Sequence[Run]) -> str:
    return f'<i class="swatch run-{i}"></i><span class="who">{escape(runs[i].name)}</span> ' if len(runs) > 1 else ''


def _facts(i: int, run: Run) -> str:
    source = run.setting('model.path') or ('random weights' if run.config else '')
    kind = run.setting('schedule.kind')
    said = [
        {'rl': 'reinforcement learning', 'supervised': 'supervised training'}.get(str(run.setting('phase'))),
        source and f'from {source}',
        run.setting('data.source') and f'on {run.setting("data.source")}',
        kind and ('dense sampler' if kind == 'dense' else f'{kind} schedule'),
        f'seed {run.setting("seed")}' if run.config else '',
        str(run.folder),
    ]
    text = ' · '.join(str(part) for part in said if part)
    return (
        f'<li><button type="button" class="run" data-run="{i}" aria-pressed="true"><i class="swatch run-{i}"></i>'
        f'{escape(run.name)}</button> <span>{escape(text)}</span></li>'
    )


def _notes(runs: Sequence[Run], drawn: dict[str, Any]) -> list[str]:
    notes = [f'{run.name}: {note}' if len(runs) > 1 else note for run in runs for note in run.notes]
    if drawn['width'] > 1:
        notes.append(
            f'Curves show means over {drawn["width"]:,} steps, to keep this page small; the band around them reaches '
            'from the least to the greatest. metrics.jsonl has every step.'
        )
    return notes


def _card(card: Card, runs: Sequence[Run]) -> str:
    marks = {'good': '<b class="good" title="good">✓</b> ', 'bad': '<b class="bad" title="look here">▲</b> ', '': ''}
    facts = ''.join(
        f'<div class="fact" data-run="{i}"><dd>{_swatch(i, runs)}<strong>{escape(fact.value)}</strong></dd>'
        f'<dd class="detail">{marks[fact.verdict]}{escape(fact.detail)}</dd></div>'
        for i, fact in enumerate(card.facts)
    )
    return f'<dl class="card"><dt>{escape(card.title)}</dt>{facts}<dd class="meaning">{escape(card.meaning)}</dd></dl>'


def _table(runs: Sequence[Run]) -> str:
    names = sorted({name for run in runs for name in run.metrics})
    head = ''.join(f'<th scope="col" colspan="2">{escape(run.name)}</th>' for run in runs)
    rows = []
    for name in names:
        cells = []
        for run in runs:
            steps, values = run.values(name)
            cells.append(f'<td>{values[-1]:.6g}</td><td>{steps[-1]}</td>' if len(values) else '<td>-</td><td>-</td>')
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{"".join(cells)}</tr>')
    under = '<th scope="col">last</th><th scope="col">step</th>' * len(runs)
    return (
        f'<table><thead><tr><th scope="col" rowspan="2">metric</th>{head}</tr><tr>{under}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table>'
    )
