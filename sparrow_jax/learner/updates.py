"""Weights with their optimizer, and how gradients change them: of the policy and of what learns beside it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from sparrow_jax.config import OptimizerConfig
from sparrow_jax.parallel import mesh as meshes


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LearnerState:
    """Everything that training changes in the learner, or in one part of it.

    Attributes:
        params: pytree of weights: nnx.State of the policy.
        optimizer: of these.
        updates: int32 scalar, optimizer updates so far.
        critic: the critic's, beside the policy's, where there is one.
    """

    params: Any
    optimizer: Any
    updates: Any
    critic: 'LearnerState | None' = None


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


def fresh_state(optimizer: optax.GradientTransformation, params: Any) -> LearnerState:
    """A first state around these weights."""
    return LearnerState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def abstract_state(optimizer: optax.GradientTransformation, abstract_params: Any, mesh: Mesh) -> LearnerState:
    """Shapes and shardings of a state around such weights; moments lie where weights of their shape do."""
    whole = meshes.replicated(mesh)
    by_shape = {(x.shape, x.dtype): x.sharding for x in jax.tree.leaves(abstract_params)}
    moments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_shape.get((x.shape, x.dtype), whole)),
        jax.eval_shape(optimizer.init, abstract_params),
    )
    return LearnerState(abstract_params, moments, jax.ShapeDtypeStruct((), jnp.int32, sharding=whole))


def apply_gradients(
    optimizer: optax.GradientTransformation, state: LearnerState, grads: Any
) -> tuple[LearnerState, jax.Array]:
    """The state after one update, and the gradients' norm before any clipping. state: without a critic's."""
    grad_norm = optax.global_norm(grads)
    changes, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
    params = optax.apply_updates(state.params, changes)
    return LearnerState(params, optimizer_state, state.updates + 1), grad_norm
