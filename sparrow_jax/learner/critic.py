"""The critic: how much reward is still to come at each token of a response, for GAE and PPO.

Rows come from the learner's micro-batches, returns from `token_advantages`; values go back there. Two kinds: a linear
head over the policy's final hidden states, or over those of a trunk of its own, a copy of the start weights. No
gradient of a value reaches the policy: with a shared trunk the weight between the two losses would be one more number
to tune, and the policy's gradient could no longer be told from the critic's.
"""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

from sparrow_jax.config import CriticConfig
from sparrow_jax.learner.losses import combine_sums, metric_means, value_loss
from sparrow_jax.learner.rows import Counts, Rows
from sparrow_jax.learner.updates import LearnerState, abstract_state, apply_gradients, fresh_state
from sparrow_jax.parallel import mesh as meshes

CRITIC_VALUES, CRITIC_GRADIENTS, CRITIC_UPDATE = 'critic values', 'critic gradients', 'critic update'  # programs
HEAD_AXES = ('embed', 'value')  # logical axes of its [D, 1]


def start_critic(trunk: nnx.State | None, hidden_size: int) -> dict[str, Any]:
    """Weights that value everything at 0, so that the first advantages are plain rewards to go: 'head' [D, 1], 'bias'
    [1] and, where the critic has its own, 'trunk', weights as the policy's.

    Args:
        trunk: start weights, or None for a head over the policy.
    """
    params = {'head': jnp.zeros((hidden_size, 1)), 'bias': jnp.zeros(1)}
    return params if trunk is None else {**params, 'trunk': jax.tree.map(jnp.copy, trunk)}


class Critic:
    """Values and updates.

    Args:
        config: of the run; its kind is not 'none'.
        optimizer: of the critic.
        hidden: (weights, rows) -> final hidden states [B, T, D] of the decoder.
        abstract_params: the policy's weights, with shardings.
        mesh: of the run.
        hidden_size: D.
    """

    def __init__(
        self,
        config: CriticConfig,
        optimizer: optax.GradientTransformation,
        hidden: Any,
        abstract_params: nnx.State,
        mesh: jax.sharding.Mesh,
        hidden_size: int,
    ):
        self.own_trunk = config.kind == 'trunk'
        self.optimizer, self.hidden_size = optimizer, hidden_size
        whole, split = meshes.replicated(mesh), meshes.batch_sharding(mesh)
        self.abstract_state = abstract_state(optimizer, self._abstract_params(abstract_params, mesh), mesh)
        places = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        self._values = jax.jit(functools.partial(_values, hidden), out_shardings=split)
        self._accumulate = jax.jit(
            functools.partial(_accumulate, hidden, config.clip),
            donate_argnums=1,
            out_shardings=(places.params, whole),
        )
        self._apply = jax.jit(
            functools.partial(apply_gradients, optimizer), donate_argnums=0, out_shardings=(places, whole)
        )
        self._zeros = jax.jit(lambda params: jax.tree.map(jnp.zeros_like, params), out_shardings=places.params)

    def _abstract_params(self, abstract_params: nnx.State, mesh: jax.sharding.Mesh) -> dict[str, Any]:
        shapes = jax.eval_shape(lambda: start_critic(None, self.hidden_size))
        of_head = meshes.weight_sharding(mesh, HEAD_AXES, shapes['head'].shape, meshes.LEARNER_RULES)
        places = {'head': of_head, 'bias': meshes.replicated(mesh)}
        params = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name]) for name, x in shapes.items()}
        return {**params, 'trunk': abstract_params} if self.own_trunk else params

    def fresh(self, start_params: nnx.State) -> LearnerState:
        """A first state; for use inside jit."""
        params = start_critic(start_params if self.own_trunk else None, self.hidden_size)
        return fresh_state(self.optimizer, params)

    def values(self, state: LearnerState, policy: nnx.State, rows: Rows) -> jax.Array:
        """float32 [B, T]: at each place the value before its target is drawn; of no use where there is no response."""
        return self._values(state.params, self._beside(policy), rows)

    def update(
        self,
        state: LearnerState,
        policy: nnx.State,
        batches: Iterable[tuple[Rows, jax.Array, jax.Array]],
        counts: Counts,
    ) -> tuple[LearnerState, dict[str, float]]:
        """One optimizer update from micro-batches.

        Args:
            state: donated. policy: its weights, which a critic without a trunk reads.
            batches: (rows, value_old_BT, return_BT) each.
            counts: of all of them: the loss is a mean over response tokens. With none, the gradient is 0.

        Returns:
            The new state and metrics: token means, 'critic/grad_norm'.
        """
        grads, sums = self._zeros(state.params), None
        denominator = np.float32(max(counts.tokens, 1.0))
        for rows, value_old_BT, return_BT in batches:
            grads, more = self._accumulate(
                state.params, grads, self._beside(policy), rows, value_old_BT, return_BT, denominator
            )
            sums = more if sums is None else combine_sums(sums, more)
        state, grad_norm = self._apply(state, grads)
        return state, metric_means(sums or {}, counts, float(denominator)) | {'critic/grad_norm': float(grad_norm)}

    def warm_up(self, state: LearnerState, policy: nnx.State, paddings: Iterable[Rows]) -> None:
        """Compiles everything; the state stays as it is."""
        grads, one = self._zeros(state.params), np.float32(1)
        for rows in paddings:
            value_BT = self.values(state, policy, rows)
            grads, _ = self._accumulate(state.params, grads, self._beside(policy), rows, value_BT, value_BT, one)
        jax.block_until_ready(self._apply(jax.tree.map(jnp.copy, state), grads)[1])

    def programs(self, policy: nnx.State, rows: Rows, denominator: Any) -> dict[str, tuple[Any, tuple]]:
        """As `Learner.programs`; policy, rows and denominator abstract."""
        state, beside, value_BT = self.abstract_state, self._beside(policy), rows.logp_actor_BT
        gradients = (state.params, state.params, beside, rows, value_BT, value_BT, denominator)
        return {
            CRITIC_VALUES: (self._values, (state.params, beside, rows)),
            CRITIC_GRADIENTS: (self._accumulate, gradients),
            CRITIC_UPDATE: (self._apply, (state, state.params)),
        }

    def _beside(self, policy: nnx.State) -> nnx.State | None:
        return None if self.own_trunk else policy


def _values(hidden, params: dict[str, Any], policy: nnx.State | None, rows: Rows) -> jax.Array:
    trunk = params['trunk'] if 'trunk' in params else lax.stop_gradient(policy)
    hidden_BTD = hidden(trunk, rows).astype(jnp.float32)
    value_BT1 = jnp.einsum('btd,dv->btv', hidden_BTD, params['head'], precision=lax.Precision.HIGHEST)
    return value_BT1[..., 0] + params['bias']


def _accumulate(hidden, clip: float, params, grads, policy, rows: Rows, value_old_BT, return_BT, denominator):
    def loss_of(params):
        value_BT = _values(hidden, params, policy, rows)
        loss, sums = value_loss(value_BT, value_old_BT, return_BT, rows.loss_mask_BT, clip)
        return loss / denominator, sums

    new, sums = jax.grad(loss_of, has_aux=True)(params)
    return jax.tree.map(jnp.add, grads, new), sums
