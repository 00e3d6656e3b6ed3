"""python -m sparrow_jax.analysis --calibration=W[,W2] [--run=RUN[,B]] [--closed_loop=FILE] --out=DIR [--targets=...]

Pictures of how alpha behaves, and which of the paper's statements hold for it, from finished files alone: folders of
calibrations (with their `measured/`), of training runs at fixed budgets, and the JSON file of a closed loop. Writes

    skew.png
               distribution of 1 - alpha at every budget; mean and p05 over the budgets
    by_length.png
          p05 by cached length, with the floor
    training.png
           p05 over the steps of a run
    page_sizes.png
         p05 against the share of the cache read, for each page size
    budget_by_length.png   budgets that hold a target, with a power law
    top20.png
              exact alpha beside the estimate from 20 tokens
    policies.png
           what each selection policy reads at the same p05
    floor.png
              what numbers alone cost
    *.json
                 every number of the picture of that name
    summary.md
             the paper's statements, each with the rule by which it is judged

A picture whose input is not there is left out, and the console says why.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from sparrow_jax import commands
from sparrow_jax.analysis import alphas, costs, drift, pictures
from sparrow_jax.analysis.claims import markdown
from sparrow_jax.analysis.inputs import Calibration, ClosedLoop, Lacking, read_calibrations, read_closed_loop
from sparrow_jax.closed_loop import read_targets
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.json_files import without_nan
from sparrow_jax.report.logs import Run, read_runs
from sparrow_jax.workdir import empty_folder

TARGETS = '0.8,0.86,0.92'  # of the paper's schedules
SUMMARY = 'summary.md'
DPI = 110
FLAGS = {Calibration: '--calibration', Run: '--run', ClosedLoop: '--closed_loop'}

Source = Calibration | Run | ClosedLoop


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture: how its numbers come from each kind of source, and how it is drawn of them."""

    numbers: Mapping[type, Callable[[Any, Sequence[float]], dict[str, Any]]]
    draw: Callable[[pictures.Found], Any]


PICTURES = {
    'skew': Picture({Calibration: alphas.skew}, pictures.skew),
    'by_length': Picture({Calibration: alphas.by_length}, pictures.by_length),
    'training': Picture({Run: drift.training}, pictures.training),
    'page_sizes': Picture({Calibration: costs.page_sizes}, pictures.page_sizes),
    'budget_by_length': Picture({Calibration: costs.budget_by_length}, pictures.budget_by_length),
    'top20': Picture({Calibration: alphas.top20}, pictures.top20),
    'policies': Picture({Calibration: costs.policies, ClosedLoop: costs.policies_of_loop}, pictures.policies),
    'floor': Picture({Calibration: alphas.floor}, pictures.floor),
}


def analysis(workdir: str, calibration: str, run: str, closed_loop: str, out: str, targets: str) -> int:
    """Writes what can be drawn; returns the exit code."""
    if workdir:
        raise ConfigError(f'--workdir={workdir}: this command takes none; give --calibration, --run or --closed_loop')
    goals = read_targets(targets)
    sources: list[Source] = [*read_calibrations(calibration)] if calibration else []
    if run:
        sources += read_runs([part for part in run.split(',') if part], '--run')
    if closed_loop:
        sources.append(read_closed_loop(closed_loop))
    if not sources:
        raise ConfigError('--calibration: missing; give folders of calibrations, or --run, or --closed_loop')
    found, lacking = numbers(sources, goals)
    if not found:
        raise ConfigError('nothing can be drawn: ' + '; '.join(f'{name}: {why}' for name, why in lacking))
    text = markdown(found, lacking)
    drawn = {name: PICTURES[name].draw(of) for name, of in found.items()}
    folder = empty_folder(out, '--out')
    for name, of in found.items():
        drawn[name].savefig(folder / f'{name}.png', dpi=DPI)
        (folder / f'{name}.json').write_text(json.dumps(of, indent=1, allow_nan=False) + '\n')
    (folder / SUMMARY).write_text(text)
    with Console() as console:
        for name, why in lacking:
            console.warn(f'{name}.png: {why}')
        console.message(text)
        console.message(f'wrote {", ".join(f"{name}.png" for name in found)} and {SUMMARY} to {Path(out)}')
    return 0


def numbers(
    sources: Sequence[Source], targets: Sequence[float]
) -> tuple[dict[str, dict[str, Any]], list[tuple[str, str]]]:
    """The numbers of each picture by source, and of each picture that a source lacks something for, what."""
    found: dict[str, dict[str, Any]] = {}
    lacking = []
    for name, picture in PICTURES.items():
        there = [source for source in sources if type(source) in picture.numbers]
        if not there:
            lacking.append((name, f'not drawn, needs {" or ".join(FLAGS[kind] for kind in picture.numbers)}'))
        for source in there:
            try:
                of = picture.numbers[type(source)](source, targets)
            except Lacking as error:
                lacking.append((name, f'without {source.name}, which {error}'))
            else:
                found.setdefault(name, {})[source.name] = without_nan(of)
    return found, lacking


def _flags(values: flags.FlagValues) -> None:
    string = lambda name, default, what: flags.DEFINE_string(name, default, what, flag_values=values)
    string('calibration', '', 'folders of finished calibrations, with commas between')
    string('run', '', 'folders of training runs at a fixed budget, with commas between')
    string('closed_loop', '', 'a closed_loop.json')
    string('out', None, 'folder to write, absent or empty')
    string('targets', TARGETS, 'p05 of alpha at which costs are compared')


if __name__ == '__main__':
    commands.run(analysis, config_required=False, workdir_required=False, uses_jax=False, define_flags=_flags)
