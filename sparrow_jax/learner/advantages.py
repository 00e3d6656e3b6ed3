"""Advantages from rewards. Pure functions; groups are whole prompts, so what compares them comes before any
micro-batching. What is summed along a response, or normalized over a batch, comes after scoring (`token_advantages`).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from sparrow_jax.learner.sequences import running_sum

EPS = 1e-8  # of a spread that is divided by, where all are equal


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


def own_reward(reward_PR: jax.Array) -> jax.Array:
    """r: no comparison within the prompt. Shapes as in `grpo`, 1 sample suffices."""
    return reward_PR


@dataclasses.dataclass(frozen=True)
class Advantage:
    """How rewards become advantages.

    Attributes:
        of_group: from the rewards [prompts, samples] to one number a response.
        to_go: that number is a reward at the response's last token, and a token's advantage is what follows it: `gae`,
            with the values of the critic, or 0 where there is none.
        whiten: normalized over the tokens of the step's batch, at the end.
    """

    of_group: Callable[[jax.Array], jax.Array]
    to_go: bool = False
    whiten: bool = False


ADVANTAGES = {
    'grpo': Advantage(grpo),
    'dr_grpo': Advantage(dr_grpo),
    'rloo': Advantage(rloo),
    # REINFORCE++, arXiv 2501.03262: rewards to go, with the KL to the start policy in them, normalized over the batch.
    'reinforce_pp': Advantage(own_reward, to_go=True, whiten=True),
    # REINFORCE++-baseline, of the same paper: r - mean of the prompt's samples, normalized over the batch.
    'reinforce_pp_baseline': Advantage(dr_grpo, whiten=True),
    # PPO, arXiv 1707.06347, with a critic.
    'gae': Advantage(own_reward, to_go=True, whiten=True),
}


def token_rewards(score_BT: jax.Array, kl_BT: jax.Array, mask_BT: jax.Array, kl_coef: float) -> jax.Array:
    """The response's reward at its last token, and -kl_coef * kl at each (InstructGPT, arXiv 2203.02155, section 3.5).

    Args:
        score_BT: float32, the response's reward at each of its tokens.
        kl_BT: logp_old - logp_reference of the sampled token.
        mask_BT: 1 for response tokens; at least one masked place lies between two responses of a row.

    Returns:
        float32 [B, T], 0 where mask is 0.
    """
    kept_BT = mask_BT > 0
    last_BT = kept_BT & ~jnp.pad(kept_BT[:, 1:], ((0, 0), (0, 1)))
    penalty_BT = jnp.where(kept_BT, kl_coef * kl_BT, 0.0) if kl_coef else 0.0
    return jnp.where(last_BT, score_BT, 0.0) - penalty_BT


def whiten(advantage_BT: jax.Array, mask_BT: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
    """(A - mean) / (std + EPS) where mask is 1, else 0. mean, std: over the tokens of the whole batch."""
    return jnp.where(mask_BT > 0, (advantage_BT - mean) / (std + EPS), 0.0)


def gae(reward_BT: jax.Array, value_BT: jax.Array, mask_BT: jax.Array, gamma: float, lam: float) -> jax.Array:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16) over the kept tokens of each row.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; both stop at the row's last kept token:
    what stands behind it, values of padding included, has no effect.

    Args:
        reward_BT, value_BT: float32. mask_BT: 1 for response tokens; those of a response are neighbours, and at least
            one masked place lies between two responses of a row.
        gamma, lam: discount and trace decay.

    Returns:
        float32 [B, T], 0 where mask is 0. No gradient flows into the values.
    """
    kept_BT = mask_BT > 0
    value_BT = lax.stop_gradient(jnp.where(kept_BT, value_BT, 0.0))
    next_BT = jnp.pad(value_BT[:, 1:], ((0, 0), (0, 1)))
    delta_BT = jnp.where(kept_BT, reward_BT + gamma * next_BT - value_BT, 0.0)
    # A masked place passes nothing on, and every response ends before one or at the end of its row.
    return running_sum(delta_BT, gamma * lam * kept_BT.astype(jnp.float32), reverse=True)
