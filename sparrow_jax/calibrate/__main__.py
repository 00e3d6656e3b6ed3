"""python -m sparrow_jax.calibrate --config=configs/X.py --workdir=W

How much a model's sparse sampler may leave out: p01, p05, p10 and mean of alpha by length, for a sweep of budgets, page
sizes and selection policies, and the schedule that holds p05 at a target. `configs/base.py`, section `calibrate`.

Sequences are sampled once by the dense policy, and each budget then takes one teacher-forced pass over them (or texts
are given, or every budget samples anew; what was done stands in the output). W/calibration.json has all figures,
W/schedule.json is what `schedule.kind` = 'file' reads. The same command goes on where it stopped.
"""

import dataclasses
import hashlib
import time
from pathlib import Path
from typing import Any

import jax

from sparrow_jax import commands
from sparrow_jax.assembly import Parts, assemble
from sparrow_jax.calibrate.contexts import make_requests, read_texts
from sparrow_jax.calibrate.measured import Measured
from sparrow_jax.calibrate.passes import choose_passes_kernels
from sparrow_jax.calibrate.plot import plot
from sparrow_jax.calibrate.results import FILE, HOW, SCHEDULE, Point, Results, origin
from sparrow_jax.calibrate.summary import finished, table
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.console import Column, Console
from sparrow_jax.models.identity import model_hash
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.sparsity.schedules import EVERY_PAGE

DEFAULT_BUDGETS = 6  # halves of the longest sequence
COLUMNS = (  # ranks above those that the end block shows curves of: points are no course of time
    Column('policy', 'policy', rank=6),
    Column('page', 'page_tokens', 'count', 4),
    Column('budget', 'budget_tokens', 'count', 3),
    Column('p05', 'p05', '.3f', 3),
    Column('worst bin', 'worst', '.3f', 3),
    Column('at least', 'worst_low', '.3f', 4),
    Column('p01', 'p01', '.3f', 5),
    Column('mean', 'mean', '.4f', 6),
    Column('kv read', 'kv_read', 'percent', 4),
    Column('time', 'seconds', 'time', 5),
    Column('left', 'left', 'time', 3),
)


def calibrate(run: RunConfig, workdir: str) -> int:
    """Measures what is not measured yet and writes the results; returns the exit code."""
    if run.parallel.distributed != 'off':
        raise ConfigError(
            f'parallel.distributed={run.parallel.distributed!r}: a calibration runs in one process, on all of its '
            "devices; set it to 'off'"
        )
    began = time.perf_counter()
    run = sized(run)
    points = sweep(run)
    parts = assemble(run, trains=False, samples=not run.calibrate.texts)
    kernels, why = choose_passes_kernels(parts)
    given = read_texts(run, parts.encoder) if run.calibrate.texts else None
    requests = [] if given else make_requests(run, parts.encoder)
    results = Results(workdir, settings(run, parts, str(kernels)))
    with Console(steps=len(points), columns=COLUMNS) as console:
        facts = {
            'model': f'{run.model.path or "random weights"}, hash {results.settings["model_hash"][:12]}',
            'device': f'{jax.device_count()} x {jax.devices()[0].device_kind}',
            'kernels': f'{kernels} ({why})',
            'contexts': HOW[origin(run)],
            'sequences': f'{run.calibrate.sequences} of up to {run.rollout.max_response_tokens:,} response tokens',
            'work directory': str(results.path),
        }
        console.start('Calibration', facts)
        measured = Measured(parts, results, console)
        try:
            measured.prepare(given, requests)
            for number, point in enumerate(points, start=1):
                measured.point(point, number, len(points))
            found = finished(run, parts, measured, points, facts)
        except KeyboardInterrupt:
            console.message('Stopped; what is measured is kept, and the same command goes on from here.')
            raise
        found['facts']['seconds'] = round(time.perf_counter() - began, 1)
        for name, content in found['schedules'].items():
            results.write(name, content)
        results.write(FILE, {'settings': results.settings, **found})
        plots = plot(found, results.path)
        for line in table(found):
            console.message(line)
        # The configuration's own policy and page size, where they are in the sweep.
        first = next((c for c in found['chosen'] if c['file'] == SCHEDULE), found['chosen'][0])
        console.finish(
            'Calibration',
            {
                'schedules': ', '.join(str(results.path / name) for name in found['schedules']),
                'figures': str(results.path / FILE),
                'plots': ', '.join(map(str, plots)),
                'use it': use(run, first, results.path / first['file']),
            },
        )
    return 0


def use(run: RunConfig, chosen: dict[str, Any], file: Path) -> str:
    """Flags by which a run takes a schedule."""
    flags = {'schedule.kind': 'file', 'schedule.path': file}
    if chosen['page_tokens'] != run.rollout.page_tokens:
        flags['rollout.page_tokens'] = chosen['page_tokens']
    if chosen['policy'] != run.schedule.policy:
        flags['schedule.policy'] = chosen['policy']
    return ' '.join(f'--config.{name}={value}' for name, value in flags.items())


def sized(run: RunConfig) -> RunConfig:
    """The configuration as the passes and the sampler take it: no longer than asked for, no schedule of its own."""
    c, r = run.calibrate, run.rollout
    shards = meshes.axis_sizes(run.parallel, jax.device_count())
    whole = shards['data'] * shards['fsdp']
    slots = min(r.slots, -(-c.sequences // whole) * whole)
    rollout = dataclasses.replace(
        r, slots=slots, max_response_tokens=c.response_tokens or r.max_response_tokens, samples_per_prompt=1
    )
    return dataclasses.replace(
        run,
        rollout=rollout,
        schedule=dataclasses.replace(run.schedule, kind='fixed', path='', budget_pages=EVERY_PAGE),
        mismatch=dataclasses.replace(run.mismatch, every_steps=1),
        learner=dataclasses.replace(run.learner, row_tokens=0),
    )


def sweep(run: RunConfig) -> list[Point]:
    """What is to be measured; the pass over every page comes first."""
    c = run.calibrate
    policies, sizes = c.policies or (run.schedule.policy,), c.page_tokens or (run.rollout.page_tokens,)
    budgets = sorted(c.budget_tokens) or default_budgets(run, max(sizes))
    points = [Point(policy, size, budget) for policy in policies for size in sizes for budget in budgets]
    if c.contexts == 'sparse_samples':
        return points
    return [Point(policies[0], sizes[0], 0), *points]


def default_budgets(run: RunConfig, page_tokens: int) -> list[int]:
    """Tokens, ascending: half of the longest sequence, a quarter and so on, in whole pages."""
    longest = run.rollout.max_prompt_tokens + run.rollout.max_response_tokens
    return sorted({max(longest >> i, page_tokens) // page_tokens * page_tokens for i in range(1, DEFAULT_BUDGETS + 1)})


def settings(run: RunConfig, parts: Parts, kernels: str) -> dict[str, Any]:
    """All that decides what a point gives."""
    c, r, s = run.calibrate, run.rollout, run.schedule
    sampled = {
        'seed': run.seed,
        'forced_lengths': c.forced_lengths,
        'prompts': c.prompts and _file_hash(c.prompts),
        'data': None if c.prompts else dataclasses.asdict(run.data) | {'cache_dir': ''},
        'tokenizer': dataclasses.asdict(run.tokenizer),
    }
    return {
        'model': run.model.path or 'random weights',
        'model_hash': model_hash(run.model, run.seed),
        'dtype': run.model.compute_dtype,
        'param_dtype': run.model.param_dtype,
        'temperature': r.temperature,
        'kernels': kernels,
        'contexts': origin(run),
        'sequences': c.sequences,
        'max_prompt_tokens': r.max_prompt_tokens,
        'response_tokens': r.max_response_tokens,
        'bin_width_tokens': run.mismatch.bin_width_tokens,
        'reserved_first_pages': s.reserved_first_pages,
        'reserved_last_pages': s.reserved_last_pages,
        'dense_layers': list(parts.schedule.dense_layers),
        **({'texts': _file_hash(c.texts)} if c.texts else sampled),
    }


def _file_hash(path: str) -> str:
    return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()


if __name__ == '__main__':
    commands.run(calibrate)
