"""Does a run fit? An estimate of the bytes that each device will hold, against what the device has.

Made from the configuration, the decoder's shape and the mesh, before any weight is read, so that a run that cannot
fit ends in its first second with the parts that are too large, instead of an allocation failure at the first long
sequence. The estimate counts what grows with the configuration; XLA's own scratch is covered by `HEADROOM`.
"""

import dataclasses
import math
import resource
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp

from pallas_kernels.page_select.policies import SelectionPolicy
from pallas_kernels.sparse_prefill.selection import WORD_PAGES
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.models.adapter import AdapterSpec, factor_weights
from sparrow_jax.models.decoder import Weight, layer_weights, model_weights
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.models.splash import why_no_splash
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.cache import make_slots
from sparrow_jax.rollout.compaction import widths
from sparrow_jax.rollout.head_shards import HeadShards
from sparrow_jax.rollout.probes import LOGITS_AT_ONCE

HEADROOM = 0.08  # share of a device left to XLA's scratch, fragmentation and what is not counted
# Fitted to XLA's own count for gradients of 2 to 6 layers of width 512, 4 rows of 1,024 tokens, on the CPU (float32:
# within 15%). Below 16-bit activations stand float32 intermediates; an attention weight is kept as score, weight,
# cast and mask.
_BYTES_AN_ACTIVATION = {4: 6, 2: 4}
_BYTES_AN_ATTENTION_WEIGHT = 16
_HEAD_BYTES = 4  # of a weight of the critic's head
_NORM_BYTES = 4  # norm scales are float32 whatever the matrices are
_OF_TRAINING = ('optimizer', 'start policy', 'critic', 'adapter', 'learner: ', 'distilling: ')
_OF_SAMPLING = ('sampler weights', 'rollout: ')
_KIB_SUFFIXES = ('KiB', 'MiB', 'GiB', 'TiB')


def estimate(
    run: RunConfig, shape: DecoderShape, mesh_sizes: Mapping[str, int], platform: str, *, trains: bool = True
) -> dict[str, int]:
    """Bytes per device of the parts of a run.

    Args:
        run: its configuration.
        shape: of the decoder.
        mesh_sizes: 'data', 'fsdp' and 'tensor' to the number of devices along the axis, none of them -1.
        platform: 'cpu', 'gpu' or 'tpu'. On a GPU in bfloat16 the learner's attention is cuDNN's, which keeps no
            attention weights; the CPU compiler undoes rematerialization, so `model.remat` saves nothing there.
        trains: whether the sampler is a training run's, with probes where its schedule is adaptive.
    Returns:
        Part to bytes. Parts named 'rollout: ...' exist only while sampling, parts named 'learner: ...' only during an
        update, 'distilling: ...' only during one of the adapter, the others always. See `peak_bytes`.
    """
    r, le = run.rollout, run.learner
    fsdp, tensor = mesh_sizes['fsdp'], mesh_sizes['tensor']
    shards = mesh_sizes['data'] * fsdp  # slots and rows are split over both
    compute, master = jnp.dtype(run.model.compute_dtype).itemsize, jnp.dtype(run.model.param_dtype).itemsize
    D, F, V, L, A = shape.d_model, shape.d_ff, shape.vocab_size, shape.layers, shape.head_dim
    H = _cut(shape.query_heads, tensor)
    K = HeadShards.of(shape, tensor).of_shard

    parameters = _weight_bytes(shape, mesh_sizes, meshes.LEARNER_RULES, master)
    sampler_weights = _weight_bytes(shape, mesh_sizes, meshes.SAMPLER_RULES, compute)
    parts = {
        'parameters': parameters,
        'optimizer': 2 * parameters,
        'sampler weights': sampler_weights,
    }
    if le.kl_coef > 0:
        parts['start policy'] = parameters
    if run.critic.kind != 'none':
        trunk = parameters if run.critic.kind == 'trunk' else 0
        parts['critic'] = 3 * (trunk + _cut(D, fsdp) * _HEAD_BYTES)  # with two moments

    slots = -(-r.slots // shards)
    N, probes = r.pages_per_sequence, _probes(run, trains)
    pool_pages = r.pool_pages or (slots + probes) * N
    parts['rollout: KV pool'] = pool_pages * page_bytes(run, shape, tensor)
    landmark_width = SelectionPolicy(run.schedule.policy).landmark_width(A)
    of_slot = L * K * N * landmark_width * compute
    parts['rollout: landmarks'] = slots * of_slot
    if len(narrower := widths(slots, r.halvings, probes)[1:]):
        parts['rollout: landmarks of half the slots'] = narrower[0] * of_slot
    if run.mismatch.every_steps > 0 or run.mismatch.floor_every_steps > 0:
        parts['rollout: hidden states'] = slots * r.max_response_tokens * D * compute
    parts['rollout: slots'] = _slot_bytes(run, shape, slots, probes)
    first_tokens = min(-(-r.prefill_rows // shards), slots) * min(r.samples_per_prompt, slots)
    parts['rollout: logits'] = 3 * max(slots, first_tokens) * V * 4
    if probes:
        tokens = probes * r.segment_steps
        parts['rollout: probes'] = tokens * D * compute + 3 * min(tokens * V, LOGITS_AT_ONCE) * 4

    rows = -(-le.rows_per_microbatch // shards)
    T = run.row_tokens
    tokens = rows * T
    # The backward pass needs of a layer: norm outputs, q, k, v, attention output, gate, up, their product, residuals.
    per_token = 4 * D + (2 * H + 2 * _cut(shape.kv_heads, tensor)) * A + 3 * _cut(F, tensor)
    layer = tokens * per_token * _BYTES_AN_ACTIVATION[compute]
    splash = platform == 'tpu' and not why_no_splash(A, shape.kv_heads, tensor, T)
    if not splash and (platform != 'gpu' or compute != 2):
        layer += rows * H * (T * T // 2) * _BYTES_AN_ATTENTION_WEIGHT
    remat = run.model.remat and platform != 'cpu'
    gathered = sampler_weights // max(L, 1)  # a layer's weights are gathered from the fsdp shards while it runs
    parts['learner: gradients'] = 2 * parameters  # the sum over micro-batches and the newest one
    if compute != master:
        parts['learner: cast weights'] = parameters * compute // master
    parts['learner: kept activations'] = L * (tokens * D * compute if remat else layer)
    parts['learner: one layer'] = (2 * layer if remat else layer // 2) + gathered
    logits = min(le.head_chunk_tokens, tokens) * _cut(V, tensor) * 4
    parts['learner: logits'] = 3 * logits
    if run.distill.enabled:
        parts |= _of_adapter(run, shape, mesh_sizes, tokens, T)
        if compute != master:
            parts['distilling: cast weights'] = parameters * compute // master
        parts['distilling: kept activations'] = parts['learner: kept activations']
        parts['distilling: one layer'] = parts['learner: one layer']
        parts['distilling: logits'] = 4 * logits  # of two policies, their probabilities and the gradient
    return parts


def _of_adapter(
    run: RunConfig, shape: DecoderShape, mesh_sizes: Mapping[str, int], tokens: int, row_tokens: int
) -> dict[str, int]:
    """The adapter's factors, and what its updates hold beside activations: chosen pages and final hidden states."""
    spec = AdapterSpec(run.distill.rank, run.distill.alpha, run.distill.targets)
    compute, pairs = jnp.dtype(run.model.compute_dtype).itemsize, factor_weights(shape, spec).values()
    factors, copy = (
        shape.layers * sum(_on_device(factor, mesh_sizes, rules, size) for pair in pairs for factor in pair)
        for rules, size in ((meshes.LEARNER_RULES, 4), (meshes.SAMPLER_RULES, compute))
    )
    words = -(-row_tokens // (WORD_PAGES * run.rollout.page_tokens))
    sparse_layers = shape.layers - len(run.schedule.dense_layers)
    return {
        'adapter': 3 * factors + copy,  # with its moments; the sampler's copy
        'distilling: gradients': 2 * factors,
        'distilling: page masks': sparse_layers * tokens * _cut(shape.kv_heads, mesh_sizes['tensor']) * words * 4,
        'distilling: hidden states': 3 * tokens * shape.d_model * compute,
    }


def page_bytes(run: RunConfig, shape: DecoderShape, tensor: int) -> int:
    """Bytes that one page of the pool takes on a device, over all layers."""
    K = HeadShards.of(shape, tensor).of_shard
    compute = jnp.dtype(run.model.compute_dtype).itemsize
    return shape.layers * K * 2 * run.rollout.page_tokens * shape.head_dim * compute


def fit_pool(
    run: RunConfig,
    shape: DecoderShape,
    mesh_sizes: Mapping[str, int],
    available: int | None,
    platform: str,
    *,
    trains: bool = True,
    keeps_parameters: bool = True,
) -> tuple[RunConfig, str]:
    """Where `rollout.pool_pages` = 0 asks for a larger pool than there is room for, gives it the room that there is.

    Not on a CPU: what is free there changes by the minute, and with it would a run.

    Args:
        run, shape, mesh_sizes, platform, trains: as in `estimate`.
        available: bytes of a device; None where it is unknown, then nothing changes.
        keeps_parameters: whether the learner's weights are there beside the sampler's.
    Returns:
        The run, and a sentence for the console where the pool has been set.
    Raises:
        ConfigError: there is no room for one longest sequence.
    """
    if run.rollout.pool_pages or available is None or platform == 'cpu':
        return run, ''
    parts = estimate(run, shape, mesh_sizes, platform, trains=trains)
    unused = (() if trains else _OF_TRAINING) + (() if keeps_parameters else ('parameters',))
    others = {n: size for n, size in parts.items() if not n.startswith((*unused, 'learner: ', 'distilling: '))}
    whole, of_page = others.pop('rollout: KV pool'), page_bytes(run, shape, mesh_sizes['tensor'])
    pages = int((1 - HEADROOM) * available - sum(others.values())) // of_page
    if pages * of_page >= whole:
        return run, ''
    least = run.rollout.pages_per_sequence * (2 if _probes(run, trains) else 1)
    if pages < least:
        raise ConfigError(
            f'rollout.pool_pages=0: of the {show_bytes(available)} on each device ({HEADROOM:.0%} of them left to the '
            f'compiler) the pool could have {max(pages, 0)} pages, one longest sequence needs {least}; beside it '
            f'stand:\n{table(others)}\n'
            'Set rollout.slots or rollout.max_response_tokens lower, or parallel.tensor higher.'
        )
    note = (
        f'rollout.pool_pages=0: the pool takes the memory that is left, {pages:,} pages on each device '
        f'({pages * run.rollout.page_tokens:,} tokens); all slots at their longest would fill {whole // of_page:,}'
    )
    return dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, pool_pages=pages)), note


def peak_bytes(parts: Mapping[str, int]) -> int:
    """What a device holds at most: the lasting parts and the larger phase; the pool is freed before an update."""
    phase = {name: 0 for name in ('', 'rollout', 'learner', 'distilling')}
    for name, size in parts.items():
        phase[name.split(': ')[0] if ': ' in name else ''] += size
    lasting = phase.pop('')
    return lasting + max(phase.values())


def available_bytes(device: jax.Device) -> int | None:
    """Memory that a device can give this process; None where it does not say.

    On a CPU it is the host's free memory, or what its container or ulimit allows, shared by the process's devices.
    """
    if device.platform != 'cpu':
        statistics = device.memory_stats() or {}
        return statistics.get('bytes_limit')
    free = host_available_bytes()
    return None if free is None else free // jax.local_device_count('cpu')


def host_available_bytes(root: Path = Path('/')) -> int | None:
    """What this process can still take: the least of free memory, cgroup limit and ulimit; None if unknown."""
    limits = []
    meminfo = root / 'proc/meminfo'
    if meminfo.exists():
        fields = dict(line.split(':', 1) for line in meminfo.read_text().splitlines() if ':' in line)
        if 'MemAvailable' in fields:
            limits.append(int(fields['MemAvailable'].split()[0]) * 1024)
    for limit, used in (
        ('memory.max', 'memory.current'),
        ('memory/memory.limit_in_bytes', 'memory/memory.usage_in_bytes'),
    ):
        limit_file, used_file = root / 'sys/fs/cgroup' / limit, root / 'sys/fs/cgroup' / used
        if limit_file.exists() and used_file.exists() and limit_file.read_text().strip() != 'max':
            limits.append(max(int(limit_file.read_text()) - int(used_file.read_text()), 0))
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    return min(limits) if limits else None


def check_fits(
    run: RunConfig,
    shape: DecoderShape,
    mesh_sizes: Mapping[str, int],
    device: jax.Device | None = None,
    *,
    trains: bool = True,
    samples: bool = True,
) -> dict[str, int]:
    """Raises ConfigError with a table of the parts where the run needs more than a device has.

    Args:
        run, shape, mesh_sizes: as in `estimate`.
        device: one of the run's; the first local one by default. One that does not tell its memory is taken to suffice.
        trains, samples: False for a command without updates or without a sampler; what these need is left out.
    Returns:
        The parts, for the start block.
    """
    device = device or jax.local_devices()[0]
    parts = estimate(run, shape, mesh_sizes, device.platform, trains=trains)
    unused = (() if trains else _OF_TRAINING) + (() if samples else _OF_SAMPLING)
    parts = {name: size for name, size in parts.items() if not name.startswith(unused)}
    available, needed = available_bytes(device), peak_bytes(parts)
    if available is not None and needed > (1 - HEADROOM) * available:
        raise ConfigError(
            f'this run needs about {show_bytes(needed)} on each device, but only {show_bytes(available)} are available '
            f'({HEADROOM:.0%} of them left to the compiler):\n{table(parts)}\n{_advice(parts)}'
        )
    return parts


def table(parts: Mapping[str, int]) -> str:
    """The parts as aligned lines, as they stand in an error."""
    width = max(len(name) for name in parts)
    return '\n'.join(f'  {name.ljust(width)}  {show_bytes(size):>10}' for name, size in parts.items())


def show_bytes(size: float) -> str:
    """1536 as '1.5 KiB'."""
    if size < 1024:
        return f'{size:.0f} B'
    for suffix in _KIB_SUFFIXES:
        size /= 1024
        if size < 1024 or suffix == _KIB_SUFFIXES[-1]:
            break
    return f'{size:,.1f} {suffix}'


def _weight_bytes(
    shape: DecoderShape, mesh_sizes: Mapping[str, int], rules: Mapping[str, str | None], matrix_bytes: int
) -> int:
    """Of all weights on a device."""
    on_device = lambda weight: _on_device(weight, mesh_sizes, rules, matrix_bytes)
    layer, model = layer_weights(shape), model_weights(shape)
    return shape.layers * sum(map(on_device, layer.values())) + sum(map(on_device, model.values()))


def _on_device(
    weight: Weight, mesh_sizes: Mapping[str, int], rules: Mapping[str, str | None], matrix_bytes: int
) -> int:
    """Bytes of one weight, cut along the axes that the rules name and its sizes allow."""
    cut = (
        _cut(size, mesh_sizes[mesh_axis]) if (mesh_axis := rules.get(axis)) else size
        for size, axis in zip(weight.sizes, weight.axes, strict=True)
    )
    return math.prod(cut) * (matrix_bytes if weight.fan_in else _NORM_BYTES)


def _slot_bytes(run: RunConfig, shape: DecoderShape, slots: int, probes: int) -> int:
    """Of the arrays over slots: page tables, tokens, log-probs and what else is recorded of each token."""
    r = run.rollout
    make = lambda: make_slots(
        slots=slots,
        pages_per_sequence=r.pages_per_sequence,
        max_response_tokens=r.max_response_tokens,
        kept_hidden_size=0,
        probes=probes,
        segment_steps=r.segment_steps,
        hidden_size=shape.d_model,
        dtype=jnp.dtype(run.model.compute_dtype),
    )
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(jax.eval_shape(make)))


def _probes(run: RunConfig, trains: bool) -> int:
    return run.controller.probes if trains and run.phase == 'rl' and run.schedule.kind == 'adaptive' else 0


def _cut(size: int, tensor: int) -> int:
    return size // tensor if size % tensor == 0 else size


def _advice(parts: Mapping[str, int]) -> str:
    """What to set, for the largest part."""
    lasting = {name: size for name, size in parts.items() if ': ' not in name}
    rollout = {name: size for name, size in parts.items() if name.startswith('rollout')}
    learner = {name: size for name, size in parts.items() if name.startswith('learner')}
    distilling = {name: size for name, size in parts.items() if name.startswith('distilling')}
    heavier = max((rollout, learner, distilling), key=lambda phase: sum(phase.values()))
    largest = max({**lasting, **heavier}.items(), key=lambda item: item[1])[0]
    if largest.startswith('rollout: hidden'):
        return 'Set rollout.slots lower, or mismatch.every_steps=0.'
    if largest.startswith('rollout'):
        return 'Set rollout.slots or rollout.pool_pages lower, or parallel.tensor higher.'
    if largest in ('learner: logits', 'distilling: logits'):
        return 'Set learner.head_chunk_tokens lower.'
    if largest == 'adapter':
        return 'Set distill.rank lower, or fewer distill.targets.'
    if largest.endswith(('kept activations', 'one layer', 'page masks', 'hidden states')):
        return 'Set learner.rows_per_microbatch or the lengths in rollout lower, or model.remat=True.'
    if largest == 'sampler weights':
        return 'Set parallel.tensor higher: the sampler holds whole weights on every fsdp shard.'
    return 'Set parallel.fsdp or parallel.tensor higher (more devices), or take a smaller model.'
