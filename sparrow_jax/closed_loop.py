"""python -m sparrow_jax.closed_loop --config=configs/smollm2_long.py --out=closed_loop [--part=...] [--minutes=8]

Does the controller hold p05 where it should, and does it read more than it must? Sequences of forced length are sampled
as a training run samples them, weights unchanged, and after every step all sampled tokens are scored by the dense
policy: what is judged is p05 of all of them, not of the controller's probes.

    offline    fixed schedules; from them the best one for each target, with a budget of its own for each length bin
    closed     the controller, from the configuration's budgets, and from 8 times too small and too large ones
    policies   the best fixed schedules under the other ways of choosing pages

DIR/closed_loop.json is written anew after every step, and the same command goes on where it stopped; the picture and
the schedules of the best fixed budgets lie beside it.
"""

import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from sparrow_jax import closed_loop_plot, commands
from sparrow_jax.closed_loop_steps import Steps
from sparrow_jax.config import ConfigError, RunConfig, differing_fields, with_new_fields
from sparrow_jax.config_checks import POLICIES
from sparrow_jax.console import Console
from sparrow_jax.json_files import read_object
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.budget_search import least_budgets, rungs
from sparrow_jax.sparsity.controller import Controller
from sparrow_jax.sparsity.schedules import to_file
from sparrow_jax.workdir import write_atomically

PARTS = ('offline', 'closed', 'policies')
STARTS = ('config', 'small', 'large')
WRONG = 8  # times too small or too large
FIRST_RUNG = 4  # pages
REFINEMENTS = 2  # rollouts at the best budgets so far, which then become better known
FILE, PLOTS = 'closed_loop.json', ('closed_loop.png', 'closed_loop.svg')
WITHIN = 0.02  # of the target
MAY_CHANGE = ('log', 'steps', 'checkpoint', 'guard', 'evaluate', 'reward')  # between two calls with the same --out


class OutOfTime(Exception):
    """The next rollout would end too late."""


class Record:
    """The JSON file: what has been measured so far."""

    def __init__(self, folder: Path, run: RunConfig):
        self.file = folder / FILE
        kept = lambda config: {name: value for name, value in config.items() if name not in MAY_CHANGE}
        config = json.loads(json.dumps(dataclasses.asdict(run)))
        self.data: dict[str, Any] = {'config': config, 'offline': {}, 'best': {}, 'closed': {}}
        if self.file.exists():
            self.data |= read_object(self.file)
            self.data['config'] = with_new_fields(self.data['config'], str(self.file), run)
            if different := differing_fields(kept(self.data['config']), kept(config)):
                raise ConfigError(
                    f'--out={folder}: was begun with another configuration ({"; ".join(different)}); '
                    'give another folder'
                )

    def write(self) -> None:
        write_atomically(self.file, json.dumps(self.data, indent=1) + '\n')


class ClosedLoop:
    """The parts, over one record.

    Args:
        steps: makes them.
        record: what is there already.
        targets: of p05.
        end_s: of `time.perf_counter`, by which the last rollout should have ended.
        tell: called with a line about each finished rollout.
    """

    def __init__(
        self, steps: Steps, record: Record, targets: tuple[float, ...], end_s: float, tell: Callable[[str], None]
    ):
        self.steps, self.record, self.targets, self.tell = steps, record, targets, tell
        self.began, self.end_s, self.last_s = time.perf_counter(), end_s, 0.0
        self.most_Z = steps.engine.most_budgets()

    # ------------------------------------------------------------------ fixed schedules

    def offline(self, policy: str) -> None:
        """Rollouts of fixed schedules, then the best budgets for each target."""
        points = self.record.data['offline'].setdefault(policy, [])
        for pages in rungs(FIRST_RUNG, int(self.most_Z.max())):
            self.fixed(points, policy, f'{pages} pages', np.full(len(self.most_Z), pages))
        for refinement in range(REFINEMENTS):
            for target in self.targets:
                self.fixed(points, policy, f'{target} refined {refinement}', self.least(points, target))
        self.keep_best(policy)

    def other_policies(self) -> None:
        """Their best budgets are looked for near those of the configuration's policy."""
        own = self.steps.parts.schedule.policy.value
        best = self.record.data['best'].get(own, {})
        if missing := [t for t in self.targets if str(t) not in best]:
            raise ConfigError(
                f'--part=policies: --part=offline has not found budgets for {missing[0]} yet; run it first'
            )
        for policy in POLICIES:
            if policy == own:
                continue
            self.steps.use_policy(policy)
            points = self.record.data['offline'].setdefault(policy, [])
            near = {f'{target} as {own}': np.asarray(best[str(target)]['budget_pages']) for target in self.targets}
            least, most = near[f'{self.targets[0]} as {own}'], near[f'{self.targets[-1]} as {own}']
            # Beyond both ends, for a policy that needs fewer pages or more.
            near |= {'half the least': np.maximum(least // 2, 1), 'half as much again': most + most // 2}
            for name, budget_Z in near.items():
                self.fixed(points, policy, name, budget_Z)
            for target in self.targets:
                self.fixed(points, policy, f'{target} refined', self.least(points, target))
            self.keep_best(policy)

    def fixed(self, points: list[dict[str, Any]], policy: str, name: str, budget_Z: np.ndarray) -> None:
        """One rollout of a fixed schedule; the same prompts and keys for all, so that they differ by their budgets."""
        budget_Z = np.minimum(budget_Z, self.most_Z)
        if any(point['name'] == name for point in points):
            return
        with self.in_time():
            measured = self.steps.fixed(budget_Z)
        points.append({'name': name, 'budget_pages': budget_Z.tolist(), **measured})
        self.finished(f'{policy}, {name}', measured)

    def least(self, points: list[dict[str, Any]], target: float) -> np.ndarray:
        return least_budgets(
            [point['budget_pages'] for point in points], [_p05(point) for point in points], target, self.most_Z.tolist()
        )

    def keep_best(self, policy: str) -> None:
        points, schedule = self.record.data['offline'][policy], self.steps.schedule
        best = self.record.data['best'].setdefault(policy, {})
        for target in self.targets:
            budget_Z = self.least(points, target)
            best[str(target)] = {
                'budget_pages': budget_Z.tolist(),
                'kv_read_fraction': self.steps.read_fraction(budget_Z),
            }
            content = to_file(dataclasses.replace(schedule, budget_pages=tuple(budget_Z.tolist())))
            source = f'least budgets whose p05 is at least {target}, by python -m sparrow_jax.closed_loop'
            file = self.record.file.parent / f'schedule_{policy}_{target}.json'
            write_atomically(file, json.dumps({**content, 'source': source}, indent=1) + '\n')
        self.record.write()

    # ------------------------------------------------------------------ the controller

    def closed(self, starts: tuple[str, ...], number: int) -> None:
        """`number` steps under the controller for every target and start; the most telling ones first."""
        middle = self.targets[len(self.targets) // 2]
        order = [(target, start) for start in starts for target in self.targets]
        order.sort(key=lambda pair: pair[1] != 'config' and pair[0] != middle)
        for target, start in order:
            self.steps.hold(target)
            name = f'{target}/{start}'
            loop = self.record.data['closed'].setdefault(
                name, {'target': target, 'start': start, 'steps': [], 'controller': None}
            )
            controller = self.controller_of(target, start, loop)
            while len(loop['steps']) < number:
                step = len(loop['steps']) + 1
                with self.in_time():
                    controller, measured = self.steps.adaptive(controller, step)
                loop['steps'].append(measured)
                loop['controller'] = controllers.to_facts(controller)
                self.finished(f'target {target}, start {start}, step {step}', measured)

    def controller_of(self, target: float, start: str, loop: Mapping[str, Any]) -> Controller:
        """As the last step left it, or at its start."""
        fresh = self.steps.engine.start_controller()
        if loop['controller']:
            return self.steps.engine.placed(controllers.from_facts(loop['controller'], fresh))
        if start == 'config':
            return fresh
        policy = self.steps.parts.schedule.policy.value
        best = self.record.data['best'].get(policy, {}).get(str(target))
        if best is None:
            raise ConfigError(f'--starts={start}: no best budgets for {target} yet; run --part=offline first')
        pages_Z = np.asarray(best['budget_pages'], np.float64)
        wrong_Z = np.floor(pages_Z / WRONG) if start == 'small' else pages_Z * WRONG
        least = self.steps.control.least_budget
        return self.steps.begin_with(np.clip(wrong_Z, least, self.most_Z).astype(int))

    # ------------------------------------------------------------------ time and lines

    @contextmanager
    def in_time(self) -> Iterator[None]:
        """Around each rollout: begins none that would, if it takes as long as the one before, end too late."""
        start = time.perf_counter()
        if start + self.last_s > self.end_s:
            raise OutOfTime
        yield
        self.last_s = time.perf_counter() - start

    def finished(self, what: str, measured: Mapping[str, Any]) -> None:
        self.record.write()
        tails = ' '.join('-' if p is None else f'{p:.3f}' for p in measured['p05'])
        probes = f', probes {measured["probe_overhead"]:.1%}' if 'probe_overhead' in measured else ''
        pages = ' '.join(map(str, measured['budget_pages_after'])) if 'budget_pages_after' in measured else ''
        took = f'{measured["sampling_s"]:.1f} s + {measured["scoring_s"]:.1f} s{probes}'
        read = f'KV read {measured["kv_read_fraction"]:.3f}{", pages " + pages if pages else ""}'
        self.tell(f'{time.perf_counter() - self.began:5.0f} s  {what}: p05 {tails}, {read} ({took})')


def closed_loop(
    run: RunConfig, workdir: str, out: str, part: str, targets: str, starts: str, number: int, minutes: float
) -> int:
    """Measures what is asked for and not there yet; returns the exit code."""
    if workdir:
        raise ConfigError(f'--workdir={workdir}: this command takes none; --out names its folder')
    if run.schedule.kind != 'adaptive':
        raise ConfigError(f"schedule.kind={run.schedule.kind!r}: it is the controller that is measured; set 'adaptive'")
    chosen = _words('part', part, PARTS)
    goals, begins = read_targets(targets), _words('starts', starts, STARTS)
    if number < 1:
        raise ConfigError(f'--number={number}: must be at least 1')
    if minutes < 0:
        raise ConfigError(f'--minutes={minutes}: must be positive, or 0 for no limit')
    end_s = time.perf_counter() + 60 * minutes if minutes else math.inf
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    record = Record(folder, run)
    with Console() as console:
        console.status('reading the model')
        steps = Steps(run)
        record.data['facts'] = steps.facts() | {
            'command': f'python -m sparrow_jax.closed_loop {shlex.join(sys.argv[1:])}'
        }
        shown = ('model', 'device', 'jax', 'kernels', 'sequences', 'tokens', 'probes')
        console.start('Closed loop', {name: record.data['facts'][name] for name in shown})
        loop = ClosedLoop(steps, record, goals, end_s, console.message)
        steps.on_status = console.status
        try:
            if 'offline' in chosen:
                loop.offline(run.schedule.policy)
            if 'closed' in chosen:
                loop.closed(begins, number)
            if 'policies' in chosen:
                loop.other_policies()
        except OutOfTime:
            console.warn(f'--minutes={minutes:g} are over; the same command goes on from here')
        closed_loop_plot.plot(record.data, [folder / name for name in PLOTS], WITHIN)
        for line in summary(record.data):
            console.message(line)
        console.finish('Closed loop', {'written': str(record.file), 'plot': str(folder / PLOTS[0])})
    return 0


def read_targets(text: str) -> tuple[float, ...]:
    """Ascending; raises ConfigError for anything but numbers in (0, 1)."""
    try:
        found = tuple(sorted({float(part) for part in text.split(',')}))
    except ValueError:
        raise ConfigError(f'--targets={text}: must be numbers separated by commas') from None
    if not all(0 < target < 1 for target in found):
        raise ConfigError(f'--targets={text}: must be between 0 and 1')
    return found


def summary(data: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a person: every closed loop beside the best fixed schedule, and the policies side by side."""
    own = data['config']['schedule']['policy']
    if data['closed']:
        yield 'target  start   step  farthest bin  within 0.02  KV read  best fixed  ratio  probes'
    for loop in data['closed'].values():
        best = data['best'].get(own, {}).get(str(loop['target']), {}).get('kv_read_fraction')
        for step in loop['steps']:
            off = farthest(step, loop['target'])
            read, held = step['kv_read_fraction'], 'yes' if abs(off) <= WITHIN else 'no'
            fixed, ratio = ('-', '-') if best is None else (f'{best:.3f}', f'{read / best:.3f}')
            yield (
                f'{loop["target"]:<7} {loop["start"]:<7} {step["step"]:>4}  {off:>+12.3f}  {held:>11}  {read:>7.3f}  '
                f'{fixed:>10}  {ratio:>5}  {step["probe_overhead"]:>6.1%}'
            )
    if data['best']:
        yield 'policy         target  KV read of the best fixed schedule  budgets'
    for policy, targets in data['best'].items():
        for target, best in targets.items():
            yield f'{policy:<14} {target:<7} {best["kv_read_fraction"]:>34.3f}  {best["budget_pages"]}'


def farthest(step: Mapping[str, Any], target: float) -> float:
    """p05 less the target, of the bin that is farthest from it; bins at a limit of their budget do not count."""
    off = [p - target for p in _p05(step)]
    for z, (least, most) in enumerate(zip(step['at_least'], step['at_most'], strict=True)):
        if (least and off[z] > 0) or (most and off[z] < 0):
            off[z] = 0.0
    known = [value for value in off if np.isfinite(value)]
    return max(known, key=abs, default=float('nan'))


def _p05(measured: Mapping[str, Any]) -> list[float]:
    return [float('nan') if p is None else p for p in measured['p05']]


def _words(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(',')]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f'--{flag}={text}: {unknown[0]!r} is none of {", ".join(known)}')
    return tuple(name for name in known if name in names)


def _flags(values: flags.FlagValues) -> None:
    string = lambda name, default, what: flags.DEFINE_string(name, default, what, flag_values=values)
    string('out', 'closed_loop', 'folder for figures, plots and schedules')
    string('part', 'offline,closed', 'what to measure: offline, closed, policies')
    string('targets', '0.84,0.88,0.92', 'p05 of alpha that is to be held, exact scale')
    string('starts', 'config,small,large', 'budgets that the controller begins with')
    flags.DEFINE_integer('number', 5, 'steps under the controller from each start', flag_values=values)
    flags.DEFINE_float(
        'minutes', 0.0, 'from the start, after which no rollout should end; 0: no limit', flag_values=values
    )


if __name__ == '__main__':
    commands.run(closed_loop, workdir_required=False, define_flags=_flags)
