"""The adapter's updates against the same mathematics written plainly; what they may change and what not."""

import dataclasses

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_distill import CHANGES, DENSE_LAYERS, PAGE, distiller_of, make_distiller, with_pages
from tiny_learner import TEMPERATURE, first_gradients, make_samples, make_tiny, plain_attend, quick_compile

from pallas_kernels.sparse_prefill import PAGE_MASK, reference
from sparrow_jax.learner import distill as distill_module
from sparrow_jax.learner.distill import DistillLoss, distill_loss
from sparrow_jax.learner.losses import PolicyLoss
from sparrow_jax.parallel.transfer import read

LENGTHS = [(3, 38), (8, 40), (2, 2)]  # two micro-batches
SAMPLES = with_pages(make_samples(LENGTHS), budget=1)
PG_COEF, KL_COEF = 0.7, 1.3


@pytest.fixture(scope='module')
def distilled():
    coefficients = {'distill.pg_coef': PG_COEF, 'distill.kl_coef': KL_COEF, 'distill.max_grad_norm': 1e9}
    with quick_compile():
        return make_distiller(**coefficients, **{'distill.learning_rate': 3e-3, 'distill.warmup_steps': 0})


@pytest.fixture(scope='module')
def state(distilled):
    """With a b that is no longer zero."""
    with quick_compile():
        state, rng = distilled.distiller.init(0), np.random.default_rng(3)
    for layer in state.params:
        for pair in layer.values():
            pair['b'] = jnp.asarray(0.2 * rng.standard_normal(pair['b'].shape), jnp.float32)
    return state


@pytest.fixture(scope='module')
def updated(distilled, state):
    """(state, metrics) after one update, which donates a copy."""
    with quick_compile():
        return distilled.distiller.update(
            distilled.params, jax.tree.map(jnp.copy, state), distilled.distiller.rows(SAMPLES)
        )


def plain_terms(distilled, factors, sample):
    """logp [R], KL [R] and alpha [R] of the response's tokens: unpadded, with whole [T, V] distributions."""
    prompt = len(sample.prompt_ids)
    ids_1T = jnp.concatenate([sample.prompt_ids, sample.response_ids])[None, :-1]
    T = ids_1T.shape[1]
    # A place reads what was recorded for the token that it predicts.
    pages_T = np.concatenate([np.zeros(prompt - 1, int), sample.pages_read])
    budget_1T = jnp.asarray(np.where(pages_T > 0, pages_T - 2, 1000))[None]

    def sparse_attend(layer, q, k, v):
        if layer in DENSE_LAYERS:
            return plain_attend(layer, q, k, v)
        return reference.sparse_prefill(
            q,
            k,
            v,
            jnp.asarray([T]),
            budget_1T,
            page_tokens=PAGE,
            reserved_first=1,
            reserved_last=1,
            out_dtype=jnp.float32,
        )

    decoder = nnx.merge(distilled.tiny.graphdef, distilled.params)
    scale_1T = jnp.where(jnp.arange(T) >= prompt, 4.5 / 3, 0.0)[None]

    def logps(hidden_1TD):
        return jax.nn.log_softmax(decoder.logits(hidden_1TD)[0, prompt - 1 :] / TEMPERATURE)

    positions_1T = jnp.arange(T)[None]
    sparse_RV = logps(decoder.hidden(ids_1T, positions_1T, sparse_attend, factors, scale_1T))
    dense_RV = logps(decoder.hidden(ids_1T, positions_1T, plain_attend))
    logp_R = sparse_RV[jnp.arange(len(sample.response_ids)), sample.response_ids]
    kl_R = (jnp.exp(sparse_RV) * (sparse_RV - dense_RV)).sum(axis=1)
    return logp_R, kl_R, jnp.minimum(jnp.exp(sparse_RV), jnp.exp(dense_RV)).sum(axis=1)


@pytest.fixture(scope='module')
def plain(distilled, state):
    """Terms of each sample, and the gradient of the whole loss for the factors, weight by weight."""

    def loss(factors):
        total, tokens, seen = 0.0, 0, []
        for sample in SAMPLES:
            logp_R, kl_R, alpha_R = plain_terms(distilled, factors, sample)
            # With one update the ratio is 1 and only its slope counts.
            weight_R = jnp.minimum(jnp.exp(jax.lax.stop_gradient(logp_R) - sample.logp_actor), 3.0)
            total += -PG_COEF * sample.advantage * (weight_R * logp_R).sum() + KL_COEF * kl_R.sum()
            tokens += len(sample.response_ids)
            seen.append((logp_R, kl_R, alpha_R))
        return total / tokens, seen

    with quick_compile():
        gradient, seen = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    return seen, jax.tree.leaves(gradient)


def test_log_probs_are_those_of_the_pages_that_were_recorded(distilled, state, plain):
    distiller, expected = distilled.distiller, {len(logp_R): logp_R for logp_R, _, _ in plain[0]}
    for rows in distiller.rows(SAMPLES):
        with quick_compile():
            logp_BT = read(distiller.score(distilled.params, state.params, distiller.device(rows)))
        for logp_T, mask_T in zip(logp_BT, rows.mask_BT, strict=True):
            if mask_T.any():
                logp_R = expected.pop(int(mask_T.sum()))
                np.testing.assert_allclose(logp_T[mask_T > 0], logp_R, rtol=0, atol=1e-5)
    assert not expected


def test_gradients_are_those_of_the_plain_loss(distilled, updated, plain):
    actual = first_gradients(updated[0], distilled.tiny.run)
    assert max(np.abs(x).max() for x in plain[1]) > 0.01
    for a, b in zip(actual, plain[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-6)


def test_metrics_are_token_means(updated, plain):
    logp, kl = (np.concatenate([np.asarray(seen[i]) for seen in plain[0]]) for i in range(2))
    actor = np.concatenate([s.logp_actor for s in SAMPLES])
    advantage = np.concatenate([np.full(len(s.response_ids), s.advantage) for s in SAMPLES])
    _, metrics = updated
    np.testing.assert_allclose(metrics['distill/kl'], kl.mean(), rtol=1e-4)
    np.testing.assert_allclose(
        metrics['distill/pg_loss'], -(np.minimum(np.exp(logp - actor), 3) * advantage).mean(), rtol=1e-4
    )
    np.testing.assert_allclose(metrics['distill/actor_kl'], (actor - logp).mean(), rtol=1e-4)
    later = np.concatenate([np.asarray(seen[2])[1:] for seen in plain[0]])
    np.testing.assert_allclose(metrics['distill/alpha_mean'], later.mean(), rtol=1e-5)
    assert metrics['distill/alpha_p05'] == pytest.approx(np.quantile(later, 0.05, method='lower'), rel=1e-4)
    assert kl.mean() > 0.01


def test_the_loss_in_numbers():
    """Two kept tokens and a masked one that holds what would poison a gradient."""
    constants = DistillLoss(
        pg_coef=2.0, kl_coef=0.5, policy=PolicyLoss(0.2, 0.28, correction='tis', correction_high=3.0)
    )
    logp = jnp.log(jnp.asarray([[0.5, 0.2, 0.1]]))
    old, actor = jnp.log(jnp.asarray([[0.25, 0.2, 0.0]])), jnp.log(jnp.asarray([[0.25, 0.05, 0.0]]))
    kl, advantage, mask = jnp.asarray([[0.3, 0.1, jnp.inf]]), jnp.asarray([[1.0, -2.0, 1.0]]), jnp.asarray([[1, 1, 0]])
    loss, sums = distill_loss(logp, kl, old, actor, advantage, mask, constants)
    # Ratios 2 (clipped to 1.28) and 1; weights 1 and 4 (cut to 3).
    np.testing.assert_allclose(sums['distill/pg_loss'], -(1.28 * 1 + 3 * 1 * -2), rtol=1e-6)
    np.testing.assert_allclose(loss, 2 * 4.72 + 0.5 * 0.4, rtol=1e-6)
    assert sums['distill/pg_clipfrac'] == 1
    gradient = jax.jit(jax.grad(lambda x: distill_loss(x, kl, old, actor, advantage, mask, constants)[0]))(logp)
    np.testing.assert_allclose(gradient, [[0, 12, 0]], rtol=1e-6)  # clipped; 2 x 3 x 2; masked
    nothing, zeros = distill_loss(logp, kl, old, actor, advantage, jnp.zeros_like(mask), constants)
    assert nothing == 0
    assert not any(map(float, zeros.values()))


def test_a_few_updates_bring_the_sparse_policy_closer(distilled):
    """At a fixed budget, by the divergence alone, on the tokens that it learns from: what attention to few pages leaves
    out of a random model is noise, of which nothing carries over to others."""
    samples = [dataclasses.replace(sample, advantage=0.0) for sample in SAMPLES[:2]]
    distiller, state, seen = distilled.distiller, distilled.distiller.init(0), []
    with quick_compile():
        for _ in range(20):
            state, metrics = distiller.update(distilled.params, state, distiller.rows(samples))
            seen.append(metrics)
    assert seen[-1]['distill/kl'] < 0.7 * seen[0]['distill/kl']
    assert seen[-1]['distill/alpha_p05'] > seen[0]['distill/alpha_p05'] + 0.02


def products(function, arguments):
    """Shapes of the results of all matrix products in a jitted function."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == 'dot_general':
                found.append(equation.outvars[0].aval.shape)
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')):
                if isinstance(inner, jax.extend.core.ClosedJaxpr):
                    visit(inner.jaxpr)
                elif hasattr(inner, 'eqns'):
                    visit(inner)

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def test_the_policy_is_frozen_in_the_adapter_s_step(distilled, state, updated):
    """Its weights are bit-equal afterwards, and no product of the step has the shape of one, as gradients have. The
    policy's own step has; the adapter is no argument of it."""
    tiny, distiller = distilled.tiny, distilled.distiller
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), updated[0].params, state.params)
    assert all(jax.tree.leaves(moved))
    with quick_compile():
        fresh = make_tiny(**CHANGES).params
    for before, after in zip(jax.tree.leaves(fresh), jax.tree.leaves(distilled.params), strict=True):
        np.testing.assert_array_equal(before, after)
    shapes = {x.shape for x in jax.tree.leaves(tiny.params) if x.ndim > 1}
    shapes |= {shape[::-1] for shape in shapes}
    of_adapter = distiller.programs()['adapter gradients']
    of_policy = tiny.learner.programs(keep_hidden=False)['gradients']
    assert not shapes & set(products(*of_adapter))
    assert shapes & set(products(*of_policy))
    assert [x.shape for x in jax.tree.leaves(of_policy[1][0])] == [x.shape for x in jax.tree.leaves(tiny.params)]
    assert of_policy[1][2].pages_read_BT is None


def test_the_backward_pass_reads_the_pages_of_the_forward_pass(distilled, monkeypatch):
    """With rematerialization the bisections for the best pages do not stand in the program a second time."""

    def loops(kept_name):
        monkeypatch.setattr(distill_module, 'PAGE_MASK', kept_name)
        learner, run = distilled.tiny.learner, dataclasses.replace(distilled.tiny.run, model=with_remat)
        function, arguments = distiller_of(run, learner).programs()['adapter gradients']
        return str(jax.make_jaxpr(function)(*arguments)).count('while[')

    with_remat = dataclasses.replace(distilled.tiny.run.model, remat=True)
    assert loops(PAGE_MASK) < loops('nothing of that name')
