"""The sampler on Pallas kernels draws the tokens that it draws on the JAX definitions, in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sampler_setup import (
    FUSED_LLAMA,
    FUSED_SHAPE,
    TIGHT,
    WIDE_SHAPE,
    Sampler,
    assert_same,
    make_model,
    make_requests,
)

from pallas_kernels.implementation import Implementation, choose
from sparrow_jax.config import ConfigError
from sparrow_jax.rollout import functions as functions_module
from sparrow_jax.rollout.fused_step import why_unfused
from sparrow_jax.sparsity.mismatch import acceptance, lower_quantile

# Interpreted, a step takes seconds: five tokens, of which the last ones read 3 of 4 pages.
LIMITS = {'slots': 1, 'prefill_rows': 1, 'max_prompt_tokens': 24, 'max_response_tokens': 8, 'segment_steps': 4}
REQUESTS = make_requests((22,), limit=5)
SEED = 1  # no end token is drawn


@pytest.fixture(scope='module')
def wide_model():
    return make_model(WIDE_SHAPE)


@pytest.fixture(scope='module')
def expected(wide_model):
    return responses_of(wide_model, 'reference')


def responses_of(model, kernels):
    sampler = Sampler(model, budgets=TIGHT, shape=WIDE_SHAPE, kernels=kernels, **LIMITS)
    assert sampler.engine.kernels is Implementation(kernels)
    return sampler(REQUESTS, seed=SEED)


def test_some_pages_are_left_out(expected):
    [response] = expected
    assert response.pages_read.tolist() == [0, 3, 3, 3, 3]  # at 23, 24, 25 and 26 tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    'kernels',
    [
        'mosaic_tpu_interpreted',
        pytest.param(
            'mosaic_gpu_interpreted',
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11), reason='the GPU interpreter of jax before 0.11 takes minutes for it'
            ),
        ),
    ],
)
def test_interpreted_kernels_draw_the_same_tokens(wide_model, expected, kernels):
    assert_same(responses_of(wide_model, kernels), expected)


@pytest.mark.gpu
def test_the_kernels_of_this_machine_draw_the_same_tokens(wide_model, expected):
    kernels, why = choose(jax.devices()[0])
    assert kernels.platform, why
    assert_same(responses_of(wide_model, kernels), expected, atol=1e-4)


@pytest.mark.parametrize('shape', [FUSED_SHAPE, FUSED_LLAMA], ids=lambda shape: shape.family)
def test_the_fused_step_draws_the_same_tokens(shape):
    """Its definitions in JAX: the kernels are compared with those elsewhere."""
    model, drawn = make_model(shape), []
    for fused in (False, True):
        sampler = Sampler(model, TIGHT, shape=shape, kernels='reference', slots=2)
        functions = sampler.engine.functions
        functions.statics = dataclasses.replace(functions.statics, fused=fused)
        drawn.append(sampler(make_requests((22, 9, 13), limit=20)))
    assert_same(*drawn, atol=1e-5)


def test_the_fused_step_is_for_decoders_that_its_kernels_take(monkeypatch):
    monkeypatch.setattr(functions_module, 'choose', lambda _: (Implementation.MOSAIC_GPU, 'some chip'))

    def engine(shape=FUSED_SHAPE, dtype='bfloat16', **settings):
        return Sampler(make_model(shape, jnp.dtype(dtype)), shape=shape, dtype=dtype, **settings).engine

    assert engine().functions.statics.fused
    for other, reason in (
        (engine(WIDE_SHAPE), 'multiples of 128, not 32'),
        (engine(dtype='float32'), 'bfloat16, not float32'),
        (engine(slots=130), 'up to 128 rows, not 130'),
    ):
        assert not other.functions.statics.fused
        assert other.why_kernels.startswith('some chip; ')
        assert reason in other.why_kernels


def test_every_matrix_of_a_layer_must_fit_the_fused_kernels():
    fits = dataclasses.replace(FUSED_LLAMA, d_model=128, query_heads=2, kv_heads=1, head_dim=64, d_ff=192)
    assert why_unfused(fits, 16, jnp.dtype('bfloat16')) is None
    for wrong, reason in (
        ({'d_model': 192}, 'multiples of 128, not 192'),
        ({'head_dim': 32, 'query_heads': 4}, '128 and 32 and 192 columns'),  # queries as wide as the model, keys not
        ({'d_ff': 200}, '200 columns'),
    ):
        assert reason in why_unfused(dataclasses.replace(fits, **wrong), 16, jnp.dtype('bfloat16'))


@pytest.mark.gpu
@pytest.mark.parametrize('shape', [WIDE_SHAPE, FUSED_SHAPE, FUSED_LLAMA], ids=lambda s: f'{s.family}_{s.d_model}')
def test_bfloat16_distributions_on_the_kernels_of_this_machine(shape, capsys):
    """Exact alpha between kernels and definitions, of all tokens that were drawn after the same ones."""
    kernels, why = choose(jax.devices()[0])
    assert kernels.platform, why
    requests = make_requests((24, 9, 16, 17, 8, 23, 9, 24), limit=40, samples=8)
    model, drawn = make_model(shape, jnp.bfloat16), []
    for name in (kernels, 'reference'):
        sampler = Sampler(model, TIGHT, keep_hidden=True, shape=shape, dtype='bfloat16', kernels=name, slots=32)
        drawn.append(sampler(requests))
        assert sampler.engine.functions.statics.fused == (name is kernels and shape.d_model == 128)
    decoder = nnx.merge(sampler.engine.graphdef, sampler.weights)
    logp = lambda hidden: jax.nn.log_softmax(decoder.logits(jnp.asarray(hidden)).astype(jnp.float32))
    alpha = []
    for a, b in zip(*drawn, strict=True):
        n = min(len(a.tokens), len(b.tokens))
        agreeing = int(np.cumprod(a.tokens[:n] == b.tokens[:n]).sum())
        n = min(agreeing + 1, n)
        alpha.append(np.asarray(acceptance(logp(a.hidden[:n]), logp(b.hidden[:n]))))
    alpha = np.concatenate(alpha)
    with capsys.disabled():
        print(
            f'\nalpha of {kernels} against reference, bfloat16, {len(alpha)} tokens: mean {alpha.mean():.4f}, '
            f'p05 {lower_quantile(alpha):.4f}'
        )
    assert len(alpha) > 500
    assert alpha.mean() > 0.97


def test_kernels_that_do_not_take_the_heads_are_refused_before_anything_compiles(model):
    with pytest.raises(ConfigError, match=r'rollout.kernels=mosaic_tpu: .*not of 16; set it to reference or auto'):
        Sampler(model, kernels='mosaic_tpu')


@pytest.mark.parametrize('name', ['mosaic_gpu', 'mosaic_tpu'])
def test_kernels_of_another_machine_are_refused_before_anything_compiles(model, name):
    with pytest.raises(ConfigError, match=rf'rollout.kernels={name}: this machine has a cpu; set it to auto'):
        Sampler(model, shape=WIDE_SHAPE, kernels=name)


def test_auto_takes_kernels_only_where_they_have_been_run(wide_model, monkeypatch):
    monkeypatch.setattr(functions_module, 'choose', lambda _: (Implementation.MOSAIC_GPU, 'some chip'))
    monkeypatch.setattr(functions_module, 'PROVEN_PLATFORMS', frozenset())
    engine = Sampler(wide_model, shape=WIDE_SHAPE).engine
    assert engine.kernels is Implementation.REFERENCE
    assert engine.why_kernels.endswith('rollout.kernels=mosaic_gpu tries them')
    monkeypatch.setattr(functions_module, 'PROVEN_PLATFORMS', frozenset({'gpu'}))
    engine = Sampler(wide_model, shape=WIDE_SHAPE).engine
    assert engine.kernels is Implementation.MOSAIC_GPU
    assert engine.why_kernels.startswith('some chip')


def test_auto_says_why_there_are_no_kernels(model):
    engine = Sampler(model).engine
    assert engine.kernels is Implementation.REFERENCE
    assert engine.why_kernels == 'there are no kernels for cpu'
