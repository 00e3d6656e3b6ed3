"""Losses as pure functions of log-probs and values. Sums, not means: the caller divides by the tokens or responses of
the whole optimizer update, so that micro-batches and shards cannot change the result.

Wherever a token is masked its inputs may hold anything, NaN and infinities included: they are replaced before any
exponential, because in JAX a masked infinity still poisons the gradient.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from sparrow_jax.learner.corrections import CORRECTIONS
from sparrow_jax.learner.rows import Counts
from sparrow_jax.learner.sequences import sequence_mean, sequence_sum


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """What the policy loss is; see `configs/base.py` (learner). kl_coef is 0 where the KL is part of the rewards."""

    clip_low: float
    clip_high: float
    ratio: str = 'token'
    aggregation: str = 'token_mean'
    correction: str = 'none'
    correction_low: float = 0.0
    correction_high: float = 0.0
    kl_coef: float = 0.0


# ---------------------------------------------------------------------- ratios


def token_log_ratio(change_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """logp - logp_old of each token (PPO, arXiv 1707.06347, eq. 6).

    Args:
        change_BT: logp - logp_old, 0 where mask_BT is. mask_BT: 1 for response tokens. segment_BT: as in `Rows`.
    """
    del mask_BT, segment_BT
    return change_BT


def sequence_log_ratio(change_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """The mean of logp - logp_old over the response, at each of its tokens (GSPO, arXiv 2507.18071, eq. 7 and, for the
    gradient, its token form, eq. 14).

    s_t = stop(mean) + logp_t - stop(logp_t): the value is the mean; the gradient at each token is that of its own
    log-prob alone, so that advantages may differ between tokens. With one advantage a response and the aggregation
    'sequence_mean' the gradient is that of the mean itself. Arguments as in `token_log_ratio`.
    """
    mean_BT = lax.stop_gradient(sequence_mean(change_BT, mask_BT, segment_BT))
    return mean_BT + change_BT - lax.stop_gradient(change_BT)


RATIOS: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    'token': token_log_ratio,
    'sequence': sequence_log_ratio,
}


# ---------------------------------------------------------------------- aggregation


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """How token losses become one number: sum(weight * loss) / denominator.

    Attributes:
        weight: of each token, of (mask_BT, segment_BT).
        denominator: of (tokens and responses of the update, most tokens of a response).
    """

    weight: Callable[[jax.Array, jax.Array], jax.Array]
    denominator: Callable[[Counts, int], float]


def equal_weight(mask_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """1 for every kept token."""
    del segment_BT
    return mask_BT


def weight_in_sequence(mask_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """1 / kept tokens of the response, for each of them."""
    return mask_BT / jnp.maximum(sequence_sum(mask_BT, segment_BT), 1.0)


AGGREGATIONS = {
    # DAPO, arXiv 2503.14476, section 3.3: every token of the update counts the same.
    'token_mean': Aggregation(equal_weight, lambda counts, _: counts.tokens),
    # GRPO, arXiv 2402.03300, eq. 3: every response counts the same, so the tokens of a long one count less.
    'sequence_mean': Aggregation(weight_in_sequence, lambda counts, _: counts.sequences),
    # Dr. GRPO, arXiv 2503.20783, section 3.2: a sum over tokens, scaled by a constant.
    'constant': Aggregation(equal_weight, lambda counts, most_tokens: counts.sequences * most_tokens),
}


# ---------------------------------------------------------------------- losses


def policy_loss(
    logp_BT: jax.Array,
    logp_old_BT: jax.Array,
    logp_actor_BT: jax.Array,
    logp_reference_BT: jax.Array,
    advantage_BT: jax.Array,
    mask_BT: jax.Array,
    segment_BT: jax.Array,
    constants: PolicyLoss,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped policy gradient (PPO, arXiv 1707.06347, eq. 7; clip-higher: DAPO, arXiv 2503.14476), corrected for the
    sampler's distribution.

    loss = -sum over tokens of a_t c_t min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t) + kl_coef a_t k3_t, with r =
    exp(RATIOS[ratio]), c of CORRECTIONS[correction], a of AGGREGATIONS[aggregation], k3 = exp(d) - d - 1 with d =
    logp_reference - logp.

    Args:
        logp_BT: float32, of the policy being trained; the only input that carries a gradient.
        logp_old_BT: of the dense policy that was sampled from, before this step's updates.
        logp_actor_BT: of the sampler that drew the tokens.
        logp_reference_BT: of the frozen start policy; unused when kl_coef is 0.
        advantage_BT: float32. mask_BT: 1 for the response tokens to learn from. segment_BT: as in `Rows`.
        constants: choices and limits.

    Returns:
        The loss, a sum, and what metrics are made of (`metric_means`), before any truncation or masking of the
        weights. All tokens masked: 0 and zeros.
    """
    kept_BT = mask_BT > 0
    clean = lambda x_BT: jnp.where(kept_BT, x_BT, 0.0)
    logp_BT, advantage_BT = clean(logp_BT), clean(advantage_BT)
    logp_old_BT, logp_actor_BT, logp_reference_BT = map(
        lax.stop_gradient, map(clean, (logp_old_BT, logp_actor_BT, logp_reference_BT))
    )
    mask_BT = kept_BT.astype(jnp.float32)
    token_weight_BT = AGGREGATIONS[constants.aggregation].weight(mask_BT, segment_BT)

    ratio_BT = jnp.exp(RATIOS[constants.ratio](logp_BT - logp_old_BT, mask_BT, segment_BT))
    gap_BT = logp_old_BT - logp_actor_BT
    limits = constants.correction_low, constants.correction_high
    correction_BT = CORRECTIONS[constants.correction](gap_BT, mask_BT, segment_BT, *limits)
    clipped_BT = jnp.clip(ratio_BT, 1 - constants.clip_low, 1 + constants.clip_high)
    gain_BT = jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
    pg_loss = -(clean(correction_BT * gain_BT) * token_weight_BT).sum()
    loss = pg_loss
    sums = {
        'actor/ppo_kl': logp_old_BT - logp_BT,
        'actor/ratio_mean': ratio_BT,
        'actor/pg_clipfrac': (ratio_BT * advantage_BT > clipped_BT * advantage_BT).astype(jnp.float32),
    }
    metrics = {'loss/actor/pg_loss': pg_loss}
    if constants.kl_coef:
        distance_BT = logp_reference_BT - logp_BT
        kl_loss = (clean(jnp.exp(distance_BT) - distance_BT - 1) * token_weight_BT).sum()
        loss = loss + constants.kl_coef * kl_loss
        metrics['loss/actor/kl_loss'] = kl_loss
    metrics |= {name: clean(value_BT).sum() for name, value_BT in sums.items()}
    metrics |= _correction_statistics(gap_BT, correction_BT, mask_BT, segment_BT, constants)
    return loss, jax.tree.map(lax.stop_gradient, metrics)


def _correction_statistics(
    gap_BT: jax.Array, correction_BT: jax.Array, mask_BT: jax.Array, segment_BT: jax.Array, constants: PolicyLoss
) -> dict[str, jax.Array]:
    """Of the raw weights, and the share of tokens and responses that the correction changes."""
    weight_BT = jnp.exp(gap_BT)
    of_sequence_BT = weight_in_sequence(mask_BT, segment_BT)  # sums to 1 over each response
    mean_gap_BT = sequence_mean(gap_BT, mask_BT, segment_BT)
    masked_BT = mask_BT * (correction_BT == 0)
    capped_BT = (weight_BT > constants.correction_high) if constants.correction == 'tis' else jnp.zeros_like(weight_BT)
    of_tokens = {
        'kl': -gap_BT,
        'k3_kl': weight_BT - gap_BT - 1,
        'rollout_is_mean': weight_BT,
        'rollout_is_square_mean': weight_BT**2,
        'rollout_is_capped_fraction': capped_BT.astype(jnp.float32),
        'rollout_rs_masked_fraction': masked_BT,
    }
    return {
        **{f'rollout_corr/{name}': (value_BT * mask_BT).sum() for name, value_BT in of_tokens.items()},
        'sequences/rollout_corr/rollout_is_seq_mean': (jnp.exp(mean_gap_BT) * of_sequence_BT).sum(),
        'sequences/rollout_corr/rollout_rs_seq_masked_fraction': (
            (sequence_sum(masked_BT, segment_BT) > 0) * of_sequence_BT
        ).sum(),
        'max/rollout_corr/rollout_is_max': (weight_BT * mask_BT).max(),
        'max/rollout_corr/rollout_is_seq_max': (jnp.exp(mean_gap_BT) * mask_BT).max(),
        'max/rollout_corr/seq_kl_max': (jnp.abs(mean_gap_BT) * mask_BT).max(),
    }


def value_loss(
    value_BT: jax.Array, value_old_BT: jax.Array, return_BT: jax.Array, mask_BT: jax.Array, clip: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Half the squared error of the values, where a value may move by at most `clip` from the one before the updates.

    sum over tokens of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 (PPO's reference code; arXiv
    2005.12729, section 3).

    Args:
        value_BT: float32; the only input that carries a gradient. value_old_BT, return_BT: float32.
        mask_BT: 1 for response tokens. clip: inf for none.

    Returns:
        The loss, a sum, and what metrics are made of (`metric_means`). All tokens masked: 0 and zeros.
    """
    kept_BT = mask_BT > 0
    value_BT = jnp.where(kept_BT, value_BT, 0.0)
    value_old_BT, return_BT = (lax.stop_gradient(jnp.where(kept_BT, x_BT, 0.0)) for x_BT in (value_old_BT, return_BT))
    clipped_BT = jnp.clip(value_BT, value_old_BT - clip, value_old_BT + clip)
    error_BT, clipped_error_BT = (value_BT - return_BT) ** 2, (clipped_BT - return_BT) ** 2
    loss = jnp.maximum(error_BT, clipped_error_BT).sum() / 2
    metrics = {
        'critic/vf_loss': loss,
        'critic/vf_clipfrac': (clipped_error_BT > error_BT).astype(jnp.float32).sum(),
        'critic/vpred_mean': value_BT.sum(),
    }
    return loss, jax.tree.map(lax.stop_gradient, metrics)


def supervised_loss(logp_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """-sum of the log-probs of the kept tokens. Shapes as in `policy_loss`."""
    loss = -jnp.where(mask_BT > 0, logp_BT, 0.0).sum()
    return loss, {'loss/supervised/loss': lax.stop_gradient(loss)}


def combine_sums(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> dict[str, float]:
    """Of two micro-batches: sums added up, and the larger of those under 'max/'."""
    return {k: max(float(a[k]), float(b[k])) if k.startswith('max/') else float(a[k]) + float(b[k]) for k in a}


def metric_means(sums: Mapping[str, jax.Array | float], counts: Counts, denominator: float) -> dict[str, float]:
    """Metrics of an update. In front of a name stands what its sum is divided by: 'loss/' the loss's denominator,
    'sequences/' the responses, 'max/' nothing (no sum, a maximum), else the tokens.
    """
    divisors = {'loss': denominator, 'sequences': max(counts.sequences, 1.0), 'max': 1.0}
    means = {}
    for name, value in sums.items():
        kind, _, rest = name.partition('/')
        if kind in divisors:
            means[rest] = float(value) / divisors[kind]
        else:
            means[name] = float(value) / max(counts.tokens, 1.0)
    return means
