"""python -m sparrow_jax.bench_learner --config=configs/X.py [--config.field=value ...] [--row_tokens=8192,32768] ...

What training the sampler's adapter costs beside plain GRPO, in one run and for each length of the learner's rows: the
time of scoring, gradients and the optimizer's update on one side, of the adapter's gradients and update on the other,
with the parts of the former, and the ratio of a whole step. Rows are full, weights and tokens random; no checkpoint,
tokenizer or data is read. The figures go to a JSON file, which is written anew after every length.
"""

import dataclasses
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from pallas_kernels.bench import why_no_file
from sparrow_jax import commands, memory
from sparrow_jax.assembly import Frame
from sparrow_jax.bench_setup import Setup, make_setup, model_name
from sparrow_jax.config import ROW_MULTIPLE, ConfigError, RunConfig, validate
from sparrow_jax.console import Console
from sparrow_jax.learner.distill import ADAPTER_GRADIENTS, ADAPTER_UPDATE, Distiller
from sparrow_jax.learner.learner import Learner
from sparrow_jax.learner.rows import Sample, micro_batches
from sparrow_jax.models.adapter import AdapterSpec, adapter_parameter_count
from sparrow_jax.models.decoder import init_decoder
from sparrow_jax.workdir import write_atomically

RUNS = 3  # of every program, after one that compiles; the median counts
USUAL_PAGES_READ = 64
PROMPT_SHARE = 8  # at most one token in so many is the prompt's
PLAIN, ADAPTER = ('scoring', 'gradients', 'optimizer update'), (ADAPTER_GRADIENTS, ADAPTER_UPDATE)
PARTS = ('dense forward', 'sparse forward', 'head', 'backward')
TABLE = '{:>8} {:>5} {:>6} ' + ' {:>10}' * (len(PLAIN) + len(ADAPTER)) + ' {:>7} {:>9}'
HEADER = ('tokens', 'rows', 'pages', 'score ms', 'grads ms', 'update ms')
ADAPTER_HEADER = ('adapter ms', 'its update', 'x plain', 'in FLOPs')

State = TypeVar('State')


def bench_learner(run: RunConfig, workdir: str, row_tokens: str, pages_read: int, out: str) -> int:
    """Measures every length and writes the figures; returns the exit code."""
    if workdir:
        raise ConfigError(f'--workdir={workdir}: this command takes none; --out names its file')
    one_update = dataclasses.replace(run.distill, enabled=True, updates_per_step=1)
    run = dataclasses.replace(run, distill=one_update, learner=dataclasses.replace(run.learner, row_tokens=0))
    validate(run)
    setup = make_setup(run)
    lengths = _lengths(row_tokens, setup)
    least, most = setup.schedule.reserved_pages, -(-min(lengths) // run.rollout.page_tokens)
    pages_read = pages_read or (USUAL_PAGES_READ if most >= USUAL_PAGES_READ else max(most // 2, least))
    if not least <= pages_read <= most:
        raise ConfigError(
            f'--pages_read={pages_read}: must be {least} (those that are always read) to {most}, the pages of '
            f'{min(lengths)} tokens'
        )
    for length in lengths:
        longer = _run_of(setup, length)
        memory.check_fits(longer, setup.shape, setup.mesh.shape, samples=False)
    if why_not := why_no_file(Path(out)):
        raise ConfigError(f'--out={out}: {why_not}')
    with Console() as console:
        facts = {
            'model': model_name(setup.shape),
            'device': jax.devices()[0].device_kind,
            'devices': jax.device_count(),
            'jax': jax.__version__,
            'compute_dtype': setup.dtype.name,
            'remat': run.model.remat,
            'adapter': {'rank': run.distill.rank, 'targets': list(run.distill.targets)},
            'command': f'python -m sparrow_jax.bench_learner {shlex.join(sys.argv[1:])}',
        }
        console.start('Cost of the adapter', {name: str(facts[name]) for name in ('model', 'device', 'jax', 'adapter')})
        if jax.devices()[0].platform == 'cpu':
            console.warn('on a CPU the speeds mean nothing; this run shows that the command works')
        console.message(TABLE.format(*HEADER, *ADAPTER_HEADER))
        rows: list[dict[str, Any]] = []
        for length in lengths:
            rows.append(measure(setup, length, pages_read, lambda what: console.status(what)))
            console.message(_line(rows[-1]))
            write_atomically(Path(out), json.dumps({**facts, 'rows': rows}, indent=1) + '\n')
        console.finish('Cost of the adapter', {'written': out})
    return 0


def measure(setup: Setup, row_tokens: int, pages_read: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """One row of the result."""
    run = _run_of(setup, row_tokens)
    frame = Frame.make(run, setup.mesh, setup.shape, setup.schedule)
    engine = frame.engine_that_ends((setup.shape.vocab_size,), trains=False)
    learner = Learner(frame.learner_graph, frame.abstract_params(), frame.mesh, run, setup.shape.d_model)
    distiller = frame.distiller(learner, engine)
    tell('making weights')
    options = {'param_dtype': run.model.param_dtype, 'compute_dtype': run.model.compute_dtype}
    shardings = jax.tree.map(lambda x: x.sharding, learner.abstract_state.params)
    make = lambda: init_decoder(setup.shape, run.seed, **options)[1]
    params = jax.jit(make, out_shardings=shardings)()
    samples = _samples(run, setup.shape.vocab_size, learner.layout.rows, pages_read)
    seconds = _plain_seconds(learner, params, samples, tell)
    of_adapter, parts = _adapter_seconds(distiller, params, samples, run.seed, tell)
    seconds |= of_adapter
    sequences = run.rollout.prompts_per_step * run.rollout.samples_per_prompt
    batches, updates = -(-sequences // learner.layout.rows), run.learner.updates_per_step
    plain_s = batches * (seconds['scoring'] + seconds['gradients']) + updates * seconds['optimizer update']
    adapter_s = batches * seconds[ADAPTER_GRADIENTS] + seconds[ADAPTER_UPDATE]
    flops = program_flops(setup, run, learner.layout.rows, row_tokens, pages_read)
    return {
        'row_tokens': row_tokens,
        'rows': learner.layout.rows,
        'pages_read': pages_read,
        'microbatches_a_step': batches,
        'learner_attention': learner.attention,
        'kernels': str(engine.kernels),
        'ms': {name: value * 1e3 for name, value in seconds.items()},
        'adapter_gradients_ms': {name: value * 1e3 for name, value in parts.items()},
        'tflop_per_s': {name: flops[name]['useful'] / seconds[name] / 1e12 for name in flops},
        'times_plain': 1 + adapter_s / plain_s,
        'times_plain_by_flops': 1
        + flops[ADAPTER_GRADIENTS]['done'] / (flops['scoring']['done'] + flops['gradients']['done']),
    }


def program_flops(setup: Setup, run: RunConfig, rows: int, row_tokens: int, pages_read: int) -> dict[str, dict]:
    """FLOPs of products in full rows: 'done', with layers and head that are recomputed, and 'useful', without.

    A product with a weight is 2 FLOPs a number of it and token, forward; twice that backward, or once where the weight
    is frozen. Causal attention is half a square. Of the sparse pass, layers that are not dense read `pages_read` pages.
    """
    shape, tokens = setup.shape, rows * row_tokens
    table = shape.vocab_size * shape.d_model
    layers = 2 * tokens * (shape.parameter_count() - table * (1 if shape.tie_embeddings else 2))
    head = 2 * tokens * table
    of_adapter = (
        2
        * tokens
        * adapter_parameter_count(shape, AdapterSpec(run.distill.rank, run.distill.alpha, run.distill.targets))
    )
    per_key = 4 * shape.query_heads * shape.head_dim * rows
    dense_layer = per_key * row_tokens**2 / 2
    prompt = run.rollout.max_prompt_tokens
    read = min(pages_read * run.rollout.page_tokens, row_tokens)
    sparse_layer = per_key * (prompt**2 / 2 + np.minimum(np.arange(prompt, row_tokens), read).sum())
    dense_layers = len(setup.schedule.dense_layers)
    attention = shape.layers * dense_layer
    sparse_attention = dense_layers * dense_layer + (shape.layers - dense_layers) * sparse_layer
    again = int(run.model.remat)
    forward = layers + head + attention
    useful_adapter = 3 * (layers + head + sparse_attention + of_adapter) + attention
    return {
        'scoring': {'useful': forward, 'done': forward},
        'gradients': {'useful': 3 * forward, 'done': (3 + again) * (layers + attention) + 4 * head},
        ADAPTER_GRADIENTS: {
            'useful': useful_adapter,
            'done': useful_adapter + again * (layers + sparse_attention + of_adapter),
        },
    }


def _plain_seconds(
    learner: Learner, params: nnx.State, samples: list[Sample], tell: Callable[[str], None]
) -> dict[str, float]:
    """Of one micro-batch and of an update."""
    [rows] = micro_batches([dataclasses.replace(s, pages_read=None) for s in samples], learner.layout)
    rows = learner.device(rows)
    programs = {name: function for name, (function, _) in learner.programs(keep_hidden=False).items()}
    seconds = {}
    tell('scoring')
    seconds['scoring'], scores = _seconds(lambda _: programs['scoring'](params, rows), None)
    tell('gradients')
    places = jax.tree.map(lambda x: x.sharding, params)
    zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=places)
    tokens = np.float32(rows.mask_BT.sum())
    step = lambda grads: programs['gradients'](params, grads, rows, scores.logp_BT, scores.logp_BT, tokens)[0]
    seconds['gradients'], grads = _seconds(step, zeros(params))
    tell('optimizer update')
    state = learner.init(params)
    seconds['optimizer update'], _ = _seconds(lambda state: programs['optimizer update'](state, grads)[0], state)
    return seconds


def _adapter_seconds(
    distiller: Distiller, params: nnx.State, samples: list[Sample], seed: int, tell: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, float]]:
    """Of one micro-batch and of an update; and of the parts of the former."""
    [rows] = distiller.rows(samples)
    tokens, rows = np.float32(rows.counts.tokens), distiller.device(rows)
    state = distiller.init(seed)
    programs = {name: function for name, (function, _) in distiller.programs().items()}
    seconds, parts = {}, {}
    tell('adapter gradients')
    step = lambda grads: programs[ADAPTER_GRADIENTS](params, state.params, grads, rows, rows.logp_actor_BT, tokens)[0]
    seconds[ADAPTER_GRADIENTS], grads = _seconds(step, jax.tree.map(jnp.zeros_like, state.params))
    tell('parts of it')
    parts['dense forward'], dense_BTD = _seconds(lambda _: distiller.dense_hidden(params, rows), None)
    parts['sparse forward'], sparse_BTD = _seconds(lambda _: distiller.sparse_hidden(params, state.params, rows), None)
    head = lambda _: distiller.head(params, sparse_BTD, dense_BTD, rows, rows.logp_actor_BT, tokens)
    parts['head'], _ = _seconds(head, None)
    parts['backward'] = seconds[ADAPTER_GRADIENTS] - sum(parts.values())
    tell('adapter update')
    seconds[ADAPTER_UPDATE], _ = _seconds(lambda state: programs[ADAPTER_UPDATE](state, grads)[0], state)
    return seconds, parts


def _seconds(call: Callable[[Any], State], state: Any) -> tuple[float, State]:
    """Seconds of one call, each made from the last one's result, and the last result. Calls are long: each is waited
    for."""
    state, times = jax.block_until_ready(call(state)), []
    for _ in range(RUNS):
        began = time.perf_counter()
        state = jax.block_until_ready(call(state))
        times.append(time.perf_counter() - began)
    return statistics.median(times), state


def _samples(run: RunConfig, vocab_size: int, rows: int, pages_read: int) -> list[Sample]:
    """As many full rows."""
    rng, prompt = np.random.default_rng(run.seed), run.rollout.max_prompt_tokens
    row_tokens = run.row_tokens
    cached = np.arange(prompt, row_tokens)
    pages = np.minimum(-(-cached // run.rollout.page_tokens), pages_read).astype(np.int32)
    pages[0] = 0  # the first token is the prefill's
    logp = np.full(row_tokens - prompt, -1, np.float32)
    return [
        Sample(ids[:prompt], ids[prompt:], logp, float(advantage), pages_read=pages)
        for ids, advantage in zip(rng.integers(0, vocab_size, (rows, row_tokens)), rng.normal(size=rows), strict=True)
    ]


def _run_of(setup: Setup, row_tokens: int) -> RunConfig:
    """The configuration with prompts and responses that fill such a row."""
    r = setup.run.rollout
    prompt = min(r.max_prompt_tokens, row_tokens // PROMPT_SHARE)
    rollout = dataclasses.replace(r, max_prompt_tokens=prompt, max_response_tokens=row_tokens - prompt, pool_pages=0)
    return dataclasses.replace(setup.run, rollout=rollout)


def _lengths(text: str, setup: Setup) -> tuple[int, ...]:
    """Raises ConfigError for what is no length of a row."""
    try:
        lengths = tuple(dict.fromkeys(int(part) for part in text.split(','))) if text.strip() else ()
    except ValueError:
        raise ConfigError(f'--row_tokens={text}: must be whole numbers separated by commas') from None
    most = setup.shape.max_positions
    for length in lengths:
        if not 0 < length <= most or length % ROW_MULTIPLE:
            raise ConfigError(
                f'--row_tokens={length}: must be a multiple of {ROW_MULTIPLE}, at most the {most} positions that the '
                'model knows'
            )
    return lengths or (-(-setup.run.row_tokens // ROW_MULTIPLE) * ROW_MULTIPLE,)


def _line(row: dict[str, Any]) -> str:
    times = (f'{row["ms"][name]:,.1f}' for name in (*PLAIN, *ADAPTER))
    ratios = f'{row["times_plain"]:.2f}', f'{row["times_plain_by_flops"]:.2f}'
    return TABLE.format(f'{row["row_tokens"]:,}', row['rows'], row['pages_read'], *times, *ratios)


def _flags(values: flags.FlagValues) -> None:
    string = lambda name, default, what: flags.DEFINE_string(name, default, what, flag_values=values)
    string('row_tokens', '', "lengths of the learner's rows, e.g. 8192,32768; by default the configuration's")
    flags.DEFINE_integer(
        'pages_read', 0, 'by a sparse layer for each response token; 0 = 64, or half of a short row', flag_values=values
    )
    string('out', 'bench_learner.json', 'file for the figures')


if __name__ == '__main__':
    commands.run(bench_learner, workdir_required=False, define_flags=_flags)
