"""python -m sparrow_jax.compare_runs --runs=A,B,... --out=DIR [--margin=0.05]

Compares the runs of one experiment from their logs alone: arms (what a sampler was told) against the dense one, each
with any number of seeds. Names of folders may have wildcards (`'runs/stability/*_*'`, in quotation marks). Writes

    comparison.md     a table of arms, and which measure of a sampler told stable runs from the others
    comparison.png    the same over the steps: thin lines are seeds, thick ones their mean
    comparison.json   every number of it

What counts as stable, and over which steps measures are means, stands in `run_outcomes`.
"""

import dataclasses
import glob
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from absl import flags

from sparrow_jax import commands
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.json_files import without_nan
from sparrow_jax.report.logs import Run, read_runs
from sparrow_jax.run_outcomes import (
    EARLY_STEPS,
    INTERVAL,
    LEAST_LENGTH_SHARE,
    Outcome,
    Ranking,
    differing_settings,
    outcomes,
    rank,
)
from sparrow_jax.workdir import empty_folder

MARGIN = 0.05
NONE = '-'
MOST_NAMED = 6  # settings, of those that differ


def compare_runs(workdir: str, runs: str, out: str, margin: float) -> int:
    """Writes the comparison; returns the exit code."""
    del workdir
    if not 0 <= margin < 1:
        raise ConfigError(f'--margin={margin}: must be from 0 to below 1')
    logs = _read(runs)
    found = outcomes(logs, margin)
    rankings = rank(found)
    notes = _notes(logs, found, margin)
    folder = empty_folder(out, '--out')
    text = markdown(found, rankings, notes)
    (folder / 'comparison.md').write_text(text)
    facts = {
        'margin': margin,
        'runs': [dataclasses.asdict(one) for one in found],
        'rankings': [dataclasses.asdict(one) for one in rankings],
        'notes': notes,
    }
    (folder / 'comparison.json').write_text(json.dumps(without_nan(facts), indent=2) + '\n')
    from sparrow_jax.compare_runs_plot import plot

    plot(logs, found, folder / 'comparison.png')
    with Console() as console:
        console.message(text)
        console.message(f'wrote {folder / "comparison.md"}, and .png and .json beside it')
    return 0


def markdown(found: Sequence[Outcome], rankings: Sequence[Ranking], notes: Sequence[str]) -> str:
    """Both tables, with what they can and cannot say below them."""
    lines = _head(
        'arm',
        'seeds',
        'stable',
        'reward',
        'held-out accuracy',
        'response, tokens',
        'p05',
        'worst bin',
        'mean alpha',
        'pages read',
        'KV read',
        'rollout, s',
    )
    for arm in dict.fromkeys(one.arm for one in found):
        of = [one for one in found if one.arm == arm]
        alpha = [_mean([one.measures[name] for one in of], '.4f') for name in of[0].measures]
        lines.append(
            f'| {arm} | {len(of)} | {sum(one.stable for one in of)} / {len(of)} '
            f'| {_mean([one.reward_last for one in of], ".3f")} '
            f'| {_mean([one.accuracy_first for one in of], ".3f")} → {_spread([one.accuracy_last for one in of])} '
            f'| {_mean([one.length_first for one in of], ".0f")} → {_mean([one.length_last for one in of], ".0f")} '
            f'| {" | ".join(alpha)} | {_mean([one.pages_read for one in of], ".1f")} '
            f'| {_mean([one.kv_read_fraction for one in of], ".2f")} '
            f'| {_mean([one.rollout_s for one in of], ".2f")} |'
        )
    lines += [
        '',
        *_head(
            f'measure of the first {EARLY_STEPS} steps',
            'AUC, stable against not',
            f'{INTERVAL[1] - INTERVAL[0]}% interval over arms',
            'rank correlation with final accuracy',
            'with change of length',
        ),
    ]
    for one in rankings:
        low, high = one.interval
        interval = NONE if math.isnan(low) else f'{low:.2f} to {high:.2f}'
        auc = NONE if math.isnan(one.auc) else f'{one.auc:.3f}'
        lines.append(f'| {one.measure} | {auc} | {interval} | {_signed(one.accuracy)} | {_signed(one.length)} |')
    return '\n'.join([*lines, '', *(f'* {note}' for note in notes)]) + '\n'


def _read(runs: str) -> list[Run]:
    folders: list[str] = []
    for part in filter(None, (part.strip() for part in runs.split(','))):
        matches = sorted(glob.glob(str(Path(part).expanduser()))) if glob.has_magic(part) else [part]
        if not matches:
            raise ConfigError(f'--runs={part}: matches no folder')
        folders += matches
    if len(folders) < 2:
        raise ConfigError(f'--runs={runs}: names {len(folders)} runs; a comparison needs at least two')
    return read_runs(folders, '--runs')


def _notes(logs: Sequence[Run], found: Sequence[Outcome], margin: float) -> list[str]:
    sparse = [one for one in found if one.arm != 'dense']
    arms, unstable = len({one.arm for one in sparse}), sum(not one.stable for one in sparse)
    notes = [
        f'Stable: held-out accuracy of the dense policy at most {margin} below the mean of the dense runs, and '
        f'responses at least {LEAST_LENGTH_SHARE} times as long as theirs, both at the end. {unstable} of '
        f'{len(sparse)} sparse runs are not.',
        f'Dense runs say what stable is and are not ranked. The {len(sparse)} others are {arms} arms: seeds of an arm '
        'read alike and are no further evidence, so the interval draws arms. With fewer than some ten arms it is wide, '
        'and two measures whose intervals overlap are not told apart.',
    ]
    if unstable in (0, len(sparse)):
        notes.append('All sparse runs came out alike: no measure can tell them apart, and none is ranked.')
    steps = sorted({one.steps for one in found})
    if len(steps) > 1:
        notes.append(
            f'The runs are of different lengths, {steps[0]} to {steps[-1]} steps: some are under way or stopped.'
        )
    if differing := differing_settings(logs):
        rest = f' and {len(differing) - MOST_NAMED} more' if len(differing) > MOST_NAMED else ''
        notes.append(f'They also differ in {", ".join(differing[:MOST_NAMED])}{rest}, which may be what is seen here.')
    return notes


def _head(*titles: str) -> list[str]:
    return [f'| {" | ".join(titles)} |', f'|{"---|" * len(titles)}']


def _signed(value: float) -> str:
    return NONE if math.isnan(value) else f'{value:+.2f}'


def _mean(values: Sequence[float], form: str) -> str:
    mean = float(np.mean(values))
    return NONE if math.isnan(mean) else f'{mean:{form}}'


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f'{values[0]:.3f}'
    return f'{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}'


def _flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string('runs', None, 'folders of runs, with commas between; wildcards may stand', flag_values=values)
    flags.DEFINE_string('out', None, 'folder to write, absent or empty', flag_values=values)
    flags.DEFINE_float(
        'margin', MARGIN, 'of held-out accuracy that a stable run may end below the dense ones', flag_values=values
    )


if __name__ == '__main__':
    commands.run(compare_runs, config_required=False, workdir_required=False, uses_jax=False, define_flags=_flags)
