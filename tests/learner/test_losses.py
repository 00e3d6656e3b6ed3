"""Losses and their gradients against values worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax import algorithm_checks
from sparrow_jax.learner.losses import (
    AGGREGATIONS,
    RATIOS,
    PolicyLoss,
    metric_means,
    policy_loss,
    supervised_loss,
    value_loss,
)
from sparrow_jax.learner.rows import Counts

step = jax.jit(jax.value_and_grad(policy_loss, has_aux=True), static_argnums=7)
PLAIN = PolicyLoss(clip_low=0.2, clip_high=0.28)
TIS = PolicyLoss(0.2, 0.28, correction='tis', correction_high=3.0, kl_coef=0.1)
LOG_2 = 0.693147
ONE_4 = jnp.ones((1, 4))  # one segment


def run(constants=PLAIN, *, ratio, advantage, weight=None, reference=None, mask=None, segment=None):
    """Loss, metrics and gradient with respect to logp for one row whose ratios pi / pi_old, weights pi_old / actor
    and reference ratios pi_ref / pi are given."""
    ratio_BT, advantage_BT = jnp.array([ratio], jnp.float32), jnp.array([advantage], jnp.float32)
    ones_BT = jnp.ones_like(ratio_BT)
    weight_BT = ones_BT if weight is None else jnp.array([weight], jnp.float32)
    reference_BT = ones_BT if reference is None else jnp.array([reference], jnp.float32)
    mask_BT = ones_BT if mask is None else jnp.array([mask], jnp.float32)
    segment_BT = ones_BT.astype(jnp.int32) if segment is None else jnp.array([segment])
    logp_old_BT = jnp.full_like(ratio_BT, -1.5)
    logp_BT = logp_old_BT + jnp.log(ratio_BT)
    rest = (
        logp_old_BT,
        logp_old_BT - jnp.log(weight_BT),
        logp_BT + jnp.log(reference_BT),
        advantage_BT,
        mask_BT,
        segment_BT,
    )
    (loss, metrics), gradient_BT = step(logp_BT, *rest, constants)
    return float(loss), {name: float(value) for name, value in metrics.items()}, np.asarray(gradient_BT)[0]


@pytest.mark.parametrize(
    ('ratio', 'advantage', 'loss', 'gradient'),
    [
        (1.0, 2.0, -2.0, -2.0),  # on policy: the plain policy gradient, although both branches of the minimum tie
        (1.0, -2.0, 2.0, 2.0),
        (1.2, 2.0, -2.4, -2.4),  # inside
        (1.25, 1.0, -1.25, -1.25),  # above 1 + clip_low, below 1 + clip_high: "clip-higher" leaves it alone
        (1.5, 1.0, -1.28, 0.0),  # good and already much more likely: stopped at 1 + clip_high
        (1.5, -1.0, 1.5, 1.5),  # bad and more likely: pushed down in full
        (0.5, 1.0, -0.5, -0.5),  # good and less likely: pushed up in full
        (0.5, -1.0, 0.8, 0.0),  # bad and already much less likely: stopped at 1 - clip_low
    ],
)
def test_clipped_policy_gradient(ratio, advantage, loss, gradient):
    value, metrics, gradient_T = run(ratio=[ratio], advantage=[advantage])
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(gradient_T, [gradient], rtol=1e-5, atol=1e-7)
    assert metrics['actor/pg_clipfrac'] == (1.0 if gradient == 0 else 0.0)


def test_truncated_importance_weights_multiply_and_carry_no_gradient():
    """Weights 5, .25 and 2 with cap 3 count as 3, .25 and 2: loss -(3 + .25 * 2 - 2 * 1)."""
    capped = dataclasses.replace(TIS, kl_coef=0.0)
    facts = {'ratio': [1.0, 1.0, 1.0], 'advantage': [1.0, 2.0, -1.0], 'weight': [5.0, 0.25, 2.0]}
    loss, metrics, gradient_T = run(capped, **facts)
    np.testing.assert_allclose(loss, -1.5, rtol=1e-5)
    np.testing.assert_allclose(gradient_T, [-3.0, -0.5, 2.0], rtol=1e-5)
    # Raw statistics, before the cap. k3 = w - log w - 1: 2.390562 + .636294 + .306853.
    expected = {
        'rollout_corr/rollout_is_mean': 7.25,
        'rollout_corr/rollout_is_square_mean': 25 + 0.0625 + 4,
        'max/rollout_corr/rollout_is_max': 5.0,
        'rollout_corr/rollout_is_capped_fraction': 1.0,
        'rollout_corr/kl': -(1.609438 - 1.386294 + LOG_2),
        'rollout_corr/k3_kl': 3.333709,
    }
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    loss, metrics, _ = run(PLAIN, **facts)  # no correction, the same statistics
    np.testing.assert_allclose(loss, -2.0, rtol=1e-5)
    np.testing.assert_allclose(metrics['rollout_corr/rollout_is_mean'], 7.25, rtol=1e-5)
    assert metrics['rollout_corr/rollout_is_capped_fraction'] == 0.0


def test_kl_to_the_reference_is_k3():
    """d = log 2: k3 = 2 - log 2 - 1, slope 1 - 2. d = -log 2: k3 = .5 + log 2 - 1, slope 1 - .5."""
    constants = dataclasses.replace(PLAIN, kl_coef=0.1)
    loss, metrics, gradient_T = run(constants, ratio=[1.0, 1.0], advantage=[0.0, 0.0], reference=[2.0, 0.5])
    np.testing.assert_allclose(loss, 0.1 * (1 - LOG_2 + LOG_2 - 0.5), rtol=1e-5)
    np.testing.assert_allclose(gradient_T, [-0.1, 0.05], rtol=1e-5)
    np.testing.assert_allclose(metrics['loss/actor/kl_loss'], 0.5, rtol=1e-5)
    assert 'loss/actor/kl_loss' not in run(ratio=[1.0], advantage=[0.0])[1]


def test_metrics_are_sums_over_kept_tokens():
    loss, metrics, gradient_T = run(ratio=[1.0, 2.0, 0.5], advantage=[1.0, -1.0, 7.0], mask=[1.0, 1.0, 0.0])
    np.testing.assert_allclose(loss, -1 + 2, rtol=1e-5)
    np.testing.assert_allclose(gradient_T, [-1.0, 2.0, 0.0], rtol=1e-5)
    np.testing.assert_allclose(metrics['loss/actor/pg_loss'], 1.0, rtol=1e-5)
    np.testing.assert_allclose(metrics['actor/ratio_mean'], 3.0, rtol=1e-5)
    np.testing.assert_allclose(metrics['actor/ppo_kl'], -LOG_2, rtol=1e-5)


def test_only_logp_carries_a_gradient():
    logp_BT = jnp.array([[-1.0, -2.0]])
    arguments = (logp_BT, logp_BT - 0.1, logp_BT - 0.3, logp_BT + 0.2)
    both = jax.jit(jax.grad(policy_loss, argnums=(0, 1, 2, 3), has_aux=True), static_argnums=7)
    ones_BT = jnp.ones((1, 2))
    gradients, _ = both(*arguments, jnp.array([[1.0, -1.0]]), ones_BT, ones_BT, TIS)
    assert np.abs(gradients[0]).min() > 0
    for gradient_BT in gradients[1:]:
        np.testing.assert_array_equal(gradient_BT, np.zeros((1, 2)))


@pytest.mark.parametrize('junk', [-100.0, 100.0, -np.inf, np.inf, np.nan])
@pytest.mark.parametrize('place', range(5))
def test_what_stands_at_masked_places_changes_neither_loss_nor_gradient(place, junk):
    """0 * inf: place 0 is logp itself, then old, actor and reference log-probs and the advantage."""
    mask_BT = jnp.array([[1.0, 0.0, 1.0, 0.0]])
    clean = [jnp.array([[-0.5, -1.0, -2.0, -0.1]]) * scale for scale in (1.0, 1.1, 0.9, 0.8, -2.0)]
    dirty = list(clean)
    dirty[place] = jnp.where(mask_BT > 0, clean[place], junk)
    (loss, metrics), gradient_BT = step(*clean, mask_BT, ONE_4, TIS)
    (dirty_loss, dirty_metrics), dirty_gradient_BT = step(*dirty, mask_BT, ONE_4, TIS)
    assert np.abs(np.asarray(gradient_BT)[0, [0, 2]]).min() > 0
    assert dirty_loss == loss
    assert dirty_metrics == metrics
    np.testing.assert_array_equal(dirty_gradient_BT, gradient_BT)


@pytest.mark.parametrize('junk', [0.0, np.nan])
def test_all_tokens_masked(junk):
    junk_BT = jnp.full((2, 3), junk)
    (loss, metrics), gradient_BT = step(*[junk_BT] * 5, jnp.zeros((2, 3)), jnp.ones((2, 3)), TIS)
    assert loss == 0
    assert set(map(float, metrics.values())) == {0.0}
    np.testing.assert_array_equal(gradient_BT, np.zeros((2, 3)))


def test_supervised_loss_is_the_sum_of_kept_negative_log_probs():
    logp_BT, mask_BT = jnp.array([[-1.0, -2.0, jnp.nan], [-4.0, -0.5, -8.0]]), jnp.array([[0, 1, 0], [1, 0, 1]])
    (loss, metrics), gradient_BT = jax.value_and_grad(supervised_loss, has_aux=True)(logp_BT, mask_BT)
    assert loss == 14.0
    assert metrics == {'loss/supervised/loss': 14.0}
    np.testing.assert_array_equal(gradient_BT, [[0, -1, 0], [-1, 0, -1]])


# ---------------------------------------------------------------------------------------------- ratios, aggregation

# Two responses of a row: 3 tokens and 1, prompts and padding between.
PACKED = {'mask': [0.0, 1, 1, 1, 0, 1, 0], 'segment': [1, 1, 1, 1, 2, 2, 0]}


def test_every_configurable_ratio_and_aggregation_exists():
    assert tuple(RATIOS) == algorithm_checks.RATIOS
    assert tuple(AGGREGATIONS) == algorithm_checks.AGGREGATIONS


def test_sequence_ratio_is_the_geometric_mean_and_each_token_has_its_own_gradient():
    """Ratios 2, 4, 1 of a response of three tokens: s = 8^(1/3) = 2, clipped nowhere. The other: s = 1 / 2."""
    constants = PolicyLoss(clip_low=0.9, clip_high=9.0, ratio='sequence', aggregation='sequence_mean')
    facts = PACKED | {'ratio': [9.0, 2, 4, 1, 9, 0.5, 9], 'advantage': [7.0, 1, 1, 1, 7, -3, 7]}
    loss, metrics, gradient_T = run(constants, **facts)
    np.testing.assert_allclose(loss, -(2 * 1 + 0.5 * -3), rtol=1e-5)
    np.testing.assert_allclose(gradient_T, [0, -2 / 3, -2 / 3, -2 / 3, 0, 1.5, 0], rtol=1e-5)
    np.testing.assert_allclose(metrics['actor/ratio_mean'], 2 + 2 + 2 + 0.5, rtol=1e-5)


def test_sequence_gradient_is_that_of_the_responses_ratio_times_its_advantage():
    """GSPO, eq. 5: d/dlogp of -(exp(mean(logp - logp_old)) A), which the token form must give."""
    logp_T, old_T = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-1.1, -1.8, -0.6])
    expected_T = jax.grad(lambda logp_T: -jnp.exp((logp_T - old_T).mean()) * 1.7)(logp_T)
    constants = PolicyLoss(0.5, 0.5, ratio='sequence', aggregation='sequence_mean')
    ones_BT = jnp.ones((1, 3))
    (_, _), gradient_BT = step(
        logp_T[None], old_T[None], *[old_T[None]] * 2, 1.7 * ones_BT, ones_BT, ones_BT, constants
    )
    np.testing.assert_allclose(gradient_BT[0], expected_T, rtol=1e-5)


@pytest.mark.parametrize(('advantage', 'clipped'), [(1.0, True), (-1.0, False)])
def test_a_sequence_is_clipped_as_a_whole(advantage, clipped):
    """s = (1.5 * 0.9)^(1/2) = 1.16 > 1.1: where the response was good, the token that became rarer stands still too."""
    constants = PolicyLoss(0.1, 0.1, ratio='sequence')
    _, metrics, gradient_T = run(constants, ratio=[1.5, 0.9], advantage=[advantage] * 2)
    assert metrics['actor/pg_clipfrac'] == (2.0 if clipped else 0.0)
    np.testing.assert_allclose(gradient_T, [0, 0] if clipped else [1.16190] * 2, rtol=1e-4)


@pytest.mark.parametrize(
    ('name', 'gradient', 'denominator'),
    [
        ('token_mean', [0, -2, -2, -2, 0, -4, 0], 4.0),
        ('sequence_mean', [0, -2 / 3, -2 / 3, -2 / 3, 0, -4, 0], 2.0),
        ('constant', [0, -2, -2, -2, 0, -4, 0], 200.0),  # of 100 tokens at most
    ],
)
def test_aggregation(name, gradient, denominator):
    facts = PACKED | {'ratio': [1.0] * 7, 'advantage': [9.0, 2, 2, 2, 9, 4, 9]}
    loss, metrics, gradient_T = run(PolicyLoss(0.2, 0.2, aggregation=name), **facts)
    np.testing.assert_allclose(gradient_T, gradient, rtol=1e-6)
    np.testing.assert_allclose(loss, sum(gradient), rtol=1e-6)
    counts = Counts(tokens=4.0, sequences=2.0)
    assert AGGREGATIONS[name].denominator(counts, 100) == denominator
    means = metric_means(metrics, counts, denominator)
    np.testing.assert_allclose(means['actor/pg_loss'], sum(gradient) / denominator, rtol=1e-6)
    np.testing.assert_allclose(means['actor/ratio_mean'], 1, rtol=1e-6)


def test_kl_is_aggregated_like_the_loss():
    facts = PACKED | {'ratio': [1.0] * 7, 'advantage': [0.0] * 7, 'reference': [1.0, 2, 2, 2, 1, 2, 1]}
    loss, _, _ = run(PolicyLoss(0.2, 0.2, aggregation='sequence_mean', kl_coef=0.5), **facts)
    np.testing.assert_allclose(loss, 0.5 * 2 * (1 - LOG_2), rtol=1e-5)


def test_statistics_of_a_mask_are_of_the_raw_weights():
    """Weights 4, 1/4, 2 and 1/2 under IcePop from .3 to 3: two tokens of the first response are masked, none of the
    second."""
    constants = PolicyLoss(0.2, 0.2, correction='icepop', correction_low=0.3, correction_high=3.0)
    facts = PACKED | {'ratio': [1.0] * 7, 'advantage': [1.0] * 7, 'weight': [9.0, 4, 0.25, 2, 9, 0.5, 9]}
    loss, metrics, gradient_T = run(constants, **facts)
    np.testing.assert_allclose(loss, -(2 + 0.5), rtol=1e-5)
    np.testing.assert_allclose(gradient_T, [0, 0, 0, -2, 0, -0.5, 0], rtol=1e-5, atol=1e-7)
    means = metric_means(metrics, Counts(4.0, 2.0), 4.0)
    expected = {
        'rollout_is_mean': 6.75 / 4,
        'rollout_is_max': 4.0,
        'rollout_is_seq_mean': (2 ** (1 / 3) + 0.5) / 2,
        'rollout_is_seq_max': 2 ** (1 / 3),
        'seq_kl_max': LOG_2,
        'rollout_rs_masked_fraction': 0.5,
        'rollout_rs_seq_masked_fraction': 0.5,
        'rollout_is_capped_fraction': 0.0,
        'kl': 0.0,  # log 4 - log 4 + log 2 - log 2
    }
    for name, value in expected.items():
        np.testing.assert_allclose(means[f'rollout_corr/{name}'], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize('correction', ['token_mask', 'sequence_mask', 'icepop'])
@pytest.mark.parametrize('aggregation', ['sequence_mean', 'constant'])
def test_junk_at_masked_places_whatever_the_choices(correction, aggregation):
    choices = {'ratio': 'sequence', 'correction': correction, 'aggregation': aggregation, 'kl_coef': 0.1}
    constants = PolicyLoss(0.2, 0.28, correction_low=0.5, correction_high=2.0, **choices)
    mask_BT, segment_BT = jnp.array([[1.0, 0, 1, 0]]), jnp.array([[1, 2, 2, 0]])
    clean = [jnp.array([[-0.5, -1.0, -2.0, -0.1]]) * scale for scale in (1.0, 1.1, 0.9, 0.8, -2.0)]
    (loss, metrics), gradient_BT = step(*clean, mask_BT, segment_BT, constants)
    assert np.abs(np.asarray(gradient_BT)[0, [0, 2]]).min() > 0
    for junk in (np.nan, np.inf, -np.inf):
        dirty = [jnp.where(mask_BT > 0, x_BT, junk) for x_BT in clean]
        (dirty_loss, dirty_metrics), dirty_gradient_BT = step(*dirty, mask_BT, segment_BT, constants)
        assert dirty_loss == loss
        assert dirty_metrics == metrics
        np.testing.assert_array_equal(dirty_gradient_BT, gradient_BT)
    (loss, metrics), gradient_BT = step(*dirty, mask_BT * 0, segment_BT, constants)
    assert {float(loss), *map(float, metrics.values())} == {0.0}
    np.testing.assert_array_equal(gradient_BT, np.zeros((1, 4)))


# ---------------------------------------------------------------------------------------------- values


def test_value_loss_by_hand():
    """Old values 0, clip .5. V .4, R 1: .36 / 2. V 2, R 1: error 1, of the clipped .5 it is .25: the larger counts, 1.
    V 2, R .5: 2.25 against 0. V -2, R 3: 25 against 12.25. V 2, R 9: 49 against 72.25: stopped, no gradient.
    """
    value_BT, return_BT = jnp.array([[0.4, 2, 2, -2, 2, jnp.nan]]), jnp.array([[1.0, 1, 0.5, 3, 9, jnp.nan]])
    mask_BT = jnp.array([[1.0, 1, 1, 1, 1, 0]])
    of_value = jax.value_and_grad(value_loss, has_aux=True)
    (loss, metrics), gradient_BT = of_value(value_BT, jnp.zeros((1, 6)), return_BT, mask_BT, 0.5)
    np.testing.assert_allclose(loss, (0.36 + 1 + 2.25 + 25 + 72.25) / 2, rtol=1e-6)
    np.testing.assert_allclose(gradient_BT, [[-0.6, 1, 1.5, -5, 0, 0]], rtol=1e-5)
    np.testing.assert_allclose(metrics['critic/vf_clipfrac'], 1)
    np.testing.assert_allclose(metrics['critic/vpred_mean'], 4.4, rtol=1e-6)
    (loss, _), _ = of_value(value_BT, jnp.zeros((1, 6)), return_BT, mask_BT, np.inf)
    np.testing.assert_allclose(loss, (0.36 + 1 + 2.25 + 25 + 49) / 2, rtol=1e-6)
