"""Advantages from rewards. Pure functions; groups are whole prompts, so they are computed before any micro-batching."""

import jax
import jax.numpy as jnp
from jax import lax


def grpo(reward_PR: jax.Array, eps: float = 1e-6) -> jax.Array:
    """(r - mean) / (std + eps) over the R samples of each prompt, std with n - 1 (GRPO, arXiv 2402.03300, section 4.1).

    Args:
        reward_PR: float32 [prompts, samples], at least 2 samples.

    Returns:
        float32 [prompts, samples]; zeros for a prompt whose rewards are all equal.
    """
    centred_PR = reward_PR - reward_PR.mean(axis=1, keepdims=True)
    return centred_PR / (reward_PR.std(axis=1, ddof=1, keepdims=True) + eps)


def dr_grpo(reward_PR: jax.Array) -> jax.Array:
    """r - mean over the samples of each prompt, not divided by the spread (Dr. GRPO, arXiv 2503.20783). Shapes as in
    `grpo`.
    """
    return reward_PR - reward_PR.mean(axis=1, keepdims=True)


def rloo(reward_PR: jax.Array) -> jax.Array:
    """r - mean of the other samples of the prompt (RLOO, arXiv 2402.14740). Shapes as in `grpo`."""
    samples = reward_PR.shape[1]
    return dr_grpo(reward_PR) * samples / (samples - 1)


ADVANTAGES = {'grpo': grpo, 'dr_grpo': dr_grpo, 'rloo': rloo}


def gae(reward_BT: jax.Array, value_BT: jax.Array, mask_BT: jax.Array, gamma: float, lam: float) -> jax.Array:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) over the kept tokens of each row.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; both stop at the row's last kept token:
    what stands behind it, values of padding included, has no effect.

    Args:
        reward_BT, value_BT: float32. mask_BT: 1 for response tokens, contiguous.
        gamma, lam: discount and trace decay.

    Returns:
        float32 [B, T], 0 where mask is 0. No gradient flows into the values.
    """
    value_BT = lax.stop_gradient(jnp.where(mask_BT > 0, value_BT, 0.0))
    reward_BT = jnp.where(mask_BT > 0, reward_BT, 0.0)

    def back(carry, inputs):
        next_value_B, next_advantage_B = carry
        reward_B, value_B, mask_B = inputs
        delta_B = reward_B + gamma * next_value_B - value_B
        advantage_B = jnp.where(mask_B > 0, delta_B + gamma * lam * next_advantage_B, 0.0)
        return (value_B, advantage_B), advantage_B

    zeros_B = jnp.zeros(reward_BT.shape[0], jnp.float32)
    _, advantage_TB = lax.scan(back, (zeros_B, zeros_B), (reward_BT.T, value_BT.T, mask_BT.T), reverse=True)
    return advantage_TB.T
