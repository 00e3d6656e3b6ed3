"""Scores and updates of the learner against the same mathematics written plainly."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny_learner import (
    ROW_TOKENS,
    TEMPERATURE,
    VOCAB,
    answer_places,
    first_gradients,
    make_run,
    make_samples,
    make_tiny,
    pad,
    plain_attend,
    plain_gradients,
    plain_hidden,
    plain_logps,
    quick_compile,
)

from sparrow_jax.config import OptimizerConfig
from sparrow_jax.learner.advantages import grpo
from sparrow_jax.learner.learner import make_optimizer
from sparrow_jax.learner.rows import Counts, Sample, empty_rows, micro_batches
from sparrow_jax.metrics import CompileCounter
from sparrow_jax.rollout.sampling import draw, draw_noise, sample_keys

LENGTHS = [(3, 5), (4, 9), (10, 12), (2, 2), (6, 7), (1, 1), (5, 3)]
SAMPLES = make_samples(LENGTHS)


def true_logps(tiny, samples, temperature=TEMPERATURE):
    """The plain log-probs of each sample's response."""
    with quick_compile():
        logp_BT = np.asarray(plain_logps(tiny.graphdef, tiny.params, pad(samples), temperature))
    return [logp_T[answer_places(s)] for logp_T, s in zip(logp_BT, samples, strict=True)]


def assert_gradients(actual, expected, atol=2e-6):
    """Gradients of size 1 in float32, summed in another order."""
    assert len(actual) == len(expected)
    assert max(np.abs(x).max() for x in expected) > 0.01
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol)


@pytest.fixture
def _quick():
    with quick_compile():
        yield


# ---------------------------------------------------------------------------------------------- scores


def test_no_shift_between_actor_and_dense_log_probs(packed):
    """r = logp_dense - logp_actor is 0 for an actor that is the dense policy; a shift by one place is not."""
    samples = [dataclasses.replace(s, logp_actor=p) for s, p in zip(SAMPLES, true_logps(packed, SAMPLES), strict=True)]
    batches = micro_batches(samples, packed.learner.layout)
    assert len(batches) == 2
    for rows in batches:
        logp_BT = np.asarray(packed.learner.score(packed.params, packed.learner.device(rows)).logp_BT)
        kept_BT = rows.mask_BT > 0
        assert np.abs(logp_BT - rows.logp_actor_BT)[kept_BT].max() < 1e-5
        for shift in (-1, 1):
            assert np.median(np.abs(np.roll(logp_BT, shift, axis=1) - rows.logp_actor_BT)[kept_BT]) > 0.3


def test_hidden_states_stand_where_their_token_is_predicted(packed):
    """An actor with the dense policy's hidden states has alpha 1 at every response token; shifted by one it has not."""
    hidden_BTD = np.asarray(plain_hidden(packed.graphdef, packed.params, pad(SAMPLES)))

    def alphas(shift):
        places = [answer_places(s) for s in SAMPLES]
        samples = [
            dataclasses.replace(s, hidden=np.roll(hidden_TD, shift, axis=0)[place])
            for s, hidden_TD, place in zip(SAMPLES, hidden_BTD, places, strict=True)
        ]
        for rows in micro_batches(samples, packed.learner.layout):
            scores = packed.learner.score(packed.params, packed.learner.device(rows))
            yield np.asarray(scores.alpha_BT)[rows.mask_BT > 0], np.asarray(scores.alpha_top20_BT)[rows.mask_BT > 0]

    for alpha_N, top20_N in alphas(0):
        np.testing.assert_allclose(alpha_N, 1, atol=1e-5)
        assert np.all(top20_N <= alpha_N)
    assert np.median(np.concatenate([alpha_N for alpha_N, _ in alphas(1)])) < 0.8


def test_a_dense_sampler_at_the_same_temperature_has_mean_ratio_one(packed):
    """Responses drawn by `draw` at T = .6, one token at a time over the whole prefix; a step with learning rate 0."""
    B, prompt, length = 6, 3, 14
    ids_BT = jnp.zeros((B, ROW_TOKENS), jnp.int32).at[:, :prompt].set(jnp.arange(B * prompt).reshape(B, prompt) % VOCAB)
    keys_B2 = sample_keys(jax.random.key(0), 1, jnp.arange(B), jnp.zeros(B, jnp.int32))

    @jax.jit
    def sample(params, ids_BT):
        decoder = nnx.merge(packed.graphdef, params)
        positions_BT = jnp.broadcast_to(jnp.arange(ROW_TOKENS), (B, ROW_TOKENS))

        def step(i, state):
            ids_BT, logp_BT = state
            hidden_BD = decoder.hidden(ids_BT, positions_BT, plain_attend)[:, prompt + i - 1]
            noise = draw_noise(keys_B2, jnp.full(B, i), VOCAB)
            token_B, logp_B = draw(decoder.logits(hidden_BD), noise, jnp.float32(TEMPERATURE))
            return ids_BT.at[:, prompt + i].set(token_B), logp_BT.at[:, i].set(logp_B)

        return jax.lax.fori_loop(0, length, step, (ids_BT, jnp.zeros((B, length))))

    with quick_compile():
        ids_BT, logp_BT = map(np.asarray, sample(packed.params, ids_BT))
    response_BT = ids_BT[:, prompt : prompt + length]
    assert len(np.unique(response_BT)) > 5
    samples = [Sample(i[:prompt], t, p, 1.0) for i, t, p in zip(ids_BT, response_BT, logp_BT, strict=True)]
    state, metrics = packed.update(packed.batches(samples))
    np.testing.assert_allclose(metrics['actor/ratio_mean'], 1, atol=1e-6)
    np.testing.assert_allclose(metrics['rollout_corr/rollout_is_mean'], 1, atol=1e-5)
    np.testing.assert_allclose(metrics['rollout_corr/rollout_is_max'], 1, atol=1e-4)
    for before, after in zip(jax.tree.leaves(packed.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(before, after)
    # The same responses scored at another temperature are far from it.
    ratios = [np.exp(p - s.logp_actor) for p, s in zip(true_logps(packed, samples, 1.0), samples, strict=True)]
    assert abs(np.mean(ratios) - 1) > 0.05


def test_the_dense_floor_of_batch_shape_alone(record_property):
    """The same tokens scored at batch 1 and 8 in bfloat16. The floor is recorded; bounded by a few roundings."""
    tiny = make_tiny(**{'learner.packing': 'off', 'learner.rows_per_microbatch': 8, 'model.compute_dtype': 'bfloat16'})
    samples = make_samples([(8, 16)] * 8, seed=3)
    (rows,) = micro_batches(samples, tiny.learner.layout)
    kept_BT = rows.mask_BT > 0
    together_BT = np.asarray(tiny.learner.score(tiny.params, tiny.learner.device(rows)).logp_BT)
    alone = [jax.tree.map(lambda x, b=b: x[b : b + 1], rows) for b in range(8)]
    alone_BT = np.concatenate([tiny.learner.score(tiny.params, tiny.learner.device(one)).logp_BT for one in alone])
    difference_N = np.abs(together_BT - alone_BT)[kept_BT]
    record_property('floor_max_nats', float(difference_N.max()))
    record_property('floor_mean_nats', float(difference_N.mean()))
    print(f'bfloat16 floor, batch 1 against 8: mean {difference_N.mean():.2e}, max {difference_N.max():.2e} nats')
    assert difference_N.max() < 0.05
    exact_N = np.concatenate(true_logps(dataclasses.replace(tiny, graphdef=make_tiny().graphdef), samples))
    assert 0 < np.abs(together_BT[kept_BT] - exact_N).max() < 0.5, 'not computed in bfloat16'


# ---------------------------------------------------------------------------------------------- gradients


def test_policy_gradient_is_the_weighted_gradient_of_the_plain_log_probs(packed):
    """On policy the loss's gradient is that of -sum(min(rho, cap) A logp) / response tokens."""
    tokens = sum(len(s.response_ids) for s in SAMPLES)
    weight_BT = np.zeros((len(SAMPLES), ROW_TOKENS - 1), np.float32)
    for weight_T, sample, logp in zip(weight_BT, SAMPLES, true_logps(packed, SAMPLES), strict=True):
        rho = np.minimum(np.exp(logp - sample.logp_actor), packed.run.learner.correction_high)
        weight_T[answer_places(sample)] = -rho * sample.advantage / tokens
    with quick_compile():
        expected = plain_gradients(packed.graphdef, packed.params, pad(SAMPLES), TEMPERATURE, weight_BT)
    actual, metrics = packed.gradients(packed.batches(SAMPLES))
    assert_gradients(actual, expected)
    norm = np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in expected))
    np.testing.assert_allclose(metrics['actor/grad_norm'], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics['actor/ratio_mean'], 1, rtol=1e-6)


def test_packed_is_unpacked(packed):
    actual, metrics = packed.gradients(packed.batches(SAMPLES))
    with quick_compile():
        unpacked = make_tiny(**{'learner.packing': 'off', 'learner.rows_per_microbatch': 4})
        batches = unpacked.batches(SAMPLES)
        assert max(int(rows.segment_BT.max()) for rows, *_ in batches) == 1
        expected, plain_metrics = unpacked.gradients(batches)
    assert_gradients(actual, expected)
    assert metrics == pytest.approx(plain_metrics, rel=1e-5, abs=1e-6)


def test_log_probs_are_bit_equal_when_another_sequence_of_the_row_changes(packed):
    a, b, c = make_samples([(6, 8), (4, 7), (3, 4)])
    other, *_ = make_samples([(6, 8)], seed=9)
    assert not np.array_equal(a.response_ids, other.response_ids)
    scored = []
    for first in (a, other):
        (rows,) = micro_batches([first, b, c], packed.learner.layout)
        np.testing.assert_array_equal(rows.segment_BT[0], [1] * 14 + [2] * 11 + [3] * 7)
        scores = packed.learner.score(packed.params, packed.learner.device(rows))
        scored.append((np.asarray(scores.logp_BT)[0], np.asarray(scores.entropy_BT)[0]))
    for x, y in zip(*scored, strict=True):
        np.testing.assert_array_equal(x[14:], y[14:])
        assert not np.array_equal(x[:14], y[:14])


def test_micro_batches_give_the_gradient_of_one_batch_and_groups_survive_them(packed):
    """4 samples of one prompt, rewards [1, 0, 0, 0], two a row. One micro-batch of two rows, or two of a row each."""
    advantages = np.asarray(grpo(jnp.array([[1.0, 0.0, 0.0, 0.0]])))[0]
    drawn = make_samples([(4, 12)] * 4, seed=5)
    samples = [
        dataclasses.replace(s, prompt_ids=drawn[0].prompt_ids, advantage=float(a))
        for s, a in zip(drawn, advantages, strict=True)
    ]
    whole, *rest = packed.batches(samples)
    assert not rest
    halves = packed.batches(samples[:2]) + packed.batches(samples[2:])
    assert len(halves) == 2
    expected, metrics = packed.gradients([whole])
    actual, halves_metrics = packed.gradients(halves)
    assert_gradients(actual, expected)
    assert halves_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    # Normalized anew in each half the advantages would be .707, -.707, 0, 0.
    anew = np.asarray(grpo(jnp.array([[1.0, 0.0], [0.0, 0.0]]))).reshape(-1)
    again = [dataclasses.replace(s, advantage=float(a)) for s, a in zip(samples, anew, strict=True)]
    wrong, _ = packed.gradients(packed.batches(again))
    assert max(np.abs(a - b).max() for a, b in zip(wrong, expected, strict=True)) > 0.01


# ---------------------------------------------------------------------------------------------- masks


def test_what_stands_at_masked_places_changes_nothing(packed):
    """0 * inf: not even NaN in every input of prompts and padding."""
    batches = packed.batches(SAMPLES)
    expected, metrics = packed.gradients(batches)
    for junk in (-100.0, -np.inf, np.nan):
        spoil = lambda mask_BT, x_BT, junk=junk: jnp.where(mask_BT > 0, x_BT, junk)
        dirty = []
        for rows, logp_old_BT, _ in batches:
            actor_BT, advantage_BT = spoil(rows.mask_BT, rows.logp_actor_BT), spoil(rows.mask_BT, rows.advantage_BT)
            spoiled = dataclasses.replace(rows, logp_actor_BT=actor_BT, advantage_BT=advantage_BT)
            dirty.append((spoiled, spoil(rows.mask_BT, logp_old_BT), jnp.full_like(logp_old_BT, junk)))
        actual, dirty_metrics = packed.gradients(dirty)
        assert dirty_metrics == metrics
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_all_tokens_masked(packed):
    batches = [
        (dataclasses.replace(rows, mask_BT=jnp.zeros_like(rows.mask_BT)), *logps)
        for rows, *logps in packed.batches(SAMPLES)
    ]
    actual, metrics = packed.gradients(batches)
    assert metrics['actor/pg_loss'] == metrics['actor/grad_norm'] == 0
    assert all(np.isfinite(value) for value in metrics.values())
    for gradient in actual:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_the_denominator_is_the_kept_tokens(packed):
    """A masked response of 6 tokens beside a kept one of 2: means over 2, and the gradient of the kept one alone."""
    masked, kept = make_samples([(14, 6), (15, 2)], seed=7)  # 20 and 17 tokens: a row each
    (rows, *logps), *rest = packed.batches([masked, kept])
    assert not rest
    batch = (dataclasses.replace(rows, mask_BT=rows.mask_BT.at[0].set(0)), *logps)
    assert float(batch[0].mask_BT.sum()) == 2
    actual, metrics = packed.gradients([batch])
    expected, kept_metrics = packed.gradients(packed.batches([kept]))
    assert metrics['actor/ratio_mean'] == pytest.approx(1)
    assert metrics == pytest.approx(kept_metrics, rel=1e-5, abs=1e-6)
    assert_gradients(actual, expected)


def test_a_sequence_that_is_left_out_is_scored_but_not_learned_from(packed):
    """As if it were not there, for the loss; its log-probs and masks stay, for what is measured."""
    *others, last = SAMPLES
    with_it = packed.batches([*others, dataclasses.replace(last, learned=False)])
    actual, metrics = packed.gradients(with_it)
    expected, expected_metrics = packed.gradients(packed.batches(others))
    assert metrics == pytest.approx(expected_metrics, rel=1e-5, abs=1e-6)
    assert_gradients(actual, expected)
    assert sum(float(rows.mask_BT.sum()) for rows, *_ in with_it) == sum(len(s.response_ids) for s in SAMPLES)


# ---------------------------------------------------------------------------------------------- updates


@pytest.mark.usefixtures('_quick')
def test_two_supervised_updates_are_adamw_by_hand():
    """Clipped gradient, moments with bias correction, warm-up over 4 updates, decay of the matrices alone, T = 1."""
    tiny = make_tiny(
        **{
            'phase': 'supervised',
            'rollout.temperature': 0.6,  # must have no effect on supervised training
            'optimizer.learning_rate': 0.02,
            'optimizer.warmup_steps': 4,
            'optimizer.eps': 1e-3,  # large, so that a rounding of a tiny gradient does not decide a whole step
            'optimizer.weight_decay': 0.1,
            'optimizer.max_grad_norm': 0.5,
        }
    )
    tokens = sum(len(s.response_ids) for s in SAMPLES)
    weight_BT = np.zeros((len(SAMPLES), ROW_TOKENS - 1), np.float32)
    for weight_T, sample in zip(weight_BT, SAMPLES, strict=True):
        weight_T[answer_places(sample)] = -1 / tokens
    batches = tiny.batches(SAMPLES)
    state, params = jax.tree.map(jnp.copy, tiny.state), list(map(np.asarray, jax.tree.leaves(tiny.params)))
    tree = jax.tree.structure(tiny.params)
    first = second = [np.zeros(p.shape) for p in params]
    for step, rate in ((1, 0.005), (2, 0.01)):
        raw = plain_gradients(tiny.graphdef, tree.unflatten(params), pad(SAMPLES), 1.0, weight_BT)
        raw = [np.asarray(g, np.float64) for g in raw]
        norm = np.sqrt(sum((g**2).sum() for g in raw))
        assert norm > 0.5
        gradients = [g * 0.5 / norm for g in raw]
        first = [0.9 * m + 0.1 * g for m, g in zip(first, gradients, strict=True)]
        second = [0.95 * v + 0.05 * g**2 for v, g in zip(second, gradients, strict=True)]
        expected = []
        for p, m, v in zip(params, first, second, strict=True):
            change = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-3)
            expected.append(p - rate * (change + (0.1 * p if p.ndim > 1 else 0)))
        state, metrics = tiny.learner.update(state, batches, Counts(tokens, len(SAMPLES)))
        np.testing.assert_allclose(metrics['actor/grad_norm'], norm, rtol=1e-5)
        logps = plain_logps(tiny.graphdef, tree.unflatten(params), pad(SAMPLES), 1.0)
        np.testing.assert_allclose(metrics['supervised/loss'], (np.asarray(logps) * weight_BT).sum(), rtol=1e-5)
        assert int(state.updates) == step
        for actual, wanted, before in zip(jax.tree.leaves(state.params), expected, params, strict=True):
            assert np.abs(wanted - before).max() > 1e-3
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=2e-6)
        params = list(map(np.array, jax.tree.leaves(state.params)))


def rates(**changes):
    """The learning rate of each update: with a constant gradient Adam's step is exactly the rate."""
    config = OptimizerConfig(
        **{**dataclasses.asdict(make_run().optimizer), 'learning_rate': 1.0, 'eps': 1e-12, **changes}
    )
    optimizer = make_optimizer(config)
    params = jnp.zeros(())
    state = optimizer.init(params)
    seen = []
    for _ in range(8):
        change, state = optimizer.update(jnp.ones(()), state, params)
        seen.append(-float(change))
    return seen


def test_linear_warm_up_then_constant():
    np.testing.assert_allclose(rates(warmup_steps=4), [0.25, 0.5, 0.75, 1, 1, 1, 1, 1], rtol=1e-5)
    np.testing.assert_allclose(rates(warmup_steps=0), [1] * 8, rtol=1e-5)


def test_linear_warm_up_then_cosine():
    """(1 + cos(pi k / 4)) / 2 for k = 0 to 4, then 0; the ramp's first step is 1 / warmup_steps."""
    cosine = [1, 0.853553, 0.5, 0.146447, 0, 0]
    np.testing.assert_allclose(rates(warmup_steps=2, decay_steps=4), [0.5, 1, *cosine], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rates(warmup_steps=0, decay_steps=4), [*cosine, 0, 0], rtol=1e-5, atol=1e-6)


def test_weight_decay_takes_matrices_only_and_clipping_the_global_norm():
    config = dataclasses.replace(
        make_run().optimizer, learning_rate=0.5, warmup_steps=0, weight_decay=0.1, max_grad_norm=1.0, eps=1.0, beta2=0.0
    )
    optimizer = make_optimizer(config)
    params = {'matrix': jnp.full((2, 2), 4.0), 'scale': jnp.full(2, 4.0)}
    zero = jax.tree.map(jnp.zeros_like, params)
    decayed = optax.apply_updates(params, optimizer.update(zero, optimizer.init(params), params)[0])
    np.testing.assert_allclose(decayed['matrix'], np.full((2, 2), 4 - 0.5 * 0.1 * 4), rtol=1e-6)
    np.testing.assert_array_equal(decayed['scale'], [4, 4])
    # One gradient of 10 is clipped to 1: the step is 1 / (1 + eps), half of the rate; unclipped 10 / 11 of it.
    gradient = {**zero, 'scale': jnp.array([10.0, 0.0])}
    moved = optax.apply_updates(params, optimizer.update(gradient, optimizer.init(params), params)[0])
    np.testing.assert_allclose(moved['scale'], [4 - 0.5 * 0.5, 4], rtol=1e-6)


def test_after_the_warm_up_nothing_compiles(packed):
    with_hidden = [dataclasses.replace(s, hidden=np.ones((len(s.response_ids), 16), np.float32)) for s in SAMPLES]
    rows = [micro_batches(samples, packed.learner.layout) for samples in (SAMPLES, with_hidden)]
    state = jax.tree.map(jnp.copy, packed.state)
    with CompileCounter() as counter:
        warm = packed.learner.warm_up(state, keep_hidden=(False, True))
        assert warm.updates == 0
        counter.warmed_up()
        for one in rows[1]:
            packed.learner.score(warm.params, packed.learner.device(one))
        batches = []
        for one in map(packed.learner.device, rows[0]):
            logp_BT = packed.learner.score(warm.params, one).logp_BT
            batches.append((one, logp_BT, one.logp_actor_BT))
        after, _ = packed.learner.update(warm, batches, Counts(7.0, 2.0))
        packed.learner.update(after, batches, Counts(8.0, 2.0))
        assert counter.late == []


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_rows_without_hidden_states_have_the_form_that_was_compiled(dtype):
    learner = make_tiny(**{'model.compute_dtype': dtype}).learner
    forms = [
        jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), learner.device(rows))
        for rows in (
            empty_rows(learner.layout, ROW_TOKENS, 0, jnp.dtype(dtype)),
            micro_batches(SAMPLES[:1], learner.layout)[0],
        )
    ]
    assert forms[0] == forms[1]


def test_a_fresh_state_is_a_copy(packed):
    params = jax.tree.map(jnp.copy, packed.params)
    state = packed.learner.init(params)
    jax.tree.map(lambda x: x.delete(), params)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(state.params))
    assert all(not x.any() for x in first_gradients(state, packed.run))
    assert state.updates == 0
