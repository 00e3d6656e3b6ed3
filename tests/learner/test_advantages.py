"""Advantages against values worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax import algorithm_checks
from sparrow_jax.learner.advantages import ADVANTAGES, dr_grpo, gae, grpo, rloo, token_rewards, whiten

# Two prompts of four samples. Means .25 and 3; standard deviations (n - 1) .5 and sqrt(20 / 3).
REWARD_PR = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.0, 2.0, 4.0, 6.0]])


def test_every_configurable_advantage_exists():
    assert set(ADVANTAGES) == set(algorithm_checks.ADVANTAGES)
    assert {name for name, one in ADVANTAGES.items() if one.to_go} == set(algorithm_checks.OF_TOKENS)


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group():
    root = (20 / 3) ** 0.5
    expected = [[1.5, -0.5, -0.5, -0.5], [-3 / root, -1 / root, 1 / root, 3 / root]]
    np.testing.assert_allclose(grpo(REWARD_PR), expected, rtol=1e-5)


def test_dr_grpo_only_subtracts_the_mean():
    np.testing.assert_allclose(dr_grpo(REWARD_PR), [[0.75, -0.25, -0.25, -0.25], [-3, -1, 1, 3]], rtol=1e-6)


def test_rloo_subtracts_the_mean_of_the_others():
    # 1 - 0; 0 - 1/3. And 0 - 4, 2 - 10/3, 4 - 8/3, 6 - 2.
    expected = [[1, -1 / 3, -1 / 3, -1 / 3], [-4, -4 / 3, 4 / 3, 4]]
    np.testing.assert_allclose(rloo(REWARD_PR), expected, rtol=1e-6)


@pytest.mark.parametrize('name', algorithm_checks.COMPARING)
def test_a_group_of_equal_rewards_has_no_signal(name):
    # 0.5, 1 and 0 sum without rounding: the zeros are exact, not small.
    advantage_PR = ADVANTAGES[name].of_group(jnp.array([[1.0] * 4, [0.5] * 4, [0.0] * 4]))
    np.testing.assert_array_equal(advantage_PR, np.zeros((3, 4)))


def test_gae_stops_at_the_last_token():
    """delta = [0, 1] with the value behind the end (100) left out, so A_1 = 1 and A_0 = 0 + .95 * 1."""
    advantage_BT = gae(
        jnp.array([[0.0, 1.0, 0.0]]), jnp.array([[0.0, 0.0, 100.0]]), jnp.array([[1, 1, 0]]), gamma=1.0, lam=0.95
    )
    np.testing.assert_allclose(advantage_BT, [[0.95, 1.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize('junk', [100.0, jnp.inf, jnp.nan])
def test_gae_by_hand_with_prompt_and_padding_around_the_response(junk):
    """gamma .5, lambda .8. Places 1 to 3 are the response: r = [1, 0, 2], V = [3, 2, 1].

    delta_3 = 2 - 1 = 1; delta_2 = 0 + .5 * 1 - 2 = -1.5; delta_1 = 1 + .5 * 2 - 3 = -1.
    A_3 = 1; A_2 = -1.5 + .4 * 1 = -1.1; A_1 = -1 + .4 * -1.1 = -1.44.
    """
    reward_BT = jnp.array([[junk, 1.0, 0.0, 2.0, junk]])
    value_BT = jnp.array([[junk, 3.0, 2.0, 1.0, junk]])
    advantage_BT = gae(reward_BT, value_BT, jnp.array([[0, 1, 1, 1, 0]]), gamma=0.5, lam=0.8)
    np.testing.assert_allclose(advantage_BT, [[0.0, -1.44, -1.1, 1.0, 0.0]], rtol=1e-6)


def test_gae_of_a_masked_row_is_zero_and_carries_no_gradient_into_the_values():
    ones_BT = jnp.ones((1, 3))
    np.testing.assert_array_equal(gae(ones_BT, ones_BT, jnp.zeros((1, 3)), 0.9, 0.9), np.zeros((1, 3)))
    gradient_BT = jax.grad(lambda value_BT: gae(ones_BT, value_BT, ones_BT, 0.9, 0.9).sum())(ones_BT)
    np.testing.assert_array_equal(gradient_BT, np.zeros((1, 3)))


def test_gae_of_two_responses_in_a_row_is_that_of_each_alone():
    """A response's last token sees no value of the next one, and passes on nothing of it."""
    reward_BT, value_BT = jnp.array([[0.0, 1, 2, 9, 4, 5, 9]]), jnp.array([[9.0, 3, 2, 9, 1, 7, 9]])
    mask_BT = jnp.array([[0, 1, 1, 0, 1, 1, 0]])
    together_BT = gae(reward_BT, value_BT, mask_BT, gamma=0.9, lam=0.7)
    for part in (slice(0, 3), slice(3, 7)):
        alone_BT = gae(reward_BT[:, part], value_BT[:, part], mask_BT[:, part], gamma=0.9, lam=0.7)
        np.testing.assert_allclose(together_BT[:, part], alone_BT, rtol=1e-6)
    np.testing.assert_allclose(together_BT[0, [2, 5]], [2 - 2, 5 - 7], atol=1e-6)


def test_token_rewards_by_hand():
    """Scores 5 and 7 at the last tokens of two responses, a tenth of the KL off at every token."""
    score_BT = jnp.array([[jnp.nan, 5, 5, jnp.nan, 7, jnp.nan]])
    kl_BT = jnp.array([[jnp.nan, 1, -2, jnp.inf, 3, jnp.nan]])
    mask_BT = jnp.array([[0, 1, 1, 0, 1, 0]])
    np.testing.assert_allclose(token_rewards(score_BT, kl_BT, mask_BT, 0.1), [[0, -0.1, 5.2, 0, 6.7, 0]], rtol=1e-6)
    np.testing.assert_allclose(token_rewards(score_BT, kl_BT, mask_BT, 0.0), [[0, 0, 5, 0, 7, 0]])


def test_whitening_leaves_masked_places_at_zero():
    advantage_BT = jnp.array([[jnp.nan, 1.0, 3.0]])
    np.testing.assert_allclose(whiten(advantage_BT, jnp.array([[0, 1, 1]]), 2.0, 0.5), [[0, -2, 2]], rtol=1e-6)
    np.testing.assert_array_equal(whiten(jnp.full((1, 2), 4.0), jnp.ones((1, 2)), 4.0, 0.0), [[0, 0]])
