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
from flax import nnx
from jax.sharding import Mesh

from sparrow_jax.config import LearnerConfig, OptimizerConfig, RunConfig
from sparrow_jax.learner.critic import Critic
from sparrow_jax.learner.heads import token_acceptance, token_logps
from sparrow_jax.learner.losses import (
    AGGREGATIONS,
    PolicyLoss,
    combine_sums,
    metric_means,
    policy_loss,
    supervised_loss,
)
from sparrow_jax.learner.rows import Counts, RowLayout, Rows, empty_rows
from sparrow_jax.learner.updates import LearnerState, abstract_state, apply_gradients, fresh_state, make_optimizer
from sparrow_jax.models.attention import best_implementation, causal_attend
from sparrow_jax.models.splash import why_no_splash
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.parallel.transfer import place, read


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
            loss=_policy_loss_of(run.learner),
        )
        self.attention = statics.attention
        aggregation = 'token_mean' if statics.supervised else run.learner.aggregation
        self._denominator = AGGREGATIONS[aggregation].denominator
        self._most_tokens = run.rollout.max_response_tokens
        self.critic = None
        if run.critic.kind != 'none':
            hidden = lambda params, rows: _hidden(graphdef, statics, params, rows)[1]
            optimizer = make_optimizer(critic_optimizer(run))
            self.critic = Critic(run.critic, optimizer, hidden, abstract_params, mesh, hidden_size)
        self.abstract_state = dataclasses.replace(
            abstract_state(self.optimizer, abstract_params, mesh),
            critic=self.critic.abstract_state if self.critic else None,
        )
        # Every output's place is fixed, so that no step meets another layout than the one compiled in the warm-up.
        places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        whole, split = meshes.replicated(mesh), meshes.batch_sharding(mesh)
        self._score = jax.jit(functools.partial(_score, graphdef, statics), out_shardings=split)
        self._accumulate = jax.jit(
            functools.partial(_accumulate, graphdef, statics), donate_argnums=1, out_shardings=(places.params, whole)
        )
        self._apply = jax.jit(
            functools.partial(apply_gradients, self.optimizer),
            donate_argnums=0,
            out_shardings=(dataclasses.replace(places, critic=None), whole),
        )
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=places.params)
        self._init = jax.jit(self._fresh, out_shardings=places)

    def init(self, params: nnx.State) -> LearnerState:
        """A fresh state around a copy of these weights."""
        return self._init(params)

    def _fresh(self, params: nnx.State) -> LearnerState:
        state = fresh_state(self.optimizer, jax.tree.map(jnp.copy, params))
        return dataclasses.replace(state, critic=self.critic.fresh(params) if self.critic else None)

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
        self, state: LearnerState, batches: Iterable[tuple[Rows, jax.Array, jax.Array]], counts: Counts
    ) -> tuple[LearnerState, dict[str, float]]:
        """One optimizer update of the policy from micro-batches.

        Args:
            state: donated, the critic's part aside.
            batches: (rows, logp_old_BT, logp_reference_BT) each.
            counts: of all of them; what the loss is divided by comes from it. With none, the gradient is 0.

        Returns:
            The new state and metrics (`losses.metric_means`), 'actor/grad_norm'.
        """
        grads, sums = self._zeros(state.params), None
        denominator = np.float32(max(self._denominator(counts, self._most_tokens), 1.0))
        for rows, logp_old_BT, logp_reference_BT in batches:
            grads, more = self._accumulate(state.params, grads, rows, logp_old_BT, logp_reference_BT, denominator)
            sums = more if sums is None else combine_sums(sums, more)
        state, grad_norm = self._apply_to(state, grads)
        return state, {'actor/grad_norm': float(grad_norm), **metric_means(sums or {}, counts, float(denominator))}

    def values(self, state: LearnerState, rows: Rows) -> jax.Array:
        """The critic's value of every place, see `Critic.values`."""
        critic, critic_state = self._critic_of(state)
        return critic.values(critic_state, state.params, rows)

    def update_critic(
        self, state: LearnerState, batches: Iterable[tuple[Rows, jax.Array, jax.Array]], counts: Counts
    ) -> tuple[LearnerState, dict[str, float]]:
        """One optimizer update of the critic; batches: (rows, value_old_BT, return_BT) each, see `Critic.update`."""
        critic, critic_state = self._critic_of(state)
        new, metrics = critic.update(critic_state, state.params, batches, counts)
        return dataclasses.replace(state, critic=new), metrics

    def _critic_of(self, state: LearnerState) -> tuple[Critic, LearnerState]:
        if self.critic is None or state.critic is None:
            raise ValueError("critic.kind='none': this run has no critic")
        return self.critic, state.critic

    def _apply_to(self, state: LearnerState, grads: nnx.State) -> tuple[LearnerState, jax.Array]:
        new, grad_norm = self._apply(dataclasses.replace(state, critic=None), grads)
        return dataclasses.replace(new, critic=state.critic), grad_norm

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
        copy = jax.tree.map(jnp.copy, dataclasses.replace(state, critic=None))
        jax.block_until_ready(self._apply_to(copy, grads)[1])
        if self.critic is not None:
            self.critic.warm_up(self._critic_of(state)[1], state.params, self.paddings())
        return state

    def paddings(self) -> list[Rows]:
        """Rows of padding of every length in use, on the device, to compile with."""
        return [self._padding(length, 0) for length in self.layout.buckets()]

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
        programs = {
            'scoring': (self._score, (state.params, scored)),
            'gradients': (self._accumulate, (state.params, state.params, rows, logp_BT, logp_BT, denominator)),
            'optimizer update': (self._apply, (dataclasses.replace(state, critic=None), state.params)),
        }
        return programs | (self.critic.programs(state.params, rows, denominator) if self.critic else {})

    def _padding(self, length: int, hidden_size: int) -> Rows:
        return self.device(empty_rows(self.layout, length, hidden_size, self.hidden_dtype))


def _attention(abstract_params: nnx.State, mesh: Mesh, run: RunConfig) -> str:
    """The implementation of `causal_attend` for packed rows on TPU and for rows of one sequence elsewhere."""
    if mesh.devices.flat[0].platform != 'tpu':
        return best_implementation(run.model.compute_dtype)
    *_, kv_heads, head_dim = abstract_params['layers'][0]['k'].shape
    return 'xla' if why_no_splash(head_dim, kv_heads, mesh.shape['tensor'], run.row_tokens) else 'splash'


def _policy_loss_of(config: LearnerConfig) -> PolicyLoss:
    return PolicyLoss(
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        ratio=config.ratio,
        aggregation=config.aggregation,
        correction=config.correction,
        correction_low=config.correction_low,
        correction_high=config.correction_high,
        kl_coef=config.kl_coef if config.kl_placement == 'loss' else 0.0,
    )


def critic_optimizer(run: RunConfig) -> OptimizerConfig:
    """The policy's optimizer settings with the critic's rate, which does not decay."""
    return dataclasses.replace(run.optimizer, learning_rate=run.critic.learning_rate, decay_steps=0)


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
            loss, sums = supervised_loss(logp_BT, rows.loss_mask_BT)
        else:
            loss, sums = policy_loss(
                logp_BT,
                logp_old_BT,
                rows.logp_actor_BT,
                logp_reference_BT,
                rows.advantage_BT,
                rows.loss_mask_BT,
                rows.segment_BT,
                statics.loss,
            )
        return loss / denominator, sums

    new, sums = jax.grad(loss_of, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), sums
