"""A tiny float32 learner for the tests, and what it computes written once more: plainly, one sequence a row."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs import base
from sparrow_jax.assembly import Parts
from sparrow_jax.config import RunConfig, resolve
from sparrow_jax.learner.learner import Learner, LearnerState
from sparrow_jax.learner.rows import Counts, Sample, micro_batches
from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.parallel import mesh as meshes

VOCAB, ROW_TOKENS, TEMPERATURE = 29, 32, 0.6


def make_run(**changes) -> RunConfig:
    """A run of a random Qwen3 model. Unless changed: temperature .6, no learning, no clipping of the gradient, so that
    the optimizer's first moment after one update is (1 - beta1) times the gradient."""
    config = base.get_config()
    config.model.random_weights = True
    config.model.compute_dtype = 'float32'
    config.model.remat = False
    # Each size differs from the others, so that no swapped axis goes unnoticed; all but the vocabulary are even.
    shape = {
        'vocab_size': VOCAB,
        'd_model': 16,
        'layers': 1,
        'query_heads': 4,
        'kv_heads': 2,
        'head_dim': 8,
        'd_ff': 24,
    }
    config.model.shape.update(shape)
    config.model.shape.rope_theta = 1e4
    config.schedule.dense_layers = (0,)
    config.rollout.max_prompt_tokens = config.rollout.max_response_tokens = ROW_TOKENS // 2
    config.rollout.temperature = TEMPERATURE
    config.learner.row_tokens = ROW_TOKENS
    config.learner.rows_per_microbatch = 2
    config.learner.head_chunk_tokens = 22  # 11 tokens of two rows: does not divide a row
    config.learner.packing = 'on'
    config.optimizer.learning_rate = 0.0
    config.optimizer.max_grad_norm = 1e9
    config.update_from_flattened_dict(changes)
    return resolve(config)


@contextlib.contextmanager
def quick_compile():
    """Compiles in a third of the time, to slower code of the same arithmetic."""
    jax.config.update('jax_disable_most_optimizations', True)
    try:
        yield
    finally:
        jax.config.update('jax_disable_most_optimizations', False)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A learner with its first state."""

    run: RunConfig
    graphdef: nnx.GraphDef
    learner: Learner
    state: LearnerState

    @property
    def params(self) -> nnx.State:
        return self.state.params

    def batches(self, samples, reference=None):
        """What `Learner.update` takes, with old log-probs from the learner itself, as the training loop makes it."""
        batches = []
        for rows in map(self.learner.device, micro_batches(samples, self.learner.layout)):
            logp_old_BT = self.learner.score(self.params, rows).logp_BT
            logp_reference_BT = logp_old_BT if reference is None else self.learner.score(reference, rows).logp_BT
            batches.append((rows, logp_old_BT, logp_reference_BT))
        return batches

    def update(self, batches, counts=None):
        """(state, metrics) after one update from the first state, which stays usable."""
        if counts is None:
            counts = sum((rows.counts for rows, _, _ in batches), Counts(0.0, 0.0))
        with quick_compile():
            return self.learner.update(jax.tree.map(jnp.copy, self.state), batches, counts)

    def gradients(self, batches, counts=None):
        """(gradient of every weight, metrics) of one update."""
        state, metrics = self.update(batches, counts)
        return first_gradients(state, self.run), metrics


def make_tiny(mesh=None, **changes) -> Tiny:
    run = make_run(**changes)
    mesh = meshes.make_mesh(run.parallel) if mesh is None else mesh
    shape = DecoderShape(**dataclasses.asdict(run.model.shape))
    graphdef, _ = abstract_decoder(shape, remat=run.model.remat, compute_dtype=jnp.dtype(run.model.compute_dtype))
    # Only weights are asked of it: no tokenizer, no schedule.
    parts = Parts(run, mesh, shape, None, graphdef, graphdef, None, {})
    learner = Learner(graphdef, parts.abstract_params(), mesh, run, shape.d_model)
    return Tiny(run, graphdef, learner, learner.init(parts.start_params()))


def first_gradients(state: LearnerState, run: RunConfig) -> list[np.ndarray]:
    """The gradients that a first, unclipped update was made from, from Adam's first moment."""
    moments = state.optimizer[1][0].mu
    return [np.asarray(x) / np.float32(1 - run.optimizer.beta1) for x in jax.tree.leaves(moments)]


def make_samples(lengths, seed=0, vocab=VOCAB):
    """Random prompts and responses with random advantages and actor log-probs near those of a uniform guess."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt, response in lengths:
        ids = rng.integers(0, vocab, prompt + response)
        logp_actor = -np.log(vocab) + 0.5 * rng.normal(size=response)
        samples.append(Sample(ids[:prompt], ids[prompt:], logp_actor.astype(np.float32), float(rng.normal())))
    return samples


def plain_attend(layer, q_BTHA, k_BTKA, v_BTKA):
    """softmax(q . k / sqrt(A)) v over earlier tokens, with the whole [T, T] mask."""
    del layer
    group = q_BTHA.shape[2] // k_BTKA.shape[2]
    k_BTHA, v_BTHA = jnp.repeat(k_BTKA, group, axis=2), jnp.repeat(v_BTKA, group, axis=2)
    score_BHTS = jnp.einsum('bthd,bshd->bhts', q_BTHA, k_BTHA) / q_BTHA.shape[-1] ** 0.5
    causal_TS = jnp.tril(jnp.ones(score_BHTS.shape[-2:], bool))
    return jnp.einsum('bhts,bshd->bthd', jax.nn.softmax(jnp.where(causal_TS, score_BHTS, -jnp.inf), axis=-1), v_BTHA)


@functools.partial(jax.jit, static_argnums=0)
def plain_hidden(graphdef, params, ids_BT):
    """Final hidden states [B, T, D] of one sequence a row, padded at its end."""
    positions_BT = jnp.broadcast_to(jnp.arange(ids_BT.shape[1]), ids_BT.shape)
    return nnx.merge(graphdef, params).hidden(ids_BT, positions_BT, plain_attend)


@functools.partial(jax.jit, static_argnums=0)
def plain_logps(graphdef, params, ids_BT, temperature):
    """log softmax(logits / temperature) of each next token, [B, T - 1], all logits at once."""
    logits_BTV = nnx.merge(graphdef, params).logits(plain_hidden(graphdef, params, ids_BT))
    logp_BTV = jax.nn.log_softmax(logits_BTV[:, :-1] / temperature, axis=-1)
    return jnp.take_along_axis(logp_BTV, ids_BT[:, 1:, None], axis=-1)[..., 0]


@functools.partial(jax.jit, static_argnums=0)
def plain_gradients(graphdef, params, ids_BT, temperature, weight_BT):
    """Gradients of sum(weight * logp) for every weight of the model; weight_BT [B, T - 1] by next token."""
    loss = lambda params: (weight_BT * plain_logps(graphdef, params, ids_BT, temperature)).sum()
    return jax.tree.leaves(jax.grad(loss)(params))


def pad(samples):
    """The samples' tokens, one a row of ROW_TOKENS: [B, T]."""
    ids_BT = np.zeros((len(samples), ROW_TOKENS), np.int32)
    for ids_T, sample in zip(ids_BT, samples, strict=True):
        ids_T[: sample.tokens] = np.concatenate([sample.prompt_ids, sample.response_ids])
    return ids_BT


def answer_places(sample: Sample) -> slice:
    """The places of a row that predict the sample's response."""
    return slice(len(sample.prompt_ids) - 1, sample.tokens - 1)
