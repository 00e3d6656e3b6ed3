"""The bench's step is a rollout's step at the length that is said, and its parts leave nothing of their work out."""

import copy
import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aot import lower_for_h200
from jax import lax
from sampler_setup import ALL, PAGE, SHAPE, Sampler

from pallas_kernels.implementation import Implementation
from sparrow_jax.rollout import step_times
from sparrow_jax.rollout.cache import Cache
from sparrow_jax.rollout.step_times import FullSlots, StepParts, median_seconds, segment_start, step_seconds

CACHED, BUDGET, READ = 37, 1, 3  # tokens; pages beside the 2 reserved ones of the 5 pages
LONGEST = 44  # pages for 6, of which a segment of 8 steps fills the last one in part


@pytest.fixture(scope='module')
def sampler(model):
    """One whose sequences never end."""
    sampler = Sampler(model, budgets=(BUDGET,) * len(ALL), pool_pages=4 * 6)
    functions = sampler.engine.functions
    functions.statics = dataclasses.replace(functions.statics, end_ids=(SHAPE.vocab_size,))
    return sampler


@pytest.fixture
def full(sampler):
    return FullSlots(sampler.engine, LONGEST)


def test_sequences_hold_pages_of_their_own_in_scattered_places(full):
    table_BN = np.asarray(full.slots.table_BN)
    pages = table_BN[:, : -(-LONGEST // PAGE)]
    assert sorted(pages.flatten()) == list(range(24))
    assert (np.diff(pages, axis=1) != 1).any()
    for arrays in (full.cache.pages, full.cache.landmarks):
        values = np.stack([np.asarray(array) for array in arrays])
        assert 0.09 < values.std() < 0.11
        assert len(np.unique(values)) > 0.99 * values.size, 'layers, pages or tokens alike'


@pytest.mark.parametrize('kind', ['fixed', 'dense'])
def test_the_segment_runs_at_the_length_with_the_pages_that_are_said(sampler, full, kind):
    engine, steps = sampler.engine, sampler.engine.rollout.segment_steps
    engine.schedule = dataclasses.replace(sampler.schedule, kind=kind)
    assert step_seconds(engine, sampler.weights, full, CACHED) > 0
    length = segment_start(CACHED, steps) + 1 + np.arange(steps)
    assert abs(length.mean() - CACHED) <= 0.5
    np.testing.assert_array_equal(full.slots.length_B, [length[-1]] * 4)
    np.testing.assert_array_equal(full.slots.count_B, [steps + 1] * 4)
    pages = np.minimum(-(-length // PAGE), READ if kind == 'fixed' else PAGE)
    np.testing.assert_array_equal(full.slots.pages_read_BT[:, 1 : steps + 1], [pages] * 4)


def test_a_sequence_that_ends_is_no_result(model):
    sampler = Sampler(model, budgets=(BUDGET,) * len(ALL), pool_pages=4 * 6)  # 2 of 40 tokens end it
    with pytest.raises(RuntimeError, match='ended during the run'):
        step_seconds(sampler.engine, sampler.weights, FullSlots(sampler.engine, LONGEST), CACHED)


def test_the_time_is_the_median_of_runs_of_several_calls(monkeypatch):
    clock, calls = [0.0], [0]
    monkeypatch.setattr(step_times, 'time', types.SimpleNamespace(perf_counter=lambda: clock[0]))
    slow = {step_times.SEGMENTS: 1000.0, 2 * step_times.SEGMENTS: 1000.0}  # one call in each of two runs

    def call(state):
        clock[0] += slow.get(calls[0], 3.0) if calls[0] else 500.0  # the first one compiles
        calls[0] += 1
        return state + 1

    assert median_seconds(call, np.int32(0)) == (3.0, 1 + step_times.RUNS * step_times.SEGMENTS)
    assert calls[0] == 1 + step_times.RUNS * step_times.SEGMENTS


@pytest.fixture(scope='module')
def parts(sampler):
    sampler.engine.schedule = sampler.schedule
    return StepParts(sampler.engine, sampler.weights)


@pytest.mark.parametrize('fused', [False, True])
def test_every_part_takes_time_and_leaves_the_cache_usable(parts, full, fused, monkeypatch):
    monkeypatch.setattr(parts, 'statics', dataclasses.replace(parts.statics, fused=fused))
    monkeypatch.setattr(parts, '_graphs', {})
    seconds = {**parts.reading(full, CACHED), **parts.others(full, CACHED)}
    assert set(seconds) == {'attention', 'select', 'matmuls', 'sampling', 'cache_write'}
    seconds['attention'] += seconds['select']  # which is taken off
    assert all(0 < value < 1 for value in seconds.values())
    assert step_seconds(parts.engine, parts.weights, full, CACHED) > 0


def test_one_compilation_of_a_part_serves_all_lengths(parts, full):
    for cached in (CACHED, 20):
        parts.reading(full, cached)
        parts.others(full, cached)
    assert set(parts._graphs) == {'attention', 'select', 'matmuls', 'sampling', 'cache_write'}
    assert [graph._cache_size() for graph in parts._graphs.values()] == [1] * 5


@pytest.mark.parametrize('poisoned', range(SHAPE.layers))
def test_attention_reads_every_layer(parts, full, poisoned):
    """Dense and sparse layers alike: NaN in the pages of one shows in the result."""
    query, pages = parts._queries(), list(full.cache.pages)
    integers = (parts._integers(CACHED), parts._integers(BUDGET))
    arguments = (full.cache.landmarks, full.slots.table_BN, *integers)
    attend = jax.jit(functools.partial(parts._attend, 0))
    assert jnp.isfinite(attend(query, pages, *arguments)).all()
    pages[poisoned] = jnp.full_like(pages[poisoned], jnp.nan)
    assert jnp.isnan(attend(query, pages, *arguments)).all()


def products(text: str) -> tuple[int, int]:
    """Matrix products in compiled text, and how many of them stand outside of all loops."""
    bodies = dict(re.findall(r'^((?:ENTRY )?%?[\w.-]+) .*?\{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL))
    counts = {name: body.count(' dot(') for name, body in bodies.items()}
    [entry] = [name for name in bodies if name.startswith('ENTRY')]
    called = re.findall(r'calls=(%?[\w.-]+)', bodies[entry])
    return sum(counts.values()), counts[entry] + sum(counts[name] for name in called)


def test_the_compiler_leaves_no_part_out(parts, full):
    """What it makes of a loop has the products of one step in it: 7 a layer, the head, scores. None is taken out of
    the loop."""
    graphs, compiled = dict(parts._graphs), {}

    def reading(name):
        def run(fixed, carry):
            if name not in compiled:
                compiled[name] = graphs[name].lower(fixed, carry).compile().as_text()
            return graphs[name](fixed, carry)

        return run

    parts._graphs.update({name: reading(name) for name in graphs})
    parts.reading(full, CACHED)
    parts.others(full, CACHED)
    parts._graphs.update(graphs)
    assert {name: products(text) for name, text in compiled.items()} == {
        'matmuls': (7 * SHAPE.layers, 0),
        'sampling': (1, 0),
        'select': (len(parts.sparse_layers), 0),
        'attention': (2 * SHAPE.layers + len(parts.sparse_layers), 0),
        'cache_write': (0, 0),
    }
    assert 'sort' in compiled['select']


def test_parts_take_the_kernels_of_an_h200(parts):
    """With heads of 64 in bfloat16, a dense and a sparse layer; nothing is run."""
    on_gpu = copy.copy(parts)
    on_gpu.statics = dataclasses.replace(parts.statics, kernels=Implementation.MOSAIC_GPU, max_pages=READ)
    B, K, H, N, P, A = 4, 2, 4, 8, 24, 64
    of = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    integers = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)
    pages, landmarks = [of(K, P, PAGE, 2 * A)] * 2, [of(B, K, N, A)] * 2
    length_B, table_BN, query = integers(B), integers(B, N), of(B, 1, H, A)

    def calls(step, carry, *fixed) -> int:
        loop = lambda carry, fixed: lax.fori_loop(0, 8, lambda turn, carry: step(turn, carry, *fixed), carry)
        return lower_for_h200(loop, carry, fixed).as_text().count('custom_call @mosaic_gpu')

    assert calls(on_gpu._attend, query, pages, landmarks, table_BN, length_B, length_B) == 2
    assert calls(on_gpu._select, integers(B, K), query, landmarks[1:], table_BN, length_B, length_B) == 1
    assert calls(on_gpu._write, Cache(pages, landmarks), of(B, K, A), of(B, K, A), table_BN, length_B) == 2
