"""The learner: the policy's weights and optimizer state, and the jitted functions that score rows and update on them.

Micro-batches come from `rows`; log-probs and mismatch per token, metrics and updated weights go to the training loop.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from sparrow_jax.config import OptimizerConfig, RunConfig
from sparrow_jax.learner.heads import token_acceptance, token_logps
from sparrow_jax.learner.losses import PolicyLoss, policy_loss, supervised_loss
from sparrow_jax.learner.rows import RowLayout, Rows, empty_rows
from sparrow_jax.models.attention import best_implementation, causal_attend
from sparrow_jax.models.splash import why_no_splash
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.parallel.transfer import place, read


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LearnerState:
    """Everything that training changes in the learner, or of the sampler's adapter."""

    params: Any  # nnx.State; of an adapter its factors
    optimizer: Any
    updates: Any  # int32 scalar, optimizer updates so far


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scores:
    """Per place of a micro-batch, under the dense policy at the sampling temperature."""

    logp_BT: jax.Array
    entropy_BT: jax.Array
    alpha_BT: jax.Array  # exact acceptance; [B, 0] when no hidden states were kept
    alpha_top20_BT: jax.Array


@dataclasses.dataclass(frozen=True)
class _Statics:
    temperature: float
    head_chunk_tokens: int
    attention: str
    packed: bool
    supervised: bool
    mesh: Mesh
    loss: PolicyLoss


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """AdamW with a global-norm clip; weight decay on matrices only.

    The rate of update n = 0, 1, ... is learning_rate * min(1, (n + 1) / warmup_steps), so that the first update already
    moves, and after the warm-up falls along a half cosine to 0 in decay_steps updates (0: stays).
    """

    def rate(count: jax.Array) -> jax.Array:
        ramp = jnp.minimum(1.0, (count + 1) / max(config.warmup_steps, 1))
        if not config.decay_steps:
            return config.learning_rate * ramp
        done = jnp.clip((count - config.warmup_steps) / config.decay_steps, 0.0, 1.0)
        return config.learning_rate * ramp * 0.5 * (1 + jnp.cos(jnp.pi * done))

    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(rate, config.beta1, config.beta2, config.eps, weight_decay=config.weight_decay, mask=matrices),
    )


class Learner:
    """Scores and updates the dense policy.

    Args:
        graphdef: of a decoder built with the run's remat setting.
        abstract_params: its weights' shapes and shardings. Gradients and moments lie where their weights lie.
        mesh, run: of the run.
        hidden_size: D of the sampler's hidden states.
    """

    def __init__(
        self, graphdef: nnx.GraphDef, abstract_params: nnx.State, mesh: Mesh, run: RunConfig, hidden_size: int
    ):
        attention = _attention(abstract_params, mesh, run)
        packing = run.learner.packing == 'on' or (run.learner.packing == 'auto' and attention != 'cudnn')
        self.mesh = mesh
        shards = meshes.batch_shards(mesh)
        rows = -(-run.learner.rows_per_microbatch // shards) * shards
        self.layout = RowLayout(run.row_tokens, rows, packing)
        self.hidden_size, self.hidden_dtype = hidden_size, jnp.dtype(run.model.compute_dtype)
        self.optimizer = make_optimizer(run.optimizer)
        statics = _Statics(
            temperature=run.rollout.temperature if run.phase == 'rl' else 1.0,
            head_chunk_tokens=run.learner.head_chunk_tokens,
            attention='xla' if packing == (attention == 'cudnn') else attention,
            packed=packing,
            supervised=run.phase == 'supervised',
            mesh=mesh,
            loss=PolicyLoss(run.learner.clip_low, run.learner.clip_high, run.learner.tis_cap, run.learner.kl_coef),
        )
        self.attention = statics.attention
        self.abstract_state = abstract_state(self.optimizer, abstract_params, mesh)
        # Every output's place is fixed, so that no step meets another layout than the one compiled in the warm-up.
        places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        whole, split = meshes.replicated(mesh), meshes.batch_sharding(mesh)
        self._score = jax.jit(functools.partial(_score, graphdef, statics), out_shardings=split)
        self._accumulate = jax.jit(
            functools.partial(_accumulate, graphdef, statics), donate_argnums=1, out_shardings=(places.params, whole)
        )
        self._apply = jax.jit(
            functools.partial(apply_gradients, self.optimizer), donate_argnums=0, out_shardings=(places, whole)
        )
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=places.params)
        self._init = jax.jit(self._fresh, out_shardings=places)

    def init(self, params: nnx.State) -> LearnerState:
        """A fresh state around a copy of these weights."""
        return self._init(params)

    def _fresh(self, params: nnx.State) -> LearnerState:
        return LearnerState(jax.tree.map(jnp.copy, params), self.optimizer.init(params), jnp.zeros((), jnp.int32))

    def device(self, rows: Rows) -> Rows:
        """Rows split over the data shards; absent hidden states too have the dtype that the warm-up compiled for."""
        rows = dataclasses.replace(rows, hidden_BTD=rows.hidden_BTD.astype(self.hidden_dtype, copy=False))
        return place(rows, meshes.batch_sharding(self.mesh))

    def without_hidden(self, rows: Rows) -> Rows:
        """Rows on the device that leave the sampler's hidden states behind: updates do not need them."""
        empty_BT0 = np.zeros((*rows.token_BT.shape, 0), self.hidden_dtype)
        return dataclasses.replace(rows, hidden_BTD=place(empty_BT0, meshes.batch_sharding(self.mesh)))

    def score(self, params: nnx.State, rows: Rows) -> Scores:
        """Dense log-probs and entropy of every place; acceptance too when the rows carry the sampler's hidden
        states.
        """
        return self._score(params, rows)

    def update(
        self, state: LearnerState, batches: Iterable[tuple[Rows, jax.Array, jax.Array]], response_tokens: float
    ) -> tuple[LearnerState, dict[str, float]]:
        """One optimizer update from micro-batches.

        Args:
            state: donated.
            batches: (rows, logp_old_BT, logp_reference_BT) each.
            response_tokens: kept tokens of all of them: the denominator of the token mean. With 0, the gradient is 0.

        Returns:
            The new state and metrics: token means of the loss's sums, 'actor/grad_norm'.
        """
        grads, sums = self._zeros(state.params), None
        denominator = np.float32(max(response_tokens, 1.0))
        for rows, logp_old_BT, logp_reference_BT in batches:
            grads, more = self._accumulate(state.params, grads, rows, logp_old_BT, logp_reference_BT, denominator)
            sums = more if sums is None else combine_sums(sums, more)
        state, grad_norm = self._apply(state, grads)
        metrics = {'actor/grad_norm': float(grad_norm)}
        for name, value in (sums or {}).items():
            is_max = name.startswith('max/')
            metrics[name.removeprefix('max/')] = float(value) if is_max else float(value) / float(denominator)
        return state, metrics

    def warm_up(self, state: LearnerState, *, keep_hidden: Iterable[bool]) -> LearnerState:
        """Compiles scoring and updating for every row length; the update's gradient is zero and its result is thrown
        away.
        """
        grads = self._zeros(state.params)
        one = np.float32(1)
        for length in self.layout.buckets():
            for keep in keep_hidden:
                self.score(state.params, self._padding(length, self.hidden_size if keep else 0))
            rows = self._padding(length, 0)
            logp_BT = self.score(state.params, rows).logp_BT
            read(logp_BT)
            grads, _ = self._accumulate(state.params, grads, rows, logp_BT, logp_BT, one)
        copy = jax.tree.map(jnp.copy, state)
        jax.block_until_ready(self._apply(copy, grads)[1])
        return state

    def programs(self, *, keep_hidden: bool) -> dict[str, tuple[Any, tuple]]:
        """The functions of a step on the longest rows and what they take, with shapes in place of arrays.

        Args:
            keep_hidden: whether the sampler's hidden states are scored too.
        Returns:
            Name to the jitted function and its arguments.
        """
        split, whole = meshes.batch_sharding(self.mesh), meshes.replicated(self.mesh)
        place = lambda make: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), jax.eval_shape(make)
        )
        length = self.layout.buckets()[-1]
        state, denominator = self.abstract_state, jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        scored = place(lambda: self._padding(length, self.hidden_size if keep_hidden else 0))
        rows = place(lambda: self._padding(length, 0))
        logp_BT = rows.logp_actor_BT
        return {
            'scoring': (self._score, (state.params, scored)),
            'gradients': (self._accumulate, (state.params, state.params, rows, logp_BT, logp_BT, denominator)),
            'optimizer update': (self._apply, (state, state.params)),
        }

    def _padding(self, length: int, hidden_size: int) -> Rows:
        return self.device(empty_rows(self.layout, length, hidden_size, self.hidden_dtype))


def _attention(abstract_params: nnx.State, mesh: Mesh, run: RunConfig) -> str:
    """The implementation of `causal_attend` for packed rows on TPU and for rows of one sequence elsewhere."""
    if mesh.devices.flat[0].platform != 'tpu':
        return best_implementation(run.model.compute_dtype)
    *_, kv_heads, head_dim = abstract_params['layers'][0]['k'].shape
    return 'xla' if why_no_splash(head_dim, kv_heads, mesh.shape['tensor'], run.row_tokens) else 'splash'


def abstract_state(optimizer: optax.GradientTransformation, abstract_params: Any, mesh: Mesh) -> LearnerState:
    """Shapes and shardings of a state around such weights; moments lie where weights of their shape do."""
    whole = meshes.replicated(mesh)
    by_shape = {(x.shape, x.dtype): x.sharding for x in jax.tree.leaves(abstract_params)}
    moments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_shape.get((x.shape, x.dtype), whole)),
        jax.eval_shape(optimizer.init, abstract_params),
    )
    return LearnerState(abstract_params, moments, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole))


def combine_sums(a: dict[str, jax.Array], b: dict[str, jax.Array]) -> dict[str, float]:
    """Of two micro-batches: sums added up, and the larger of those under 'max/'."""
    return {k: max(float(a[k]), float(b[k])) if k.startswith('max/') else float(a[k]) + float(b[k]) for k in a}


def _hidden(graphdef, statics: _Statics, params, rows: Rows):
    decoder = nnx.merge(graphdef, params)
    attend = causal_attend(rows.segment_BT if statics.packed else None, statics.attention, statics.mesh)
    return decoder, decoder.hidden(rows.token_BT, rows.position_BT, attend)


def _score(graphdef, statics: _Statics, params, rows: Rows) -> Scores:
    decoder, hidden_BTD = _hidden(graphdef, statics, params, rows)
    head = (statics.temperature, statics.head_chunk_tokens)
    logp_BT, entropy_BT = token_logps(decoder.logits, hidden_BTD, rows.target_BT, *head)
    if rows.hidden_BTD.shape[2]:
        alpha_BT, top20_BT = token_acceptance(decoder.logits, hidden_BTD, rows.hidden_BTD, *head)
    else:
        alpha_BT = top20_BT = jnp.zeros((rows.token_BT.shape[0], 0), jnp.float32)
    return Scores(logp_BT, entropy_BT, alpha_BT, top20_BT)


def _accumulate(graphdef, statics: _Statics, params, grads, rows: Rows, logp_old_BT, logp_reference_BT, denominator):
    def loss_of(params):
        decoder, hidden_BTD = _hidden(graphdef, statics, params, rows)
        logp_BT, _ = token_logps(
            decoder.logits, hidden_BTD, rows.target_BT, statics.temperature, statics.head_chunk_tokens
        )
        if statics.supervised:
            loss, sums = supervised_loss(logp_BT, rows.mask_BT)
        else:
            loss, sums = policy_loss(
                logp_BT,
                logp_old_BT,
                rows.logp_actor_BT,
                logp_reference_BT,
                rows.advantage_BT,
                rows.mask_BT,
                statics.loss,
            )
        return loss / denominator, sums

    new, sums = jax.grad(loss_of, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), sums


def apply_gradients(
    optimizer: optax.GradientTransformation, state: LearnerState, grads: Any
) -> tuple[LearnerState, jax.Array]:
    """The state after one update, and the gradients' norm before any clipping."""
    grad_norm = optax.global_norm(grads)
    changes, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, changes)
    return LearnerState(params, optimizer_state, state.updates + 1), grad_norm
