"""Advantages that need more than the rewards of a prompt: sums along a response, the critic's values, the KL to the
start policy in the reward, normalization over the batch.

Micro-batches come from scoring, with the dense policy's log-probs; they go to the updates with other advantages and,
under a critic, with the returns that its values are to become.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from sparrow_jax.config import RunConfig
from sparrow_jax.learner.advantages import ADVANTAGES, EPS, gae, token_rewards, whiten
from sparrow_jax.learner.rows import Counts, Rows
from sparrow_jax.parallel import mesh as meshes


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows on the device, where they stay from scoring to the update.

    Attributes:
        rows: without the sampler's hidden states, which only scoring needs.
        logp_old_BT: dense log-probs before the step's updates; None in supervised training, which uses none.
        counts: of the rows, made on the host.
        value_BT, return_BT: the critic's values before the step's updates, and what they should have been; None without
            a critic.
    """

    rows: Rows
    logp_old_BT: jax.Array | None
    counts: Counts
    value_BT: jax.Array | None = None
    return_BT: jax.Array | None = None

    def of_critic(self) -> tuple[Rows, jax.Array, jax.Array]:
        """What an update of the critic takes."""
        assert self.value_BT is not None
        assert self.return_BT is not None
        return self.rows, self.value_BT, self.return_BT


class TokenAdvantages:
    """What `learner.advantage` asks for after scoring.

    Attributes:
        needed: whether it asks for anything.
        needs_reference: whether it reads the start policy's log-probs.
        needs_values: whether it reads the critic's values.
    """

    def __init__(self, run: RunConfig, mesh: Mesh):
        choice = ADVANTAGES[run.learner.advantage]
        kl_coef = run.learner.kl_coef if run.learner.kl_placement == 'reward' else 0.0
        self.needed = run.phase == 'rl' and choice.whiten
        self.needs_reference, self.needs_values = self.needed and kl_coef > 0, run.critic.kind != 'none'
        gamma, lam = (run.critic.gamma, run.critic.lam) if self.needs_values else (1.0, 1.0)
        estimator = _Estimator(choice.to_go, gamma, lam, kl_coef, self.needs_values)
        split, whole = meshes.batch_sharding(mesh), meshes.replicated(mesh)
        self._estimate = jax.jit(functools.partial(_estimate, estimator), out_shardings=(split, split, whole))
        self._normalize = jax.jit(_normalize, out_shardings=split)

    def estimate(
        self, batch: MicroBatch, logp_reference_BT: jax.Array | None = None, value_BT: jax.Array | None = None
    ) -> tuple[MicroBatch, dict[str, jax.Array]]:
        """The micro-batch with advantages that are not normalized yet, and what `Moments.add` takes.

        Args:
            batch: rows.advantage_BT is what the comparison within the prompt has given each response.
            logp_reference_BT: of the start policy, where it is needed.
            value_BT: of the critic, where there is one.
        """
        # What is not needed may be any array of the shape.
        given = [batch.logp_old_BT if x_BT is None else x_BT for x_BT in (logp_reference_BT, value_BT)]
        advantage_BT, return_BT, summaries = self._estimate(batch.rows, batch.logp_old_BT, *given)
        batch = dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, advantage_BT=advantage_BT))
        if self.needs_values:
            batch = dataclasses.replace(batch, value_BT=value_BT, return_BT=return_BT)
        return batch, summaries

    def normalize(self, batch: MicroBatch, moments: 'Moments') -> MicroBatch:
        """The micro-batch with advantages normalized over the step's batch."""
        mean, std = np.float32(moments.mean('advantages')), np.float32(moments.std('advantages'))
        advantage_BT = self._normalize(batch.rows, mean, std)
        return dataclasses.replace(batch, rows=dataclasses.replace(batch.rows, advantage_BT=advantage_BT))

    def warm_up(self, paddings: Iterable[Rows]) -> None:
        """Compiles everything."""
        for rows in paddings:
            batch, _ = self.estimate(MicroBatch(rows, rows.logp_actor_BT, Counts(0.0, 0.0)))
            jax.block_until_ready(self._normalize(batch.rows, np.float32(0), np.float32(1)))


@dataclasses.dataclass(frozen=True)
class _Estimator:
    to_go: bool
    gamma: float
    lam: float
    kl_coef: float
    values: bool


def _estimate(estimator: _Estimator, rows: Rows, logp_old_BT, logp_reference_BT, value_BT):
    mask_BT = rows.loss_mask_BT
    kl_BT = logp_old_BT - logp_reference_BT
    value_BT = value_BT if estimator.values else jnp.zeros_like(logp_old_BT)
    advantage_BT = jnp.where(mask_BT > 0, rows.advantage_BT, 0.0)
    found = {}
    if estimator.to_go:
        reward_BT = token_rewards(rows.advantage_BT, kl_BT, mask_BT, estimator.kl_coef)
        advantage_BT = gae(reward_BT, value_BT, mask_BT, estimator.gamma, estimator.lam)
        found['rewards'] = reward_BT
    return_BT = jnp.where(mask_BT > 0, advantage_BT + value_BT, 0.0)
    found['advantages'] = advantage_BT
    if estimator.kl_coef:
        found['kl'] = kl_BT
    if estimator.values:
        found |= {'values': value_BT, 'returns': return_BT, 'errors': return_BT - value_BT}
    return advantage_BT, return_BT, {name: _summary(x_BT, mask_BT) for name, x_BT in found.items()}


def _summary(x_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """Of the kept places: how many, their mean, the sum of squared distances from it, largest, negative smallest."""
    kept_BT = mask_BT > 0
    count = kept_BT.sum().astype(jnp.float32)
    x_BT = jnp.where(kept_BT, x_BT, 0.0)
    mean = x_BT.sum() / jnp.maximum(count, 1.0)
    largest = lambda x_BT: jnp.where(kept_BT, x_BT, -jnp.inf).max()
    return jnp.stack([count, mean, jnp.where(kept_BT, (x_BT - mean) ** 2, 0.0).sum(), largest(x_BT), largest(-x_BT)])


def _normalize(rows: Rows, mean: jax.Array, std: jax.Array) -> jax.Array:
    return whiten(rows.advantage_BT, rows.loss_mask_BT, mean, std)


class Moments:
    """Means, spreads and limits over the tokens of all micro-batches of a step."""

    def __init__(self) -> None:
        self._found: dict[str, np.ndarray] = {}

    def add(self, summaries: Mapping[str, jax.Array]) -> None:
        """Takes in those of a micro-batch, from `TokenAdvantages.estimate`."""
        for name, summary in summaries.items():
            new = np.asarray(summary, np.float64)
            self._found[name] = _together(self._found[name], new) if name in self._found else new

    def mean(self, name: str) -> float:
        return float(self._found[name][1])

    def std(self, name: str) -> float:
        """With n in the denominator."""
        count, _, squares, _, _ = self._found[name]
        return float(np.sqrt(squares / max(count, 1.0)))

    def limits(self, name: str) -> tuple[float, float]:
        """Smallest and largest; 0 where there is nothing."""
        count, _, _, largest, negative_smallest = self._found[name]
        return (float(-negative_smallest), float(largest)) if count else (0.0, 0.0)

    def metrics(self, sequences: float) -> dict[str, float]:
        """Under verl's names. Advantages are those that the policy learns from, beside the spread that they were
        divided by; what the critic explains is 1 - Var(return - value) / Var(return), null where all returns are equal.

        Args:
            sequences: responses of the step that count.
        """
        mean, std = self.mean('advantages'), self.std('advantages')
        low, high = ((x - mean) / (std + EPS) for x in self.limits('advantages'))
        metrics = {
            'critic/advantages/mean': 0.0,
            'critic/advantages/max': high,
            'critic/advantages/min': low,
            'critic/advantages/std_before': std,
        }
        if 'rewards' in self._found:
            tokens = self._found['rewards'][0]
            metrics['critic/rewards/mean'] = self.mean('rewards') * float(tokens) / max(sequences, 1.0)
        if 'kl' in self._found:
            metrics['actor/reward_kl_penalty'] = self.mean('kl')
        for name in ('values', 'returns'):
            if name in self._found:
                low, high = self.limits(name)
                metrics |= {
                    f'critic/{name}/mean': self.mean(name),
                    f'critic/{name}/max': high,
                    f'critic/{name}/min': low,
                }
        if 'errors' in self._found:
            spread = self.std('returns') ** 2
            metrics['critic/vf_explained_var'] = 1 - self.std('errors') ** 2 / spread if spread else float('nan')
        return metrics


def _together(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The summary of two sets of numbers from the summaries of each (Chan, Golub and LeVeque, 1979)."""
    count = a[0] + b[0]
    apart = b[1] - a[1]
    share = b[0] / max(count, 1.0)
    squares = a[2] + b[2] + apart**2 * a[0] * share
    return np.array([count, a[1] + apart * share, squares, max(a[3], b[3]), max(a[4], b[4])])
