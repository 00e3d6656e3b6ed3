"""One step of every published algorithm (configs/algorithms.py) on the smallest learner: its numbers, and that they do
not depend on how sequences lie in rows and micro-batches.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_learner import Tiny, make_samples, make_tiny, quick_compile

from configs.algorithms import ALGORITHMS
from sparrow_jax.config import RunConfig
from sparrow_jax.learner.advantages import ADVANTAGES
from sparrow_jax.learner.learner import LearnerState
from sparrow_jax.learner.rows import Counts, Sample, micro_batches
from sparrow_jax.learner.token_advantages import MicroBatch, Moments, TokenAdvantages

# Most functions are the same for several algorithms: compiled once.
pytestmark = pytest.mark.usefixtures('compile_cache')

SAMPLES = 2
REWARD_PR = np.array([[1, 0], [0, 0], [1, 0], [1, 0]], np.float32)
LENGTHS = [(3, 5), (3, 12), (6, 2), (6, 9), (1, 1), (1, 7), (10, 14), (10, 3)]
SETTINGS = {
    'rollout.samples_per_prompt': SAMPLES,
    'learner.updates_per_step': 2,  # the second meets ratios that are not 1
    'learner.correction_high': 1.5,
    'optimizer.learning_rate': 0.02,
    'optimizer.warmup_steps': 0,
    'optimizer.eps': 1e-3,  # large, so that a rounding of a tiny gradient does not decide a whole step
    'critic.learning_rate': 0.05,
    'critic.lam': 0.9,
    'critic.passes': 2,
}
NAMES = ('actor/pg_loss', 'actor/grad_norm', 'actor/ppo_kl', 'actor/pg_clipfrac', 'rollout_corr/k3_kl')
# One step, means over its two updates; `moved` is the norm of what the policy's weights moved by. A change that moves
# these changes what the algorithm computes: say why in the log before writing new numbers.
GOLDEN: dict[str, dict[str, float]] = {
    'grpo': {
        'actor/pg_loss': 0.0870001,
        'actor/grad_norm': 1.27901,
        'actor/ppo_kl': -0.0349051,
        'actor/pg_clipfrac': 0.16,
        'rollout_corr/k3_kl': 1.45634,
        'actor/kl_loss': 0.118137,
        'moved': 1.4935,
    },
    'dr_grpo': {
        'actor/pg_loss': 0.020995,
        'actor/grad_norm': 0.470418,
        'actor/ppo_kl': -0.0616171,
        'actor/pg_clipfrac': 0.18,
        'rollout_corr/k3_kl': 1.45634,
        'actor/kl_loss': 0.0605287,
        'moved': 1.33123,
    },
    'rloo': {
        'actor/pg_loss': 0.0953026,
        'actor/grad_norm': 2.06216,
        'actor/ppo_kl': -0.0736013,
        'actor/pg_clipfrac': 0.2,
        'rollout_corr/k3_kl': 1.45634,
        'actor/kl_loss': 0.205089,
        'moved': 1.59792,
    },
    'reinforce_pp': {
        'actor/pg_loss': 0.0893717,
        'actor/grad_norm': 2.10593,
        'actor/ppo_kl': -0.0748734,
        'actor/pg_clipfrac': 0.18,
        'rollout_corr/k3_kl': 1.45634,
        'actor/reward_kl_penalty': 0.0582736,
        'critic/advantages/std_before': 0.485273,
        'moved': 1.63565,
    },
    'reinforce_pp_baseline': {
        'actor/pg_loss': 0.0853612,
        'actor/grad_norm': 2.21662,
        'actor/ppo_kl': -0.0705473,
        'actor/pg_clipfrac': 0.2,
        'rollout_corr/k3_kl': 1.45634,
        'actor/kl_loss': 0.197167,
        'critic/advantages/std_before': 0.444699,
        'moved': 1.61151,
    },
    'gspo': {
        'actor/pg_loss': 0.0771943,
        'actor/grad_norm': 1.08296,
        'actor/ppo_kl': -0.0349051,
        'actor/pg_clipfrac': 0.34,
        'rollout_corr/k3_kl': 1.45634,
        'actor/kl_loss': 0.118137,
        'moved': 1.50932,
    },
    'dapo': {
        'actor/pg_loss': 0.065508,
        'actor/grad_norm': 1.51927,
        'actor/ppo_kl': -0.0712124,
        'actor/pg_clipfrac': 0.16,
        'rollout_corr/k3_kl': 1.45634,
        'actor/kl_loss': 0.194489,
        'moved': 1.54932,
    },
    'ppo': {
        'actor/pg_loss': 0.117481,
        'actor/grad_norm': 2.11037,
        'actor/ppo_kl': -0.0690762,
        'actor/pg_clipfrac': 0.18,
        'rollout_corr/k3_kl': 1.45634,
        'actor/reward_kl_penalty': 0.0582736,
        'critic/vf_loss': 0.135332,
        'critic/vf_explained_var': -0.13286,
        'critic/advantages/std_before': 0.380268,
        'moved': 1.67112,
    },
    'ppo_head': {
        'actor/pg_loss': 0.117481,
        'actor/grad_norm': 2.11037,
        'actor/ppo_kl': -0.0690762,
        'actor/pg_clipfrac': 0.18,
        'rollout_corr/k3_kl': 1.45634,
        'actor/reward_kl_penalty': 0.0582736,
        'critic/vf_loss': 0.0952882,
        'critic/vf_explained_var': -0.13286,
        'critic/advantages/std_before': 0.380268,
        'moved': 1.67112,
    },
}


def one_step(name: str, **changes) -> dict[str, float]:
    """The metrics of a step of an algorithm, as the training loop makes it after the rollout."""
    with quick_compile():
        return _one_step(make_tiny(**SETTINGS | dict(ALGORITHMS[name]) | {'learner.kl_coef': 0.05} | changes))


def _one_step(tiny: Tiny) -> dict[str, float]:
    learner, run = tiny.learner, tiny.run
    state = tiny.state if learner.critic is None else with_opinions(tiny.state)
    reference = jax.tree.map(lambda x: x * 1.02, state.params)
    start = list(map(np.array, jax.tree.leaves(state.params)))
    score = lambda params, rows: learner.score(params, rows).logp_BT
    updates = [
        [
            MicroBatch(learner.device(rows), score(state.params, learner.device(rows)), rows.counts)
            for rows in micro_batches(part, learner.layout)
        ]
        for part in samples_of(run)
    ]
    found = {}
    token_advantages, moments = TokenAdvantages(run, learner.mesh), Moments()
    if token_advantages.needed:
        for update in updates:
            for i, batch in enumerate(update):
                value_BT = learner.values(state, batch.rows) if token_advantages.needs_values else None
                update[i], summaries = token_advantages.estimate(batch, score(reference, batch.rows), value_BT)
                moments.add(summaries)
        updates = [[token_advantages.normalize(batch, moments) for batch in update] for update in updates]
        found = moments.metrics(len(LENGTHS))
    collected = []
    for update in updates:
        counts = functools.reduce(Counts.__add__, (batch.counts for batch in update))
        metrics = {}
        for _ in range(run.critic.passes if learner.critic else 0):
            state, metrics = learner.update_critic(state, [batch.of_critic() for batch in update], counts)
        batches = [(batch.rows, batch.logp_old_BT, score(reference, batch.rows)) for batch in update]
        state, more = learner.update(state, batches, counts)
        collected.append(metrics | more)
    found |= {key: float(np.mean([metrics[key] for metrics in collected])) for key in collected[0]}
    moved = [np.asarray(x) - before for x, before in zip(jax.tree.leaves(state.params), start, strict=True)]
    return found | {'moved': float(np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in moved)))}


def samples_of(run: RunConfig) -> tuple[list[Sample], list[Sample]]:
    """Of each of the two updates."""
    advantage_PR = np.asarray(ADVANTAGES[run.learner.advantage].of_group(jnp.asarray(REWARD_PR)))
    drawn = make_samples(LENGTHS)
    samples = [
        dataclasses.replace(s, prompt_ids=drawn[i // SAMPLES * SAMPLES].prompt_ids, advantage=float(a))
        for i, (s, a) in enumerate(zip(drawn, advantage_PR.reshape(-1), strict=True))
    ]
    return samples[: len(samples) // 2], samples[len(samples) // 2 :]


def with_opinions(state: LearnerState) -> LearnerState:
    """A critic that values places differently, not all at 0."""
    head_D1 = 0.1 * jnp.cos(jnp.arange(16.0))[:, None]
    critic = dataclasses.replace(state.critic, params=state.critic.params | {'head': head_D1})
    return dataclasses.replace(state, critic=critic)


@pytest.mark.parametrize('name', ALGORITHMS)
def test_golden_metrics_of_one_step(name):
    numbers = one_step(name)
    found = {key: numbers[key] for key in GOLDEN[name]}
    assert found == pytest.approx(GOLDEN[name], rel=2e-3, abs=2e-5)


def test_every_algorithm_has_numbers_of_its_own():
    assert set(GOLDEN) == set(ALGORITHMS)
    assert len({tuple(numbers.values()) for numbers in GOLDEN.values()}) == len(GOLDEN)


def test_rows_and_micro_batches_change_nothing():
    changes = {'learner.correction': 'sequence_mask', 'learner.correction_low': 0.3}
    packed = one_step('gspo', **changes)
    assert 0 < packed['rollout_corr/rollout_rs_masked_fraction'] < 1
    alone = one_step('gspo', **changes, **{'learner.packing': 'off', 'learner.rows_per_microbatch': 3})
    assert alone == pytest.approx(packed, rel=2e-4, abs=2e-5)


if __name__ == '__main__':  # what GOLDEN is written from
    for algorithm in ALGORITHMS:
        numbers = one_step(algorithm)
        extra = [k for k in ('actor/kl_loss', 'actor/reward_kl_penalty', 'critic/vf_loss') if k in numbers]
        extra += [k for k in ('critic/vf_explained_var', 'critic/advantages/std_before') if k in numbers]
        print(f'    {algorithm!r}: {{')
        for key in (*NAMES, *extra, 'moved'):
            print(f'        {key!r}: {numbers[key]:.6g},')
        print('    },')
