"""The estimate follows the layout of the arrays, agrees with the compiler, and refuses what cannot fit."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from configs import base
from sparrow_jax import memory
from sparrow_jax.config import ConfigError, RunConfig, resolve
from sparrow_jax.models.attention import causal_attend
from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.shape import DecoderShape

SHAPE = DecoderShape(
    family='qwen3',
    vocab_size=1000,
    d_model=64,
    layers=3,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    d_ff=128,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=True,
    max_positions=1024,
)
ONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


def make_run(**changes) -> RunConfig:
    config = base.get_config()
    config.model.path, config.schedule.kind = 'somewhere', 'fixed'
    config.rollout.slots, config.rollout.page_tokens = 8, 16
    config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 64, 192
    config.learner.rows_per_microbatch, config.learner.head_chunk_tokens = 4, 128
    config.update_from_flattened_dict(changes)
    return resolve(config)


class Device:
    """Stands for an accelerator of a given size."""

    def __init__(self, size, platform='gpu'):
        self.platform, self._size = platform, size

    def memory_stats(self):
        return {'bytes_limit': self._size} if self._size else None


def test_arrays_are_counted_by_their_layout():
    parts = memory.estimate(make_run(), SHAPE, ONE, 'gpu')
    count = SHAPE.parameter_count()
    assert parts['parameters'] == 4 * count
    assert parts['optimizer'] == 8 * count
    norms = 3 * (2 * 64 + 2 * 16) + 64  # in float32 on the sampler, too
    assert parts['sampler weights'] == 2 * (count + norms)
    # pages [K, P, C, 2A] of 3 layers in bfloat16, 16 pages for each of 8 slots; landmarks [S, K, N, A]
    assert parts['rollout: KV pool'] == 3 * 2 * (8 * 16) * 2 * 16 * 16 * 2
    assert parts['rollout: landmarks'] == 3 * 8 * 2 * 16 * 16 * 2
    assert parts['rollout: hidden states'] == 8 * 192 * 64 * 2
    assert parts['learner: logits'] == 3 * 128 * 1000 * 4
    # with rematerialization one [tokens, D] a layer is kept, of 4 rows of 256 tokens
    assert parts['learner: kept activations'] == 3 * 4 * 256 * 64 * 2


def test_the_mesh_divides_what_it_shards():
    run = make_run()
    one = memory.estimate(run, SHAPE, ONE, 'gpu')
    fsdp = memory.estimate(run, SHAPE, {'data': 1, 'fsdp': 4, 'tensor': 1}, 'gpu')
    norms = 4 * (3 * (2 * 64 + 2 * 16) + 64)  # whole on every device
    assert (fsdp['parameters'] - norms) * 4 == one['parameters'] - norms
    assert fsdp['sampler weights'] == one['sampler weights']
    assert fsdp['rollout: KV pool'] * 4 == one['rollout: KV pool']
    tensor = memory.estimate(run, SHAPE, {'data': 1, 'fsdp': 1, 'tensor': 2}, 'gpu')
    assert (tensor['sampler weights'] - norms) * 2 == one['sampler weights'] - norms
    assert tensor['rollout: KV pool'] * 2 == one['rollout: KV pool']
    # Two KV heads over four shards: one on each. Over three: both on each.
    for shards, fewer in ((4, 2), (3, 1)):
        found = memory.estimate(run, SHAPE, {'data': 1, 'fsdp': 1, 'tensor': shards}, 'gpu')
        assert found['rollout: KV pool'] * fewer == one['rollout: KV pool']


def test_options_that_cost_memory_show():
    plain = memory.estimate(make_run(), SHAPE, ONE, 'gpu')
    assert 'start policy' not in plain
    assert memory.estimate(make_run(**{'learner.kl_coef': 0.1}), SHAPE, ONE, 'gpu')['start policy'] > 0
    never = {'mismatch.every_steps': 0, 'mismatch.floor_every_steps': 0}
    assert 'rollout: hidden states' not in memory.estimate(make_run(**never), SHAPE, ONE, 'gpu')
    of_values = {'learner.advantage': 'gae', 'critic.kind': 'trunk'}
    assert 'critic' not in plain
    trunk = memory.estimate(make_run(**of_values), SHAPE, ONE, 'gpu')
    assert trunk['critic'] == 3 * (plain['parameters'] + 4 * 64)  # weights and two moments, a head of width 64
    head = memory.estimate(make_run(**of_values | {'critic.kind': 'head'}), SHAPE, ONE, 'gpu')
    assert head['critic'] == 3 * 4 * 64
    adaptive = make_run(**{'schedule.kind': 'adaptive', 'controller.probes': 1})
    assert memory.estimate(adaptive, SHAPE, ONE, 'gpu')['rollout: KV pool'] > plain['rollout: KV pool']
    assert memory.estimate(adaptive, SHAPE, ONE, 'gpu', trains=False) == plain
    small_pool = memory.estimate(make_run(**{'rollout.pool_pages': 64}), SHAPE, ONE, 'gpu')
    assert small_pool['rollout: KV pool'] * 2 == plain['rollout: KV pool']
    kept = 'learner: kept activations'
    assert memory.estimate(make_run(**{'model.remat': False}), SHAPE, ONE, 'gpu')[kept] > 5 * plain[kept]
    # cuDNN keeps no attention weights
    assert memory.estimate(make_run(), SHAPE, ONE, 'tpu')['learner: one layer'] > plain['learner: one layer']


def test_landmarks_are_as_wide_as_the_policy_makes_them():
    plain, quest, softmax = (
        memory.estimate(make_run(**{'schedule.policy': policy}), SHAPE, ONE, 'gpu')
        for policy in ('block_mean', 'quest', 'group_softmax')
    )
    for part in ('rollout: landmarks', 'rollout: landmarks of half the slots'):
        assert quest.pop(part) == 2 * plain[part]
    assert quest.items() < plain.items()
    assert softmax == plain


def test_the_phases_do_not_add_up():
    parts = {'parameters': 5, 'rollout: KV pool': 7, 'learner: gradients': 3, 'learner: logits': 1}
    assert memory.peak_bytes(parts) == 12


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_activations_agree_with_the_compiler(dtype):
    shape = dataclasses.replace(SHAPE, layers=2, d_model=128, head_dim=32, d_ff=384)
    run = make_run(**{'model.compute_dtype': dtype, 'learner.row_tokens': 256})
    graphdef, params = abstract_decoder(shape, compute_dtype=jnp.dtype(dtype))

    def loss(params, tokens_BT, positions_BT):
        hidden_BTD = nnx.merge(graphdef, params).hidden(tokens_BT, positions_BT, causal_attend(None, 'xla'))
        return jnp.square(hidden_BTD.astype(jnp.float32)).mean()

    tokens = jax.ShapeDtypeStruct((4, 256), jnp.int32)
    counted = jax.jit(jax.grad(loss)).lower(params, tokens, tokens).compile().memory_analysis().temp_size_in_bytes
    parts = memory.estimate(run, shape, ONE, 'cpu')
    estimated = sum(parts.get(f'learner: {name}', 0) for name in ('kept activations', 'one layer', 'cast weights'))
    assert 0.7 < estimated / counted < 1.5


def test_what_does_not_fit_is_an_error_with_the_parts_and_what_to_do():
    parts = memory.estimate(make_run(), SHAPE, ONE, 'gpu')
    needed = memory.peak_bytes(parts)
    assert memory.check_fits(make_run(), SHAPE, ONE, Device(int(needed / (1 - memory.HEADROOM)) + 1)) == parts
    assert memory.check_fits(make_run(), SHAPE, ONE, Device(None)) == parts
    with pytest.raises(ConfigError) as caught:
        memory.check_fits(make_run(**{'rollout.slots': 4096}), SHAPE, ONE, Device(2**28))
    text = str(caught.value)
    assert 'but only 256.0 MiB are available' in text
    assert re.search(r'^  rollout: KV pool +384\.0 MiB$', text, re.MULTILINE)
    assert 'rollout.slots' in text.splitlines()[-1]


@pytest.mark.parametrize(
    ('changes', 'shape', 'words'),
    [
        (
            {'learner.head_chunk_tokens': 100_000, 'learner.rows_per_microbatch': 300},
            {'vocab_size': 200_000},
            'head_chunk_tokens',
        ),
        ({'learner.rows_per_microbatch': 512}, {}, 'rows_per_microbatch'),
        ({'rollout.slots': 4096, 'rollout.page_tokens': 8}, {'kv_heads': 1, 'd_model': 512}, 'every_steps=0'),
        ({'learner.head_chunk_tokens': 1, 'rollout.prefill_rows': 1}, {'vocab_size': 100_000_000}, 'parallel.fsdp'),
    ],
)
def test_the_advice_is_about_the_largest_part(changes, shape, words):
    with pytest.raises(ConfigError, match=words):
        memory.check_fits(make_run(**changes), dataclasses.replace(SHAPE, **shape), ONE, Device(1000))


def test_host_memory_is_the_smallest_of_what_limits_it(tmp_path):
    (tmp_path / 'proc').mkdir()
    (tmp_path / 'proc/meminfo').write_text('MemTotal: 4000 kB\nMemAvailable:    3000 kB\n')
    assert memory.host_available_bytes(tmp_path) == 3000 * 1024
    cgroup = tmp_path / 'sys/fs/cgroup'
    cgroup.mkdir(parents=True)
    (cgroup / 'memory.max').write_text('max\n')
    (cgroup / 'memory.current').write_text('1000\n')
    assert memory.host_available_bytes(tmp_path) == 3000 * 1024
    (cgroup / 'memory.max').write_text('501000\n')
    assert memory.host_available_bytes(tmp_path) == 500_000


def test_this_machine_tells_its_memory():
    assert 2**20 < memory.available_bytes(jax.local_devices()[0]) < 2**50


@pytest.mark.parametrize(
    ('size', 'text'), [(0, '0 B'), (1023, '1023 B'), (1536, '1.5 KiB'), (5 * 2**30, '5.0 GiB'), (2**51, '2,048.0 TiB')]
)
def test_sizes_are_shown_in_binary_units(size, text):
    assert memory.show_bytes(size) == text


def fitted(available, platform='gpu', trains=True, **changes):
    run = make_run(**changes)
    return run, *memory.fit_pool(run, SHAPE, ONE, available, platform, trains=trains)


def test_a_pool_that_is_not_given_takes_what_is_left():
    """Of half of what the run needs, with nothing but the pool to give: as many pages as fit, and not one more."""
    parts = memory.estimate(make_run(), SHAPE, ONE, 'gpu')
    of_page = memory.page_bytes(make_run(), SHAPE, 1)
    assert parts['rollout: KV pool'] == 8 * 16 * of_page
    others = sum(size for name, size in parts.items() if not name.startswith(('learner', 'rollout: KV pool')))
    available = int((others + 40.5 * of_page) / (1 - memory.HEADROOM))
    _, run, note = fitted(available)
    assert run.rollout.pool_pages == 40
    assert '40 pages on each device (640 tokens); all slots at their longest would fill 128' in note
    again = memory.fit_pool(run, SHAPE, ONE, available, 'gpu')
    assert again == (run, '')


def test_a_pool_that_fits_is_left_alone():
    for available, platform, changes in (
        (2**40, 'gpu', {}),
        (None, 'gpu', {}),
        (1000, 'cpu', {}),  # its free memory changes by the minute
        (1000, 'gpu', {'rollout.pool_pages': 100}),
    ):
        given, run, note = fitted(available, platform, **changes)
        assert run is given
        assert note == ''


def test_no_room_for_a_longest_sequence_is_an_error_at_start():
    parts = memory.estimate(make_run(), SHAPE, ONE, 'gpu', trains=False)
    others = sum(size for name, size in parts.items() if name.startswith('rollout: ') and 'pool' not in name)
    others += parts['parameters'] + parts['sampler weights']
    room = lambda pages: int((others + (pages + 0.5) * memory.page_bytes(make_run(), SHAPE, 1)) / (1 - memory.HEADROOM))
    assert fitted(room(16), trains=False)[1].rollout.pool_pages == 16
    with pytest.raises(
        ConfigError, match=r'pool_pages=0: .* could have 15 pages, one longest sequence needs 16; beside'
    ):
        fitted(room(15), trains=False)


def test_a_probe_needs_room_for_both_its_caches():
    adaptive = {'schedule.kind': 'adaptive', 'controller.probes': 1}
    parts = memory.estimate(make_run(**adaptive), SHAPE, ONE, 'gpu')
    others = sum(size for name, size in parts.items() if not name.startswith(('learner', 'rollout: KV pool')))
    available = int((others + 31.5 * memory.page_bytes(make_run(), SHAPE, 1)) / (1 - memory.HEADROOM))
    with pytest.raises(ConfigError, match='31 pages, one longest sequence needs 32'):
        fitted(available, **adaptive)


def test_the_sampler_is_built_with_the_pool_that_was_found(monkeypatch, capsys):
    from sparrow_jax import assembly, commands

    run = resolve(commands.load_config('configs/tiny.py:smoke'))
    smaller = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, pool_pages=40))
    monkeypatch.setattr(memory, 'fit_pool', lambda *_, **__: (smaller, 'the pool takes what is left'))
    assert assembly.assemble(run, trains=False).engine().pool_pages == 40
    assert 'note: the pool takes what is left' in capsys.readouterr().err
