"""Advantages over a whole step, and what is told of them, against NumPy and values worked out by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_learner import make_run, make_samples

from sparrow_jax.learner.rows import RowLayout, micro_batches
from sparrow_jax.learner.token_advantages import MicroBatch, Moments, TokenAdvantages
from sparrow_jax.parallel import mesh as meshes

LAYOUT = RowLayout(32, 2, True)


def batches_of(samples, old=0.0):
    return [
        MicroBatch(rows, jnp.full(rows.token_BT.shape, old, jnp.float32), rows.counts)
        for rows in micro_batches(samples, LAYOUT)
    ]


def finished(run, batches, reference=0.0, value=0.0):
    """Normalized micro-batches and metrics."""
    chosen, moments = TokenAdvantages(run, meshes.make_mesh(run.parallel)), Moments()
    estimated = []
    for batch in batches:
        full = lambda x, batch=batch: jnp.full(batch.rows.token_BT.shape, x, jnp.float32)
        batch, summaries = chosen.estimate(batch, full(reference), full(value))
        moments.add(summaries)
        estimated.append(batch)
    sequences = sum(batch.counts.sequences for batch in batches)
    return [chosen.normalize(batch, moments) for batch in estimated], moments.metrics(sequences)


def kept(batches, name):
    return np.concatenate([np.asarray(getattr(b.rows, name))[np.asarray(b.rows.loss_mask_BT) > 0] for b in batches])


def test_reinforce_pp_is_normalized_over_the_tokens_of_all_micro_batches():
    samples = make_samples([(3, 5), (4, 9), (10, 12), (9, 20), (8, 20)])
    batches = batches_of(samples)
    assert len(batches) > 1
    done, metrics = finished(make_run(**{'learner.advantage': 'reinforce_pp'}), batches)
    raw_N = np.repeat([s.advantage for s in samples], [len(s.response_ids) for s in samples])
    np.testing.assert_allclose(metrics['critic/advantages/std_before'], raw_N.std(), rtol=1e-5)
    expected_N = (raw_N - raw_N.mean()) / raw_N.std()
    np.testing.assert_allclose(np.sort(kept(done, 'advantage_BT')), np.sort(expected_N), rtol=1e-4)
    np.testing.assert_allclose(metrics['critic/advantages/max'], expected_N.max(), rtol=1e-4)
    np.testing.assert_allclose(metrics['critic/advantages/min'], expected_N.min(), rtol=1e-4)
    np.testing.assert_allclose(metrics['critic/rewards/mean'], np.mean([s.advantage for s in samples]), rtol=1e-4)


def test_the_kl_of_the_tokens_that_follow_is_part_of_a_reward():
    """kl_coef .1 and KL 1 a token: of 3 tokens the first has reward 2 - .3, the last 2 - .1; of one alone 1 - .1."""
    first, second = (
        dataclasses.replace(s, advantage=a) for s, a in zip(make_samples([(2, 3), (2, 1)]), (2.0, 1.0), strict=True)
    )
    run = make_run(**{'learner.advantage': 'reinforce_pp', 'learner.kl_coef': 0.1, 'learner.kl_placement': 'reward'})
    done, metrics = finished(run, batches_of([first, second], old=0.5), reference=-0.5)
    raw_N = np.array([1.7, 1.8, 1.9, 0.9])
    np.testing.assert_allclose(kept(done, 'advantage_BT'), (raw_N - raw_N.mean()) / raw_N.std(), rtol=1e-4)
    np.testing.assert_allclose(metrics['actor/reward_kl_penalty'], 1, rtol=1e-5)
    np.testing.assert_allclose(metrics['critic/rewards/mean'], (1.7 + 0.9) / 2, rtol=1e-5)


def test_returns_and_values_of_a_critic_by_hand():
    """Score 2, V = .5 everywhere, gamma 1, lambda .5: deltas 0, 1.5; advantages .75, 1.5; returns 1.25, 2."""
    [sample] = make_samples([(2, 2)])
    left_out = dataclasses.replace(make_samples([(2, 4)], seed=1)[0], advantage=99.0, learned=False)
    run = make_run(**{'learner.advantage': 'gae', 'critic.kind': 'head', 'critic.lam': 0.5})
    batches = batches_of([dataclasses.replace(sample, advantage=2.0), left_out])
    done, metrics = finished(run, batches, value=0.5)
    np.testing.assert_allclose(kept(done, 'advantage_BT'), [-1, 1], rtol=1e-4)
    mask_BT = np.asarray(done[0].rows.loss_mask_BT)
    np.testing.assert_allclose(np.asarray(done[0].return_BT)[mask_BT > 0], [1.25, 2], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(done[0].rows.advantage_BT)[mask_BT == 0], 0)
    expected = {
        'critic/advantages/mean': 0.0,
        'critic/advantages/std_before': 0.375,
        'critic/values/mean': 0.5,
        'critic/values/max': 0.5,
        'critic/returns/mean': 1.625,
        'critic/returns/min': 1.25,
        'critic/vf_explained_var': 0.0,  # constant values explain nothing
        'critic/rewards/mean': 2.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


def test_a_step_that_keeps_nothing_has_finite_numbers():
    samples = [dataclasses.replace(s, learned=False) for s in make_samples([(2, 3)])]
    done, metrics = finished(make_run(**{'learner.advantage': 'reinforce_pp'}), batches_of(samples))
    assert done[0].counts.tokens == 0
    np.testing.assert_array_equal(done[0].rows.advantage_BT, np.zeros((2, 32)))
    assert np.isfinite(list(metrics.values())).all()
