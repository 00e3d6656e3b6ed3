"""python -m sparrow_jax.plan --config=configs/X.py [--chip=h200] [--devices=1] [--cached_tokens=4096,16384]
    [--lengths=FILE] [--calibration=W/calibration.json] [--target=0.86] [--plot=plan.png]

A cost model, from the configuration alone: what each part of a run takes of a chip's memory, how many pages the KV pool
has, how long a decode step would take at several cached lengths, and, for responses of a given distribution of lengths,
rollouts and steps of training: dense, under the configuration's schedule, under the published tables or those of a
calibration, and which of these is the fastest that holds a target. A decode step is the bytes that it reads over the
chip's bandwidth, and a fixed time for each layer (`sparrow_jax.chips`). No weights, tokenizer, data or accelerator are
needed. Exit code 1: the run does not fit.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import flags

from sparrow_jax import commands, memory, plan_rollout
from sparrow_jax.bench_setup import dense_schedule, model_name, published_shape
from sparrow_jax.chips import CHIPS, Chip
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.console import Console
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.sparsity.schedules import Schedule, load_schedule
from sparrow_jax.step_reads import step_bytes, weight_bytes
from sparrow_jax.whole_rollout import read_lengths

NO_FIT = 1  # exit code
USUAL_LENGTHS = 'docs/measurements/rollout_lengths.json'
USUAL_CACHED_TOKENS = (2048, 4096, 8192, 16_384, 32_768)  # where --cached_tokens is left out, as far as there is room
TABLE = '{:>7} {:>10} {:>10} {:>6} {:>10} {:>10} {:>8} {:>9}'
HEADER = ('cached', 'dense ms', 'at best', 'pages', 'sparse ms', 'at best', 'x dense', 'at best')


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step of all slots at one cached length, on each device.

    Attributes:
        cached_tokens: of every sequence.
        pages_read: by a sparse layer.
        dense_bytes, sparse_bytes: that the step reads.
        dense_s, sparse_s: predicted.
        dense_limit_s, sparse_limit_s: of reading alone.
    """

    cached_tokens: int
    pages_read: int
    dense_bytes: int
    sparse_bytes: int
    dense_s: float
    sparse_s: float
    dense_limit_s: float
    sparse_limit_s: float


def plan(
    run: RunConfig,
    workdir: str,
    chip: str,
    devices: int,
    cached_tokens: str,
    lengths: str,
    calibration: str,
    target: float,
    plot: str,
) -> int:
    """Prints the plan; returns the exit code."""
    if workdir:
        raise ConfigError(f'--workdir={workdir}: this command takes none')
    if chip not in CHIPS:
        raise ConfigError(f'--chip={chip}: is not known; there are {", ".join(CHIPS)}')
    if devices < 1:
        raise ConfigError(f'--devices={devices}: must be at least 1')
    known, shape, sizes = CHIPS[chip], published_shape(run), meshes.axis_sizes(run.parallel, devices)
    shards = sizes['data'] * sizes['fsdp']
    if run.rollout.slots % shards:
        raise ConfigError(f'rollout.slots={run.rollout.slots}: must be a multiple of the {shards} data shards')
    if not 0 < target < 1:
        raise ConfigError(f'--target={target}: must be between 0 and 1')
    if plot and not Path(plot).expanduser().absolute().parent.is_dir():
        raise ConfigError(f'--plot={plot}: there is no such folder')
    schedule = load_schedule(run.schedule, run.rollout, shape.layers, run.mismatch.bin_width_tokens)
    cached, responses = _cached(run, cached_tokens), read_lengths(lengths)
    compared = plan_rollout.candidates(run, shape, calibration, target)
    run, note = memory.fit_pool(run, shape, sizes, known.available_bytes, known.platform)
    parts = memory.estimate(run, shape, sizes, known.platform)
    steps = predict(run, shape, schedule, known, sizes, cached)
    foreseen = [(c, plan_rollout.forecast(run, shape, c.schedule, known, sizes, responses)) for c in compared]
    needed, most = memory.peak_bytes(parts), int((1 - memory.HEADROOM) * known.available_bytes)
    with Console() as console:
        mesh = ', '.join(f'{axis} {size}' for axis, size in sizes.items())
        facts = {
            'model': f'{model_name(shape)}, {run.model.compute_dtype}',
            'chip': f'{chip}, {memory.show_bytes(known.memory_bytes)}, {known.read_bytes_per_s / 1e12:.2f} TB/s',
            'numbers': known.source,
            'mesh': f'{devices} devices: {mesh}',
            'schedule': schedule.kind if schedule.kind != 'adaptive' else 'adaptive, at its first budgets',
        }
        console.start('Plan', facts)
        console.message(f'Memory of each device\n{memory.table(parts)}')
        fits = needed <= most
        console.message(
            f'  {memory.show_bytes(needed)} at the same time, of {memory.show_bytes(most)} that may be used: '
            f'{memory.show_bytes(known.available_bytes)} are taken by JAX, {memory.HEADROOM:.0%} left to the compiler'
        )
        console.message(pool_line(run, parts, shape, sizes))
        if note:
            console.message(note)
        console.message(f'\nA decode step of {run.rollout.slots} slots, predicted')
        console.message(TABLE.format(*HEADER))
        for step in steps:
            console.message(_line(step))
        drawn = plan_rollout.responses_of(run, responses)
        console.message(
            f'\nA step of training, predicted: {len(drawn):,} responses of {drawn.mean():,.0f} tokens on average, '
            f'{drawn.max():,} at most ({lengths})'
        )
        for line in plan_rollout.lines(foreseen, target):
            console.message(line)
        if plot:
            plan_rollout.plot(foreseen, f'{model_name(shape)} on {devices} x {chip}', Path(plot).expanduser())
            console.message(f'written: {plot}')
        if not fits:
            console.warn('this run does not fit')
    return 0 if fits else NO_FIT


def predict(
    run: RunConfig,
    shape: DecoderShape,
    schedule: Schedule,
    chip: Chip,
    mesh_sizes: Mapping[str, int],
    lengths: tuple[int, ...],
) -> list[Step]:
    """A step at each of the cached lengths."""
    dtype, tensor = jnp.dtype(run.model.compute_dtype), mesh_sizes['tensor']
    slots = run.rollout.slots // (mesh_sizes['data'] * mesh_sizes['fsdp'])
    weights = weight_bytes(shape, dtype, tensor)
    dense = dense_schedule(schedule)

    def bytes_of(schedule: Schedule, length: int) -> int:
        sizes = {'sequences': slots, 'length_tokens': length, 'weight_bytes': weights, 'tensor': tensor}
        return step_bytes(shape, schedule, dtype, **sizes)

    dense_layers = shape.layers if schedule.kind == 'dense' else len(schedule.dense_layers)
    steps = []
    for length in lengths:
        dense_bytes, sparse_bytes = bytes_of(dense, length), bytes_of(schedule, length)
        steps.append(
            Step(
                cached_tokens=length,
                pages_read=schedule.pages_read(length),
                dense_bytes=dense_bytes,
                sparse_bytes=sparse_bytes,
                dense_s=chip.step_seconds(dense_bytes, shape.layers, 0),
                sparse_s=chip.step_seconds(sparse_bytes, dense_layers, shape.layers - dense_layers),
                dense_limit_s=dense_bytes / chip.read_bytes_per_s,
                sparse_limit_s=sparse_bytes / chip.read_bytes_per_s,
            )
        )
    return steps


def pool_line(run: RunConfig, parts: Mapping[str, int], shape: DecoderShape, mesh_sizes: Mapping[str, int]) -> str:
    """What the KV pool of a device holds."""
    r = run.rollout
    pages = parts['rollout: KV pool'] // memory.page_bytes(run, shape, mesh_sizes['tensor'])
    return (
        f'  the KV pool has {pages:,} pages of {r.page_tokens} tokens, {pages * r.page_tokens:,} tokens, '
        f'{pages / r.pages_per_sequence:.1f} sequences at their longest'
    )


def _cached(run: RunConfig, text: str) -> tuple[int, ...]:
    longest = run.rollout.max_prompt_tokens + run.rollout.max_response_tokens
    if not text.strip():
        usual = tuple(n for n in USUAL_CACHED_TOKENS if n < longest)
        return (*usual, longest)
    try:
        lengths = tuple(int(part) for part in text.split(','))
    except ValueError:
        raise ConfigError(f'--cached_tokens={text}: must be whole numbers separated by commas') from None
    for n in lengths:
        if not 1 <= n <= longest:
            raise ConfigError(
                f'--cached_tokens={n}: must be 1 to {longest}, rollout.max_prompt_tokens + rollout.max_response_tokens'
            )
    return lengths


def _line(step: Step) -> str:
    return TABLE.format(
        f'{step.cached_tokens:,}',
        *(f'{seconds * 1e3:.3f}' for seconds in (step.dense_s, step.dense_limit_s)),
        step.pages_read,
        *(f'{seconds * 1e3:.3f}' for seconds in (step.sparse_s, step.sparse_limit_s)),
        f'{step.dense_s / step.sparse_s:.2f}',
        f'{step.dense_limit_s / step.sparse_limit_s:.2f}',
    )


def _flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string('chip', 'h200', f'accelerator: {", ".join(CHIPS)}', flag_values=values)
    flags.DEFINE_integer('devices', 1, 'how many of them', flag_values=values)
    flags.DEFINE_string('lengths', USUAL_LENGTHS, 'JSON file: prompt_tokens, response_tokens', flag_values=values)
    flags.DEFINE_string('calibration', '', 'a calibration.json, in place of published tables', flag_values=values)
    flags.DEFINE_float('target', 0.86, 'p05 that a schedule must hold', flag_values=values)
    flags.DEFINE_string('plot', '', 'file for a picture of the step', flag_values=values)
    flags.DEFINE_string(
        'cached_tokens', '', 'lengths to predict, e.g. 4096,16384; several by default', flag_values=values
    )


if __name__ == '__main__':
    jax.config.update('jax_platforms', 'cpu')  # an accelerator at hand may be in use by somebody else
    commands.run(plan, workdir_required=False, uses_devices=False, define_flags=_flags)
