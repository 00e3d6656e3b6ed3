"""DistillSparse: the sparse sampler's adapter learns to sample as the dense policy would (Sparrow, section on
DistillSparse).

Rollouts come from the training loop with the pages that the sampler read for every token; the adapter's factors go to
the sampler, and nowhere else. The policy's weights are given and not changed: no gradient of theirs is ever made.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from pallas_kernels.implementation import Implementation
from pallas_kernels.sparse_prefill import PAGE_MASK
from sparrow_jax.config import ConfigError, DistillConfig, RunConfig
from sparrow_jax.learner.heads import distill_terms, token_logps
from sparrow_jax.learner.losses import PolicyLoss, combine_sums, policy_loss
from sparrow_jax.learner.rows import RowLayout, Rows, Sample, empty_rows, micro_batches
from sparrow_jax.learner.updates import LearnerState, abstract_state, apply_gradients, fresh_state, make_optimizer
from sparrow_jax.models.adapter import AdapterSpec, SamplerAdapter, adapter_axes, init_adapter
from sparrow_jax.models.attention import best_implementation, causal_attend
from sparrow_jax.models.decoder import Attend, Factors, abstract_decoder
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.models.sparse_attention import sparse_causal_attend
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.parallel.transfer import place, read
from sparrow_jax.sparsity.mismatch import lower_quantile
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule

ADAPTER_GRADIENTS, ADAPTER_UPDATE = 'adapter gradients', 'adapter update'  # programs
_METRICS = {  # of `policy_loss`, of which the sparse policy has metrics of its own
    'loss/actor/pg_loss': 'distill/pg_loss',
    'actor/pg_clipfrac': 'distill/pg_clipfrac',
    'rollout_corr/kl': 'distill/actor_kl',
    'rollout_corr/rollout_is_mean': 'distill/rollout_is_mean',
}


@dataclasses.dataclass(frozen=True)
class DistillLoss:
    """Constants of `distill_loss`; see `configs/base.py` (distill)."""

    pg_coef: float
    kl_coef: float
    policy: PolicyLoss


def distill_loss(
    logp_BT: jax.Array,
    kl_BT: jax.Array,
    logp_old_BT: jax.Array,
    logp_actor_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    constants: DistillLoss,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """pg_coef times the `policy_loss` of the sparse policy, and kl_coef KL(sparse || dense) of every token.

    Args:
        logp_BT: float32 log-probs of the sparse policy with the adapter, teacher-forced. kl_BT: nats over the whole
            vocabulary. Both carry gradients.
        logp_old_BT: of the same policy before the updates of this step.
        logp_actor_BT: recorded by the sampler when it drew the tokens.
        advantage_BT: float32. mask_BT: 1 for response tokens.

    Returns:
        The loss summed over tokens, and sums of metrics over tokens. All tokens masked: 0 and zeros.
    """
    one_sequence_BT = jnp.ones_like(mask_BT, jnp.int32)  # a row, or a part of one: nothing here is taken over sequences
    policy, sums = policy_loss(
        logp_BT, logp_old_BT, logp_actor_BT, logp_old_BT, advantage_BT, mask_BT, one_sequence_BT, constants.policy
    )
    kl = jnp.where(mask_BT > 0, kl_BT, 0.0).sum()
    metrics = {ours: sums[name] for name, ours in _METRICS.items()}
    return constants.pg_coef * policy + constants.kl_coef * kl, metrics | {'distill/kl': lax.stop_gradient(kl)}


@dataclasses.dataclass(frozen=True)
class _Statics:
    temperature: float
    head_chunk_tokens: int
    attention: str
    kernels: Implementation
    mesh: Mesh
    spec: AdapterSpec
    page_tokens: int
    reserved_first: int
    reserved_last: int
    dense_layers: tuple[int, ...]
    loss: DistillLoss
    first_is_only: bool  # one update a step: the policy before it is the one that is differentiated


class Distiller:
    """Trains the sampler's adapter on the rollouts of a step.

    Args:
        shape: of the decoder. abstract_params: its weights' shapes and shardings in the learner.
        mesh, run: of the run.
        schedule: of the sampler; its layers and reserved pages count, its budgets are those that were recorded.
        kernels: what runs the teacher-forced sparse attention; the sampler's.
        learner_attention: what runs the learner's.

    Raises:
        ConfigError: KV heads that do not split over the tensor shards, or a rank that a matrix is too small for.

    Attributes:
        spec: of the adapter.
        layout: of the rows: one sequence each.
        abstract_state: shapes and shardings of the adapter and its optimizer's state.
        dense_hidden, sparse_hidden, head: parts of what `update` does with a micro-batch.
    """

    def __init__(
        self,
        shape: DecoderShape,
        abstract_params: nnx.State,
        mesh: Mesh,
        run: RunConfig,
        schedule: Schedule,
        kernels: Implementation,
        learner_attention: str,
    ):
        d, tensor = run.distill, mesh.shape['tensor']
        if shape.kv_heads % tensor:
            raise ConfigError(
                f'parallel.tensor={tensor}: distill.enabled=True splits the {shape.kv_heads} KV heads over it; set it '
                'to a divisor of them'
            )
        self.mesh, self.abstract_params = mesh, abstract_params
        self.dtype, self.updates_per_step = jnp.dtype(run.model.compute_dtype), d.updates_per_step
        self.spec = AdapterSpec(d.rank, d.alpha, d.targets)
        self.layout = _layout(run, meshes.batch_shards(mesh))
        config = dataclasses.replace(
            run.optimizer,
            learning_rate=d.learning_rate,
            warmup_steps=d.warmup_steps,
            decay_steps=0,
            weight_decay=0.0,
            max_grad_norm=d.max_grad_norm,
        )
        self.optimizer = make_optimizer(config)
        statics = _Statics(
            temperature=run.rollout.temperature,
            head_chunk_tokens=run.learner.head_chunk_tokens,
            attention='splash' if learner_attention == 'splash' else best_implementation(run.model.compute_dtype),
            kernels=kernels,
            mesh=mesh,
            spec=self.spec,
            page_tokens=schedule.page_tokens,
            reserved_first=schedule.reserved_first,
            reserved_last=schedule.reserved_last,
            dense_layers=tuple(schedule.dense_layers),
            loss=DistillLoss(d.pg_coef, d.kl_coef, _policy_loss_of(d)),
            first_is_only=d.updates_per_step == 1,
        )
        graphdef, _ = abstract_decoder(
            shape,
            remat=run.model.remat,
            kept_names=(PAGE_MASK,),  # chosen anew in the backward pass, pages of nearly equal scores may differ
            param_dtype=jnp.dtype(run.model.param_dtype),
            compute_dtype=self.dtype,
        )
        axes = adapter_axes(shape, self.spec)
        self._fresh = functools.partial(init_adapter, shape, self.spec)
        factors = jax.tree.map(
            lambda x, of: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=meshes.weight_sharding(mesh, of, x.shape, meshes.LEARNER_RULES)
            ),
            jax.eval_shape(lambda: self._fresh(0)),
            axes,
        )
        self.abstract_state = abstract_state(self.optimizer, factors, mesh)
        # Every output's place is fixed, so that no step meets another layout than the one compiled in the warm-up.
        places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        whole, split = meshes.replicated(mesh), meshes.batch_sharding(mesh)
        of_sampler = jax.tree.map(
            lambda x, of: meshes.weight_sharding(mesh, of, x.shape, meshes.SAMPLER_RULES), factors, axes
        )
        self._score = jax.jit(functools.partial(_score, graphdef, statics), out_shardings=split)
        # For benches: `update` runs them as one program.
        self.dense_hidden = jax.jit(functools.partial(_dense_hidden, graphdef, statics), out_shardings=split)
        self.sparse_hidden = jax.jit(functools.partial(_sparse_hidden, graphdef, statics), out_shardings=split)
        self.head = jax.jit(functools.partial(_head, graphdef, statics), out_shardings=(split, whole, split))
        self._accumulate = jax.jit(
            functools.partial(_accumulate, graphdef, statics),
            donate_argnums=2,
            out_shardings=(places.params, whole, split),
        )
        self._apply = jax.jit(
            functools.partial(apply_gradients, self.optimizer), donate_argnums=0, out_shardings=(places, whole)
        )
        self._zeros = jax.jit(lambda factors: jax.tree.map(jnp.zeros_like, factors), out_shardings=places.params)
        self._start = jax.jit(self._state, static_argnums=0, out_shardings=places)
        self._copy = jax.jit(lambda f: jax.tree.map(lambda x: x.astype(self.dtype), f), out_shardings=of_sampler)

    def init(self, seed: int) -> LearnerState:
        """An adapter that changes nothing yet, with its optimizer's state."""
        return self._start(seed)

    def _state(self, seed: int) -> LearnerState:
        return fresh_state(self.optimizer, self._fresh(seed))

    def for_sampler(self, state: LearnerState) -> SamplerAdapter:
        """The sampler's copy: in the compute dtype, whole on every data shard."""
        return SamplerAdapter(self._copy(state.params), self.spec.scale)

    def rows(self, samples: Sequence[Sample]) -> list[Rows]:
        """Micro-batches of samples that carry `pages_read`; their hidden states are left behind."""
        return micro_batches([dataclasses.replace(s, hidden=None) for s in samples], self.layout)

    def device(self, rows: Rows) -> Rows:
        """Rows split over the data shards."""
        return place(rows, meshes.batch_sharding(self.mesh))

    def score(self, params: nnx.State, factors: list[Factors], rows: Rows) -> jax.Array:
        """logp_BT of the sparse policy, teacher-forced with the recorded pages."""
        return self._score(params, factors, rows)

    def update(
        self,
        params: nnx.State,
        state: LearnerState,
        batches: Sequence[Rows],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> tuple[LearnerState, dict[str, float]]:
        """The adapter's updates of one step, each with all of its rows.

        Args:
            params: the policy as it is now: the dense and the sparse policy are both of these weights.
            state: donated.
            batches: micro-batches on the host.
            on_progress: called with micro-batches done and their number.

        Returns:
            The new state, and metrics 'distill/...': those of log-probs, KL and alpha are from before the updates.
        """
        total = len(batches) * self.updates_per_step
        denominator = np.float32(max(sum(rows.counts.tokens for rows in batches), 1.0))
        placed = [self.device(rows) for rows in batches]
        # With one update a step the policy before it is differentiated itself: any array of the shape will do.
        old = [rows.logp_actor_BT for rows in placed]
        if self.updates_per_step > 1:
            old = [self.score(params, state.params, rows) for rows in placed]
        first: dict[str, Any] = {}
        alpha, norms = [], []
        for update in range(self.updates_per_step):
            grads = self._zeros(state.params)
            for i, (rows, logp_old_BT) in enumerate(zip(placed, old, strict=True)):
                if on_progress:
                    on_progress(update * len(batches) + i, total)
                grads, sums, alpha_BT = self._accumulate(params, state.params, grads, rows, logp_old_BT, denominator)
                if update == 0:
                    first = combine_sums(first, sums) if first else sums
                    alpha.append(read(alpha_BT)[_compared(batches[i])])
            state, norm = self._apply(state, grads)
            norms.append(float(norm))
        alphas = np.concatenate(alpha)
        metrics = {name: float(value) / float(denominator) for name, value in first.items()}
        metrics['distill/grad_norm'] = float(np.mean(norms))
        metrics['distill/alpha_p05'] = lower_quantile(alphas)
        metrics['distill/alpha_mean'] = float(alphas.mean()) if alphas.size else float('nan')
        return state, metrics

    def warm_up(self, params: nnx.State, state: LearnerState) -> None:
        """Compiles all of it for every row length; results are thrown away."""
        grads = self._zeros(state.params)
        for length in self.layout.buckets():
            rows = self._padding(length)
            logp_old_BT = rows.logp_actor_BT
            if self.updates_per_step > 1:
                logp_old_BT = self.score(params, state.params, rows)
            grads, _, alpha_BT = self._accumulate(params, state.params, grads, rows, logp_old_BT, np.float32(1))
            read(alpha_BT)
        jax.block_until_ready(self._apply(jax.tree.map(jnp.copy, state), grads)[1])
        self.for_sampler(state)

    def programs(self) -> dict[str, tuple[Any, tuple]]:
        """The functions of a step on the longest rows and what they take, with shapes in place of arrays."""
        split, whole = meshes.batch_sharding(self.mesh), meshes.replicated(self.mesh)
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
            jax.eval_shape(lambda: self._host_padding(self.layout.buckets()[-1])),
        )
        state, denominator = self.abstract_state, jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        step = (self.abstract_params, state.params, state.params, rows, rows.logp_actor_BT, denominator)
        return {
            ADAPTER_GRADIENTS: (self._accumulate, step),
            ADAPTER_UPDATE: (self._apply, (state, state.params)),
        }

    def abstract_sampler_adapter(self) -> SamplerAdapter:
        """Shapes and shardings of `for_sampler`'s result."""
        return SamplerAdapter(self._copy.eval_shape(self.abstract_state.params), self.spec.scale)

    def _padding(self, length: int) -> Rows:
        return self.device(self._host_padding(length))

    def _host_padding(self, length: int) -> Rows:
        return empty_rows(self.layout, length, records_pages=True)


def _policy_loss_of(config: DistillConfig) -> PolicyLoss:
    return PolicyLoss(
        config.clip_low,
        config.clip_high,
        correction='tis' if config.tis_cap else 'none',
        correction_high=config.tis_cap,
    )


def _layout(run: RunConfig, shards: int) -> RowLayout:
    """Rows of one sequence, with as many tokens a micro-batch as the learner's."""
    tokens = run.longest_row_tokens
    rows = run.learner.rows_per_microbatch * max(run.row_tokens // tokens, 1)
    return RowLayout(tokens, -(-rows // shards) * shards, packing=False)


def _compared(rows: Rows) -> np.ndarray:
    """Places whose tokens the sparse sampler drew: the first one of a response is the dense prefill's."""
    return (rows.mask_BT > 0) & ~rows.first_BT


def _dense_attend(statics: _Statics, rows: Rows) -> Attend:
    return causal_attend(rows.segment_BT if statics.attention == 'splash' else None, statics.attention, statics.mesh)


def _sparse_attend(statics: _Statics, rows: Rows) -> Attend:
    """Each response token reads as many pages as it did in the sampler, chosen by the same rule; the prompt's tokens
    read all, and so does every token in the dense layers.
    """
    dense = _dense_attend(statics, rows)
    reserved = statics.reserved_first + statics.reserved_last
    assert rows.pages_read_BT is not None
    return sparse_causal_attend(
        dense,
        statics.dense_layers,
        (rows.segment_BT > 0).sum(axis=1, dtype=jnp.int32),
        jnp.where(rows.pages_read_BT > 0, rows.pages_read_BT - reserved, EVERY_PAGE),
        statics.mesh,
        page_tokens=statics.page_tokens,
        reserved_first=statics.reserved_first,
        reserved_last=statics.reserved_last,
        kernels=statics.kernels,
    )


def _sparse_hidden(graphdef, statics: _Statics, params, factors, rows: Rows) -> jax.Array:
    # The place that predicts the first token of a response is the prompt's last: it has no adapter yet.
    first_BT = rows.first_BT.astype(jnp.int32)
    in_response_BT = (jnp.cumsum(first_BT, axis=1) > first_BT) & (rows.segment_BT > 0)
    return nnx.merge(graphdef, params).hidden(
        rows.token_BT,
        rows.position_BT,
        _sparse_attend(statics, rows),
        factors,
        statics.spec.scale_at(in_response_BT),
    )


def _score(graphdef, statics: _Statics, params, factors, rows: Rows) -> jax.Array:
    hidden_BTD = _sparse_hidden(graphdef, statics, params, factors, rows)
    head = (statics.temperature, statics.head_chunk_tokens)
    return token_logps(nnx.merge(graphdef, params).logits, hidden_BTD, rows.target_BT, *head)[0]


def _dense_hidden(graphdef, statics: _Statics, params, rows: Rows) -> jax.Array:
    return nnx.merge(graphdef, params).hidden(rows.token_BT, rows.position_BT, _dense_attend(statics, rows))


def _head(graphdef, statics: _Statics, params, sparse_BTD, dense_BTD, rows: Rows, logp_old_BT, denominator):
    """The loss's gradient for the sparse policy's hidden states, sums of metrics, and alpha_BT."""
    of_tokens = (logp_old_BT, rows.logp_actor_BT, rows.advantage_BT, rows.loss_mask_BT)

    def loss(logp_Bt, kl_Bt, logp_old_Bt, logp_actor_Bt, advantage_Bt, mask_Bt):
        old_Bt = lax.stop_gradient(logp_Bt) if statics.first_is_only else logp_old_Bt
        return distill_loss(logp_Bt, kl_Bt, old_Bt, logp_actor_Bt, advantage_Bt, mask_Bt, statics.loss)

    gradient_BTD, logp_BT, kl_BT, alpha_BT = distill_terms(
        nnx.merge(graphdef, params).logits,
        sparse_BTD,
        dense_BTD,
        rows.target_BT,
        lambda *of_chunk: loss(*of_chunk)[0] / denominator,
        of_tokens,
        statics.temperature,
        statics.head_chunk_tokens,
    )
    return gradient_BTD, loss(logp_BT, kl_BT, *of_tokens)[1], alpha_BT


def _accumulate(graphdef, statics: _Statics, params, factors, grads, rows: Rows, logp_old_BT, denominator):
    dense_BTD = _dense_hidden(graphdef, statics, params, rows)
    sparse_BTD, backward = jax.vjp(lambda factors: _sparse_hidden(graphdef, statics, params, factors, rows), factors)
    gradient_BTD, sums, alpha_BT = _head(
        graphdef, statics, params, sparse_BTD, dense_BTD, rows, logp_old_BT, denominator
    )
    (new,) = backward(gradient_BTD)
    return jax.tree.map(jnp.add, grads, new), sums, alpha_BT
