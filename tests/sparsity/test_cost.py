"""The fraction of the cache that is read, and the bytes of a step, counted by hand."""

import dataclasses

import numpy as np

from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.sparsity.cost import decode_step_bytes, kv_read_fraction
from sparrow_jax.sparsity.schedules import Schedule


def make_schedule(kind='fixed', dense_layers=(0, 1)):
    return Schedule(kind, 16, 1000, 1, 1, dense_layers, (4,))


def test_two_steps_by_hand():
    """Lengths 32 and 33: 2 + 3 pages, of which a sparse layer reads 2 + 2 and landmarks of 2 + 2 full pages, each one
    row of the 32 of a page: 4 + 4 / 32. Two dense and two sparse layers: (2 * 5 + 2 * 4.125) / (4 * 5)."""
    fraction = kv_read_fraction(make_schedule(), 4, np.array([32, 33]), np.array([2, 2]))
    np.testing.assert_allclose(fraction, 0.9125, rtol=1e-12)


def test_long_contexts_approach_budget_and_landmarks():
    """One sparse layer at 160,000 tokens: 6 of 10,000 pages and every landmark, 1 / 32."""
    fraction = kv_read_fraction(make_schedule(dense_layers=()), 1, np.array([160_000]), np.array([6]))
    np.testing.assert_allclose(fraction, 0.0006 + 1 / 32, rtol=1e-12)


def test_a_policy_with_two_rows_a_page_reads_twice_as_many_landmarks():
    schedule = dataclasses.replace(make_schedule(dense_layers=()), policy=SelectionPolicy.QUEST)
    fraction = kv_read_fraction(schedule, 1, np.array([160_000]), np.array([6]))
    np.testing.assert_allclose(fraction, 0.0006 + 2 / 32, rtol=1e-12)


def test_a_dense_sampler_reads_everything_and_no_landmarks():
    schedule = make_schedule('dense', dense_layers=())
    assert kv_read_fraction(schedule, 4, np.array([5, 40]), np.array([1, 3])) == 1.0
    assert kv_read_fraction(make_schedule(dense_layers=(0, 1)), 2, np.array([5, 40]), np.array([1, 1])) == 1.0


def test_sums_do_not_overflow_int32():
    """A million steps at 131,072 tokens in 64 layers: 5e11 pages."""
    length = np.full(1_000_000, 131_072, np.int32)
    read = np.full(1_000_000, 4096, np.int32)
    fraction = kv_read_fraction(make_schedule(dense_layers=()), 64, length, read)
    np.testing.assert_allclose(fraction, 0.5 + 1 / 32, rtol=1e-12)


def test_no_tokens():
    assert np.isnan(kv_read_fraction(make_schedule(), 4, np.zeros(0, int), np.zeros(0, int)))


# 2 sequences of 40 tokens, pages of 16: 3 pages, 2 of them full. 2 KV heads of 4, 2 bytes a number: a page of keys and
# values has 512 bytes, a landmark of 4 numbers 16.
SIZES = {'layers': 4, 'kv_heads': 2, 'head_dim': 4, 'landmark_width': 4, 'value_bytes': 2, 'weight_bytes': 1000}
LENGTHS = {'sequences': 2, 'length_tokens': 40}


def test_bytes_of_a_step_by_hand():
    """A sequence: two dense layers of 3 pages, two sparse ones of 2 pages and 2 landmarks."""
    read = decode_step_bytes(make_schedule(), pages_read=2, **SIZES, **LENGTHS)
    assert read == 1000 + 2 * (2 * 3 * 512 + 2 * (2 * 512 + 2 * 16))


def test_landmarks_may_be_wider_than_a_key():
    read = decode_step_bytes(make_schedule(), pages_read=2, **SIZES | {'landmark_width': 8}, **LENGTHS)
    assert read == 1000 + 2 * (2 * 3 * 512 + 2 * (2 * 512 + 2 * 32))


def test_bytes_of_a_dense_step_are_pages_and_weights():
    read = decode_step_bytes(make_schedule('dense'), pages_read=2, **SIZES, **LENGTHS)
    assert read == 1000 + 2 * 4 * 3 * 512


def test_no_more_pages_are_read_than_there_are():
    many, every = (decode_step_bytes(make_schedule(), pages_read=n, **SIZES, **LENGTHS) for n in (99, 3))
    assert many == every == 1000 + 2 * (2 * 3 * 512 + 2 * (3 * 512 + 2 * 16))
