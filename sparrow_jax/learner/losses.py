"""Policy losses as pure functions of log-probs. Sums, not means: the caller divides by the response tokens of the
whole optimizer update, so that micro-batches and shards cannot change the result.

Wherever a token is masked its inputs may hold anything, NaN and infinities included: they are replaced before any
exponential, because in JAX a masked infinity still poisons the gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """Constants of the policy loss; see `configs/base.py` (learner)."""

    clip_low: float
    clip_high: float
    tis_cap: float
    kl_coef: float


def policy_loss(
    logp_BT: jax.Array,
    logp_old_BT: jax.Array,
    logp_actor_BT: jax.Array,
    logp_reference_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    constants: PolicyLoss,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped policy gradient with truncated importance sampling (Sparrow, section on training; clip-higher: DAPO,
    arXiv 2503.14476).

    loss = -sum over tokens of min(rho, C) min(w A, clip(w, 1 - low, 1 + high) A) + kl_coef k3, with
    w = exp(logp - logp_old), rho = exp(logp_old - logp_actor) per token, k3 = exp(d) - d - 1, d = logp_reference -
    logp.

    Args:
        logp_BT: float32, of the policy being trained; the only input that carries a gradient.
        logp_old_BT: of the dense policy that was sampled from, before this step's updates.
        logp_actor_BT: of the sampler that drew the tokens.
        logp_reference_BT: of the frozen start policy; unused when kl_coef is 0.
        advantage_BT: float32. mask_BT: 1 for response tokens.
        constants: tis_cap = 0 means no correction.

    Returns:
        The loss summed over tokens and sums of metrics over tokens (maxima under 'max/'), before any truncation of the
        weights. All tokens masked: 0 and zeros.
    """
    kept_BT = mask_BT > 0
    clean = lambda x_BT: jnp.where(kept_BT, x_BT, 0.0)
    logp_BT = clean(logp_BT)
    logp_old_BT, logp_actor_BT, logp_reference_BT = map(
        lax.stop_gradient, map(clean, (logp_old_BT, logp_actor_BT, logp_reference_BT))
    )
    advantage_BT = clean(advantage_BT)

    ratio_BT = jnp.exp(logp_BT - logp_old_BT)
    gap_BT = logp_old_BT - logp_actor_BT
    weight_BT = jnp.exp(gap_BT)
    correction_BT = jnp.minimum(weight_BT, constants.tis_cap) if constants.tis_cap else jnp.ones_like(weight_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - constants.clip_low, 1 + constants.clip_high)
    gain_BT = jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    pg_loss_BT = -clean(correction_BT * gain_BT)
    loss = pg_loss_BT.sum()
    sums = {
        'actor/pg_loss': pg_loss_BT,
        'actor/ppo_kl': logp_old_BT - logp_BT,
        'actor/ratio_mean': ratio_BT,
        'actor/pg_clipfrac': (ratio_BT * advantage_BT > clipped_BT * advantage_BT).astype(jnp.float32),
        'rollout_corr/kl': -gap_BT,
        'rollout_corr/k3_kl': weight_BT - gap_BT - 1,
        'rollout_corr/rollout_is_mean': weight_BT,
        'rollout_corr/rollout_is_square_mean': weight_BT**2,
        'rollout_corr/rollout_is_capped_fraction': (weight_BT > constants.tis_cap).astype(jnp.float32)
        if constants.tis_cap
        else jnp.zeros_like(weight_BT),
    }
    if constants.kl_coef:
        distance_BT = logp_reference_BT - logp_BT
        kl_BT = clean(jnp.exp(distance_BT) - distance_BT - 1)
        loss = loss + constants.kl_coef * kl_BT.sum()
        sums['actor/kl_loss'] = kl_BT
    metrics = {name: lax.stop_gradient(clean(value).sum()) for name, value in sums.items()}
    metrics['max/rollout_corr/rollout_is_max'] = lax.stop_gradient(clean(weight_BT).max())
    return loss, metrics


def supervised_loss(logp_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-sum of the log-probs of the kept tokens. Shapes as in `policy_loss`."""
    loss = -jnp.where(mask_BT > 0, logp_BT, 0.0).sum()
    return loss, {'supervised/loss': lax.stop_gradient(loss)}
