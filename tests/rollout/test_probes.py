"""Probe slots: what they measure is the learner's alpha, and budgets follow it."""

import collections

import jax
import numpy as np
import pytest
import teacher_forced
from flax import nnx
from sampler_setup import ALL, BIN_WIDTH, PAGES, TIGHT, Sampler, assert_same, make_requests

from sparrow_jax.config import ConfigError
from sparrow_jax.rollout import probes as probes_module
from sparrow_jax.rollout import scheduler as scheduler_module
from sparrow_jax.rollout.engine import Probing, Sampling
from sparrow_jax.rollout.offload import Offload
from sparrow_jax.rollout.pool import Pool, Request, Wanted
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.controller import Control

NEVER = Control(target=0.9, bin_width_tokens=BIN_WIDTH, min_count=10**9, urgent_count=10**9)
REQUESTS = make_requests(samples=2)


def sample(sampler, controller=None, requests=REQUESTS, **changes):
    """(responses, what the controller became)."""
    engine = sampler.engine
    engine.schedule = sampler.schedule
    start = engine.start_controller() if controller is None else controller
    sampling = Sampling(1.0, keep_hidden=sampler.keep_hidden)
    settings = {'run_key': jax.random.key(5), 'step': 3, 'sampling': sampling} | changes
    responses, adapted = engine.generate_adaptively(sampler.weights, requests, start, **settings)
    assert adapted.probe_s > 0
    return responses, adapted.controller


@pytest.fixture(scope='module')
def still(model):
    """Two of four slots are probes, and budgets never move."""
    return Sampler(model, TIGHT, keep_hidden=True, probing=Probing(NEVER, probes=2))


@pytest.fixture
def seen(monkeypatch):
    """Everything that the probes hand to the controller: (alpha, length, measured, ended) of each chunk."""
    chunks, real = [], probes_module.count

    def count(controller, control, *arrays):
        jax.debug.callback(lambda *host: chunks.append([np.asarray(x) for x in host]), *arrays, ordered=True)
        return real(controller, control, *arrays)

    monkeypatch.setattr(probes_module, 'count', count)
    return chunks


@pytest.fixture
def admitted(monkeypatch):
    """Rows in the order in which they got their slots."""
    rows = []

    class Recording(Pool):
        def admit(self, *arguments, **more):
            rows.extend(admitted := super().admit(*arguments, **more))
            return admitted

    monkeypatch.setattr(scheduler_module, 'Pool', Recording)
    return rows


def test_probes_measure_the_alpha_of_the_learner(model, seen, admitted):
    """Exact alpha of every token but the first, at its cached length, for prompts that end on, before and after pages'
    ends, in slots that are used again.
    """
    sampler = Sampler(model, TIGHT, keep_hidden=True, probing=Probing(NEVER, probes=2))
    responses, controller = sample(sampler)
    decoder = nnx.merge(sampler.engine.graphdef, sampler.weights)
    queues = collections.defaultdict(list)
    for row in admitted:
        if row.slot < 2:
            queues[row.slot].append(row.index)
    measured = {slot: [] for slot in queues}
    for alpha_PT, length_PT, new_PT, ended_P in seen:
        for slot in queues:
            here = list(zip(alpha_PT[slot][new_PT[slot]], length_PT[slot][new_PT[slot]], strict=True))
            measured[slot] += [*here, *(['end'] if ended_P[slot] else [])]
    assert sum(map(len, queues.values())) > 4
    total, mean = 0, []
    for slot, indices in queues.items():
        got = iter(measured[slot])
        for i in indices:
            response, prompt = responses[i], len(REQUESTS[i].prompt_ids)
            dense = teacher_forced.log_softmax(teacher_forced.dense(model, REQUESTS[i], response))
            actor = teacher_forced.log_softmax(decoder.logits(response.hidden))
            expected = np.exp(np.minimum(dense, actor)).sum(axis=-1)[1:]
            found = [next(got) for _ in expected]
            np.testing.assert_allclose([alpha for alpha, _ in found], expected, atol=2e-5)
            assert [length for _, length in found] == list(range(prompt + 1, prompt + len(response.tokens)))
            assert not len(expected) or next(got) == 'end'
            total += len(expected)
            mean += expected.tolist()
        assert next(got, None) is None
    assert total == controller.counts.histogram_ZX.sum() == controller.counts.tokens_Z.sum() > 50
    assert np.mean(mean) < 0.98  # or pages would not matter to this model


def test_probes_that_leave_for_a_while_are_measured_alike(model, seen, monkeypatch):
    """With pages for four longest caches: every measured alpha is that of a token that some response has there."""
    sampler = Sampler(
        model, TIGHT, keep_hidden=True, probing=Probing(NEVER, probes=3), pool_pages=2 * PAGES, slots=6, segment_steps=4
    )
    left, park = [], Offload.park
    monkeypatch.setattr(Offload, 'park', lambda self, *place: left.append(bool(place[-1])) or park(self, *place))
    requests = make_requests((24, 24, 20, 17, 24, 9, 23, 24, 5, 24, 24, 7), samples=2)
    responses, controller = sample(sampler, requests=requests)
    assert set(left) == {True, False}  # probes among them
    assert_same(responses, Sampler(model, TIGHT, keep_hidden=True)(requests))
    decoder = nnx.merge(sampler.engine.graphdef, sampler.weights)
    expected = collections.defaultdict(list)
    for request, response in zip(requests, responses, strict=True):
        dense = teacher_forced.log_softmax(teacher_forced.dense(model, request, response))
        actor = teacher_forced.log_softmax(decoder.logits(response.hidden))
        for i, alpha in enumerate(np.exp(np.minimum(dense, actor)).sum(axis=-1)[1:], start=1):
            expected[len(request.prompt_ids) + i].append(alpha)
    found = [pair for alpha, length, new, _ in seen for pair in zip(alpha[new], length[new], strict=True)]
    assert len(found) == controller.counts.tokens_Z.sum() > 40
    for alpha, length in found:
        assert np.abs(np.asarray(expected[int(length)]) - alpha).min() < 2e-5


def test_probes_change_no_token(model, still):
    plain = Sampler(model, TIGHT, keep_hidden=True)
    assert_same(sample(still)[0], plain(REQUESTS))


def test_a_rollout_repeats_exactly(still):
    (first, one), (again, two) = sample(still), sample(still)
    assert_same(again, first, atol=0)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_an_adaptive_engine_samples_densely_without_touching_shared_pages(model, still):
    plain = Sampler(model, TIGHT, keep_hidden=True)
    still.engine.schedule = still.schedule
    settings = {'run_key': jax.random.key(1), 'step': 0, 'sampling': Sampling(1.0, sparse=False, keep_hidden=True)}
    dense = still.engine.generate(still.weights, REQUESTS, **settings)
    assert_same(dense, plain.engine.generate(plain.weights, REQUESTS, **settings))


def moving(model, target, budgets):
    control = Control(target=target, bin_width_tokens=BIN_WIDTH, min_count=40, urgent_count=20)
    sampler = Sampler(model, budgets, probing=Probing(control, probes=3), segment_steps=16)
    controller, history = None, []
    for step in range(4):
        responses, controller = sample(sampler, controller, step=step)
        history.append(np.asarray(controllers.budgets(controller)))
    return responses, controller, history


def test_budgets_rise_while_the_tail_is_too_low(model):
    responses, controller, history = moving(model, 0.999, TIGHT)
    assert (np.stack(history)[:, 1:] >= (1, 2, 3)).all()
    assert (np.stack(history)[:, -1] > TIGHT[-1]).all()
    assert (np.diff(history) >= 0).all()  # ascending in length
    assert controller.moves_Z.sum() > 0
    read = np.concatenate([r.pages_read[1:] for r in responses])
    assert read.max() > TIGHT[0] + 2  # the sampler follows within the run


def test_budgets_fall_while_the_tail_is_better_than_asked(model):
    _, controller, history = moving(model, 0.05, ALL)
    assert history[-1][:3].max() < PAGES // 2
    assert (np.diff(history[-1]) >= 0).all()
    assert controller.moves_Z.sum() > 0


def test_facts_give_the_controller_back_exactly(model):
    _, controller, _ = moving(model, 0.999, TIGHT)
    facts = controllers.to_facts(controller)
    like = controllers.start(np.ones(4), 7)  # of a machine with other probes
    back = controllers.from_facts(facts, like)
    assert controllers.to_facts(back) == facts
    np.testing.assert_array_equal(back.counts.histogram_ZX, controller.counts.histogram_ZX)
    with pytest.raises(ValueError, match='covariance_EE has the shape'):
        controllers.from_facts(facts, controllers.start(np.ones(5), 7))


def test_counts_go_on_for_the_next_policy_and_certainty_falls():
    controller = controllers.start(np.ones(2), 1)
    alpha, length = np.full((1, 4), 0.5, np.float32), np.asarray([[1, 2, 3, BIN_WIDTH]])
    controller = controllers.count(controller, NEVER, alpha, length, length > 0, np.ones(1, bool))
    renewed = controllers.renew(controller)
    assert renewed.counts.tokens_Z.tolist() == renewed.counts.histogram_ZX.sum(axis=1).tolist() == [3, 1]
    variances = [np.diagonal(state.belief.covariance_EE)[:2] for state in (controller, renewed)]
    assert (variances[1] > variances[0]).all()


def test_facts_of_another_version_are_refused():
    facts = controllers.to_facts(controllers.start(np.ones(4), 1))
    del facts['log_slope']
    with pytest.raises(ValueError, match='log_slope is missing'):
        controllers.from_facts(facts, controllers.start(np.ones(4), 1))


def wanted(index, pages):
    return Wanted(index, Request([1], index, 0, 1), np.zeros(2), pages)


def test_probe_slots_are_given_out_evenly():
    pool = Pool(shards=1, slots=8, pages=100, probes=2)
    rows = [pool.admit([wanted(i, 3)], 0, [0])[0] for i in range(8)]
    assert [len(row.probe_pages) for row in rows] == [3, 0, 0, 0, 3, 0, 0, 0]
    assert sorted(row.slot for row in rows) == list(range(8))
    assert {row.slot for row in rows if row.probe_pages} == {0, 1}


def test_a_request_takes_another_slot_where_a_probe_has_no_pages_and_all_pages_come_back():
    pool = Pool(shards=1, slots=2, pages=5, probes=1)
    [first] = pool.admit([wanted(0, 3)], 1, [0])
    assert (first.slot, len(first.prefix.pages), len(first.pages), first.probe_pages) == (1, 1, 3, [])
    assert not pool.admit([wanted(1, 1)], 0, [0])
    pool.release(first.slot)
    rows = [pool.admit([wanted(1, 3)], 0, [0])[0], pool.admit([wanted(2, 1)], 0, [0])[0]]
    assert [(row.slot, len(row.pages), len(row.probe_pages)) for row in rows] == [(1, 3, 0), (0, 1, 1)]
    assert not pool.free_pages[0]
    for row in rows:
        pool.release(row.slot)
    assert sorted(pool.free_pages[0]) == list(range(5))


def test_slots_that_are_all_probes_are_refused(model):
    with pytest.raises(ConfigError, match=r'controller\.probes=4: .* has 4 slots'):
        Sampler(model, probing=Probing(NEVER, probes=4))
