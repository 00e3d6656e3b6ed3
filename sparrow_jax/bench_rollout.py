"""python -m sparrow_jax.bench_rollout --config=configs/X.py [--config.field=value ...] [--slots=16,32] ...

Decode speed of the dense and of the sparse sampler, in one run: milliseconds of a step for each number of slots, cached
tokens and pages read, beside the time that reading the bytes takes at best, and what the parts of a step take alone.
Weights of the model's shape and everything in the cache are random; no checkpoint, tokenizer or data is read. The
figures go to a JSON file, which is written anew after every row.

With --lengths=FILE.json it times whole rollouts instead, responses with forced lengths, first by the dense sampler (its
figures go to NAME.dense.json), then by the sparse one; --modes takes one alone: see `sparrow_jax.whole_rollout`.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from absl import flags

from pallas_kernels.bench import CEILING, why_no_file
from sparrow_jax import commands, memory
from sparrow_jax.bench_setup import Setup, dense_schedule, make_setup, measured_facts, mode_of, model_name, start
from sparrow_jax.config import ConfigError, RolloutConfig, RunConfig
from sparrow_jax.console import Console
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.engine import Engine
from sparrow_jax.rollout.step_times import FullSlots, StepParts, segment_end, step_seconds
from sparrow_jax.sparsity.schedules import Schedule
from sparrow_jax.step_reads import step_bytes, weight_bytes
from sparrow_jax.whole_rollout import bench_whole_rollout
from sparrow_jax.workdir import write_atomically

MODES = ('dense', 'sparse')
# Where the flags are left out and the configuration has room for them.
USUAL_SLOTS, USUAL_CACHED_TOKENS, USUAL_PAGES_READ = (16, 32), (16_384, 30_720), (64, 256)
DEVICE_MEMORY = '0.95'  # share of a GPU that JAX takes: the pool may need more than its default, three quarters
BREAKDOWN = ('attention', 'select', 'matmuls', 'sampling', 'cache_write', 'other')
TABLE = '{:>5} {:>7} {:>6} {:>5} {:>8} {:>9} {:>8} {:>5} {:>5} {:>7} ' + ' {:>6}' * len(BREAKDOWN)
HEADER = ('slots', 'cached', 'mode', 'pages', 'ms/step', 'tokens/s', 'limit ms', 'share', 'TB/s', 'x dense')
BREAKDOWN_HEADER = ('attend', 'select', 'matmul', 'sample', 'write', 'other')


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cases: every combination of its values; dense ones have no `pages_read`."""

    slots: tuple[int, ...]
    cached_tokens: tuple[int, ...]
    modes: tuple[str, ...]
    pages_read: tuple[int, ...]

    @property
    def cases(self) -> int:
        of_mode = {'dense': 1, 'sparse': len(self.pages_read)}
        return len(self.slots) * len(self.cached_tokens) * sum(of_mode[mode] for mode in self.modes)


def step_rollout(setup: Setup, slots: int, cached_tokens: int) -> RolloutConfig:
    """Of the sampler with a pool for so many slots, each at so many tokens and a segment's further ones."""
    r = setup.run.rollout
    pages = -(-segment_end(cached_tokens, r.segment_steps) // r.page_tokens)
    per_shard = -(-slots // meshes.batch_shards(setup.mesh))
    return dataclasses.replace(r, slots=slots, pool_pages=per_shard * pages)


def step_schedules(setup: Setup, grid: Grid) -> list[Schedule]:
    """The dense one first: the others are compared with it."""
    any_length = dataclasses.replace(setup.schedule, bin_width_tokens=_longest_tokens(setup) + 1)
    found = [dense_schedule(any_length)] if 'dense' in grid.modes else []
    if 'sparse' in grid.modes:
        for pages in grid.pages_read:
            budget = max(pages - setup.schedule.reserved_pages, 0)
            found.append(dataclasses.replace(any_length, kind='fixed', budget_pages=(budget,)))
    return found


def any_engine(setup: Setup, grid: Grid) -> Engine:
    """For what is the same in all of them."""
    return setup.engine(step_rollout(setup, grid.slots[0], grid.cached_tokens[0]), step_schedules(setup, grid)[0])


def bench_rollout(
    run: RunConfig,
    workdir: str,
    slots: str,
    cached_tokens: str,
    modes: str,
    pages_read: str,
    lengths: str,
    beside: str,
    learner: str,
    out: str,
) -> int:
    """Measures every case, or whole rollouts, and writes the figures; returns the exit code."""
    if workdir:
        raise ConfigError(f'--workdir={workdir}: this command takes none; --out names its file')
    setup = make_setup(run)
    if lengths:
        for flag, value in (('cached_tokens', cached_tokens), ('pages_read', pages_read)):
            if value:
                raise ConfigError(f'--{flag}={value}: is for single steps; with --lengths leave it out')
        return bench_whole_rollout(setup, lengths, _numbers('slots', slots), _modes(modes), beside, learner, Path(out))
    for flag, value in (('beside', beside), ('learner', learner)):
        if value:
            raise ConfigError(f'--{flag}={value}: compares whole rollouts; give --lengths, too')
    grid = read_grid(setup, slots, cached_tokens, modes, pages_read)
    _check_memory(setup, grid)
    if why_not := why_no_file(Path(out)):
        raise ConfigError(f'--out={out}: {why_not}')
    with Console() as console:
        console.status('measuring the read bandwidth')
        facts = measured_facts(setup, any_engine(setup, grid))
        start(console, 'Decode speed', facts)
        console.message(TABLE.format(*HEADER, *BREAKDOWN_HEADER))
        rows: list[dict[str, Any]] = []

        def keep(row: dict[str, Any]) -> None:
            rows.append(row)
            console.message(_line(row))
            write_atomically(Path(out), json.dumps({**facts, 'rows': rows}, indent=1) + '\n')

        measure(setup, grid, keep, lambda what: console.status(what, done=len(rows), total=grid.cases, unit='cases'))
        console.finish('Decode speed', {'written': out})
    return 0


def measure(setup: Setup, grid: Grid, keep: Callable[[dict[str, Any]], None], tell: Callable[[str], None]) -> None:
    """Measures case after case.

    Args:
        keep: called with each row of the result.
        tell: called with what is being done.
    """
    tell('making weights')
    weights = setup.random_weights(any_engine(setup, grid))
    longest = max(grid.cached_tokens)
    for slots in grid.slots:
        tell(f'filling {slots} slots')
        rollout = step_rollout(setup, slots, longest)
        parts = [StepParts(setup.engine(rollout, schedule), weights) for schedule in step_schedules(setup, grid)]
        full = FullSlots(parts[0].engine, segment_end(longest, rollout.segment_steps))
        tell('matmuls, sampling, cache writes')
        others = parts[0].others(full, grid.cached_tokens[0])
        for cached in grid.cached_tokens:
            dense_ms = None
            for part in parts:
                tell(f'{slots} slots, {cached:,} tokens, {mode_of(part.engine.schedule)}')
                seconds = step_seconds(part.engine, weights, full, cached)
                times = {'step': seconds, **part.reading(full, cached), **others}
                row = _row(setup, part.engine, cached, times, dense_ms)
                dense_ms = row['ms_per_step'] if row['mode'] == 'dense' else dense_ms
                keep(row)
        del parts, full  # the pool, before the next one


def read_grid(setup: Setup, slots: str, cached_tokens: str, modes: str, pages_read: str) -> Grid:
    """The cases that the flags name; for an empty flag the usual ones, or what the configuration has room for.

    Raises:
        ConfigError: no numbers, an unknown mode, or sizes that the configuration does not hold.
    """
    r, shards = setup.run.rollout, meshes.batch_shards(setup.mesh)
    longest, reserved = _longest_tokens(setup), setup.schedule.reserved_pages
    least, most = (r.segment_steps + 1) // 2, longest - r.segment_steps // 2
    grid = Grid(
        slots=_numbers('slots', slots)
        or tuple(n for n in USUAL_SLOTS if n <= r.slots and n % shards == 0)
        or (r.slots,),
        cached_tokens=_numbers('cached_tokens', cached_tokens)
        or tuple(n for n in USUAL_CACHED_TOKENS if n <= most)
        or (max(longest // 2, least), most),
        modes=_modes(modes),
        pages_read=(),
    )
    for n in grid.slots:
        if n < 1 or n % shards:
            of_shards = f' and a multiple of the {shards} data shards' if shards > 1 else ''
            raise ConfigError(f'--slots={n}: must be positive{of_shards}')
    for n in grid.cached_tokens:
        if not least <= n <= most:
            raise ConfigError(
                f'--cached_tokens={n}: must be {least} to {most}; a segment of {r.segment_steps} steps goes half its '
                f'steps beyond it, and rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}'
            )
    pages = -(-min(grid.cached_tokens) // r.page_tokens)
    fewest = min(reserved, pages)
    read = (
        _numbers('pages_read', pages_read)
        or tuple(n for n in USUAL_PAGES_READ if fewest <= n <= pages)
        or (max(fewest, pages // 2),)
    )
    for n in read:
        if not fewest <= n <= pages:
            raise ConfigError(
                f'--pages_read={n}: must be {fewest} (those that are always read) to {pages}, the pages of '
                f'{min(grid.cached_tokens)} cached tokens'
            )
    return dataclasses.replace(grid, pages_read=read)


def _check_memory(setup: Setup, grid: Grid) -> None:
    """Raises ConfigError where the largest case needs more than a device has."""
    slots, cached = max(grid.slots), max(grid.cached_tokens)
    parts = setup.memory(step_rollout(setup, slots, cached))
    available, needed = memory.available_bytes(jax.local_devices()[0]), sum(parts.values())
    if available is not None and needed > (1 - memory.HEADROOM) * available:
        listed = ', '.join(f'{name} {memory.show_bytes(size)}' for name, size in parts.items())
        raise ConfigError(
            f'--slots={slots}: with --cached_tokens={cached} needs about {memory.show_bytes(needed)} on each device '
            f'({listed}), but only {memory.show_bytes(available)} are available ({memory.HEADROOM:.0%} of them left '
            'to the compiler); give smaller numbers'
        )


def _row(
    setup: Setup,
    engine: Engine,
    cached_tokens: int,
    seconds: Mapping[str, float],
    dense_ms: float | None,
) -> dict[str, Any]:
    """One row of the result.

    Args:
        seconds: of the 'step' and of its parts.
        dense_ms: of the dense sampler at the same slots and length, where it was measured before.
    """
    step_s, schedule, tensor = seconds['step'], engine.schedule, setup.mesh.shape['tensor']
    size = step_bytes(
        setup.shape,
        schedule,
        setup.dtype,
        sequences=engine.slots_per_shard,
        length_tokens=cached_tokens,
        weight_bytes=weight_bytes(setup.shape, setup.dtype, tensor),
        tensor=tensor,
    )
    breakdown = {name: seconds[name] for name in BREAKDOWN if name != 'other'}
    breakdown['other'] = step_s - sum(breakdown.values())
    if schedule.kind == 'dense':
        dense_ms = step_s * 1e3
    return {
        'model': model_name(setup.shape),
        'slots': engine.rollout.slots,
        'cached_tokens': cached_tokens,
        'mode': mode_of(schedule),
        'pages_read': schedule.pages_read(cached_tokens),
        'ms_per_step': step_s * 1e3,
        'tokens_per_s': engine.rollout.slots / step_s,
        'limit_ms': size / CEILING * 1e3,
        'fraction_of_limit': size / CEILING / step_s,
        'read_bandwidth_tb_s': size / step_s / 1e12,
        'speedup_over_dense': dense_ms / (step_s * 1e3) if dense_ms else None,
        'breakdown_ms': {name: value * 1e3 for name, value in breakdown.items()},
    }


def _longest_tokens(setup: Setup) -> int:
    return setup.run.rollout.max_prompt_tokens + setup.run.rollout.max_response_tokens


def _line(row: Mapping[str, Any]) -> str:
    """A row of the table on the console."""
    speedup = row['speedup_over_dense']
    return TABLE.format(
        row['slots'],
        f'{row["cached_tokens"]:,}',
        row['mode'],
        row['pages_read'],
        f'{row["ms_per_step"]:.3f}',
        f'{row["tokens_per_s"]:,.0f}',
        f'{row["limit_ms"]:.3f}',
        f'{row["fraction_of_limit"]:.0%}',
        f'{row["read_bandwidth_tb_s"]:.2f}',
        '-' if speedup is None else f'{speedup:.2f}',
        *(f'{row["breakdown_ms"][name]:.3g}' for name in BREAKDOWN),
    )


def _modes(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(',')]
    if unknown := [name for name in names if name not in MODES]:
        raise ConfigError(f'--modes={text}: {unknown[0]!r} is no mode; give dense, sparse or both with a comma')
    return tuple(mode for mode in MODES if mode in names)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas, each once; none of an empty text."""
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(','))) if text.strip() else ()
    except ValueError:
        raise ConfigError(f'--{flag}={text}: must be whole numbers separated by commas') from None


def _flags(values: flags.FlagValues) -> None:
    string = lambda name, default, what: flags.DEFINE_string(name, default, what, flag_values=values)
    string('slots', '', 'sequences that decode together, e.g. 16,32; by default these, or what the config has')
    string('cached_tokens', '', 'of each sequence, e.g. 16384,30720; by default these, or what the config has room for')
    string('modes', 'dense,sparse', 'samplers')
    string('pages_read', '', 'by a sparse layer, reserved ones included, e.g. 64,256; by default these, or half of all')
    string('lengths', '', 'whole rollouts instead of single steps: JSON file of forced response lengths')
    string('beside', '', 'with --lengths: the figures of the other sampler, to be compared with')
    string('learner', '', 'with --lengths: figures of bench_learner, by which steps of training are compared, too')
    string('out', 'bench_rollout.json', 'file for the figures')


if __name__ == '__main__':
    if 'XLA_PYTHON_CLIENT_MEM_FRACTION' not in os.environ:
        os.environ.setdefault('XLA_CLIENT_MEM_FRACTION', DEVICE_MEMORY)
    commands.run(bench_rollout, workdir_required=False, define_flags=_flags)
