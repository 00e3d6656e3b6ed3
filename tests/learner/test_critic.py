"""Values and the critic's updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_learner import answer_places, make_samples, make_tiny, pad, plain_hidden, quick_compile

from sparrow_jax.learner.rows import Counts, micro_batches

pytestmark = pytest.mark.usefixtures('compile_cache')

SAMPLES = make_samples([(3, 5), (4, 9), (10, 12)])
SETTINGS = {'learner.advantage': 'gae', 'critic.learning_rate': 0.1, 'optimizer.warmup_steps': 0, 'critic.clip': 10.0}


def returns_of(rows):
    """Returns that a linear head can learn: 1 in every second sequence, NaN where nobody looks."""
    return jnp.where(rows.loss_mask_BT > 0, rows.segment_BT % 2, jnp.nan).astype(jnp.float32)


@pytest.mark.parametrize('kind', ['head', 'trunk'])
def test_a_value_is_that_of_the_state_before_its_token_and_updates_reach_the_critic_alone(kind):
    with quick_compile():
        tiny = make_tiny(**SETTINGS, **{'critic.kind': kind})
        learner, state = tiny.learner, tiny.state
        head_D1, bias = np.linspace(-1, 1, 16, dtype=np.float32)[:, None], 0.25
        params = state.critic.params | {'head': jnp.asarray(head_D1), 'bias': jnp.full(1, bias)}
        state = dataclasses.replace(state, critic=dataclasses.replace(state.critic, params=params))
        policy = list(map(np.array, jax.tree.leaves(state.params)))
        hidden_BTD = np.asarray(plain_hidden(tiny.graphdef, tiny.params, pad(SAMPLES)))

        batches = [learner.device(rows) for rows in micro_batches(SAMPLES, learner.layout)]
        expected = [
            hidden_TD[answer_places(s)] @ head_D1[:, 0] + bias for s, hidden_TD in zip(SAMPLES, hidden_BTD, strict=True)
        ]
        found = np.concatenate(
            [np.asarray(learner.values(state, rows))[np.asarray(rows.mask_BT) > 0] for rows in batches]
        )
        np.testing.assert_allclose(np.sort(found), np.sort(np.concatenate(expected)), rtol=1e-4, atol=1e-5)

        counts = sum((rows.counts for rows in batches), Counts(0.0, 0.0))
        losses = []
        for _ in range(4):
            old = [learner.values(state, rows) for rows in batches]
            update = [(rows, value_BT, returns_of(rows)) for rows, value_BT in zip(batches, old, strict=True)]
            state, metrics = learner.update_critic(state, update, counts)
            losses.append(metrics['critic/vf_loss'])
    assert losses[-1] < 0.7 * losses[0]
    assert np.isfinite(losses).all()
    assert metrics['critic/grad_norm'] > 0
    for before, after in zip(policy, jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(before, after)
    if kind == 'trunk':
        moved = [
            np.abs(np.asarray(x) - y).max()
            for x, y in zip(jax.tree.leaves(state.critic.params['trunk']), policy, strict=True)
        ]
        assert min(moved) > 0
    else:
        assert 'trunk' not in state.critic.params


def test_a_run_without_a_critic_says_so(packed):
    rows = packed.learner.device(micro_batches(SAMPLES, packed.learner.layout)[0])
    with pytest.raises(ValueError, match=r"critic\.kind='none'"):
        packed.learner.values(packed.state, rows)
