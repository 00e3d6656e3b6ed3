"""A tiny random model, engines that sample from it, and requests, for the tests of the sampler."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from configs import base
from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.config import ParallelConfig, RolloutConfig, resolve
from sparrow_jax.models.adapter import AdapterSpec, SamplerAdapter, init_adapter
from sparrow_jax.models.decoder import init_decoder
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.parallel.mesh import make_mesh, replicated
from sparrow_jax.parallel.transfer import place
from sparrow_jax.rollout.engine import Engine, Response, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.sparsity.schedules import Schedule

SHAPE = DecoderShape(
    family='qwen3',
    vocab_size=40,
    d_model=32,
    layers=2,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    d_ff=48,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=512,
)
PAGE, MAX_PROMPT, MAX_RESPONSE = 8, 24, 40
PAGES = (MAX_PROMPT + MAX_RESPONSE) // PAGE  # of the longest sequence
BIN_WIDTH = 16
RESERVED_FIRST, RESERVED_LAST = 1, 1
DENSE_LAYERS = (0,)
END_IDS = (0, 7)  # 0 also fills unused places of token arrays
TIGHT = (1, 1, 1, 1)  # budgets of the four bins
MIXED = (0, 1, 2, 3)
ALL = (PAGES,) * 4


WIDE_SHAPE = dataclasses.replace(SHAPE, head_dim=64)  # as the Pallas kernels need it

# As the fused kernels of a decode step need it; the second without QK-norm.
FUSED_SHAPE = dataclasses.replace(WIDE_SHAPE, d_model=128, d_ff=192)
FUSED_LLAMA = dataclasses.replace(FUSED_SHAPE, family='llama')


def make_model(shape=SHAPE, dtype=jnp.float32):
    """(graphdef, params) of a random model that attends to few keys, so that it matters which ones are read."""
    graphdef, params = init_decoder(shape, seed=0, compute_dtype=dtype)
    sharpen = lambda path, x: x * 2.5 if 'q_norm' in jax.tree_util.keystr(path) else x
    return graphdef, jax.tree_util.tree_map_with_path(sharpen, params)


def make_adapter(shape=SHAPE, targets=('q', 'v', 'down'), strength=0.3) -> SamplerAdapter:
    """Of rank 4; strength: of b's random numbers, 0 for an adapter that has not learned yet."""
    spec = AdapterSpec(rank=4, alpha=6.0, targets=targets)
    factors, rng = init_adapter(shape, spec, seed=1), np.random.default_rng(2)
    for layer in factors:
        for pair in layer.values():
            pair['b'] = jnp.asarray(strength * rng.standard_normal(pair['b'].shape), jnp.float32)
    return SamplerAdapter(factors, spec.alpha / spec.rank)


def rollout_config(**changes) -> RolloutConfig:
    config = base.get_config()
    config.model.path = 'given'
    defaults = {
        'slots': 4,
        'max_prompt_tokens': MAX_PROMPT,
        'max_response_tokens': MAX_RESPONSE,
        'page_tokens': PAGE,
        'pool_pages': 0,
        'segment_steps': 8,
        'prefill_rows': 2,
        'halvings': 0,
    }
    return dataclasses.replace(resolve(config).rollout, **defaults | changes)


class Sampler:
    """An engine with its weights; each call samples with the given budgets, which are values to the engine.

    budgets: the most that it is made for. keep_hidden: in all calls, since the two ways compile apart.
    mesh: sizes of (data, fsdp, tensor). shape, dtype: of the model, and of cache and activations.
    probing: of an adaptive schedule. policy: how pages are chosen.
    """

    def __init__(
        self,
        model,
        budgets=ALL,
        keep_hidden=False,
        mesh=(-1, 1, 1),
        shape=SHAPE,
        dtype='float32',
        probing=None,
        policy='block_mean',
        **rollout,
    ):
        graphdef, params = model
        self.keep_hidden = keep_hidden
        kind = 'adaptive' if probing else 'fixed'
        self.schedule = Schedule(
            kind, PAGE, BIN_WIDTH, RESERVED_FIRST, RESERVED_LAST, DENSE_LAYERS, budgets, SelectionPolicy(policy)
        )
        devices = make_mesh(ParallelConfig(*mesh))
        self.engine = Engine(
            graphdef, shape, devices, rollout_config(**rollout), self.schedule, END_IDS, dtype, probing
        )
        self.weights = self.engine.weights(place(params, replicated(devices)))

    def __call__(
        self,
        requests,
        *,
        budgets=TIGHT,
        temperature=1.0,
        top_p=1.0,
        sparse=True,
        seed=5,
        step=3,
        adapter=None,
        **callbacks,
    ) -> list[Response]:
        self.engine.schedule = dataclasses.replace(self.schedule, budget_pages=budgets)
        sampling = Sampling(temperature, top_p, sparse, self.keep_hidden)
        return self.engine.generate(
            self.weights,
            requests,
            run_key=jax.random.key(seed),
            step=step,
            sampling=sampling,
            adapter=adapter,
            **callbacks,
        )


def prompt_of(number: int, length: int) -> list[int]:
    """A prompt that is a function of its number; end tokens occur in it."""
    return np.random.default_rng(number).integers(0, SHAPE.vocab_size, length).tolist()


def make_requests(lengths=(24, 1, 16, 17, 8, 23, 9, 24, 5), limit=MAX_RESPONSE, samples=1) -> list[Request]:
    """Requests with prompts of these lengths, in pages: whole ones, one token less and one more."""
    return [
        Request(prompt_of(number, length), number, sample, limit)
        for number, length in enumerate(lengths)
        for sample in range(samples)
    ]


def assert_same(responses, expected, atol=1e-5):
    """Equal tokens, pages and finish reasons; log-probs up to the rounding of another batch shape."""
    assert len(responses) == len(expected)
    for i, (a, b) in enumerate(zip(responses, expected, strict=True)):
        np.testing.assert_array_equal(a.tokens, b.tokens, err_msg=f'response {i}')
        np.testing.assert_array_equal(a.pages_read, b.pages_read, err_msg=f'response {i}')
        np.testing.assert_allclose(a.logp, b.logp, rtol=0, atol=atol, err_msg=f'response {i}')
        assert a.finish_reason == b.finish_reason, f'response {i}'
