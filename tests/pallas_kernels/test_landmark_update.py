"""Landmarks bit by bit: float32 sums in token order, rounded once, made when the page fills; idle sequences write
nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted_operations import landmark_update

from pallas_kernels.landmark_update import page_mean

K, A, C, N = 2, 4, 8, 3


def sum_in_order(keys_CA):
    total_A = np.zeros(keys_CA.shape[1:], np.float32)
    for key_A in keys_CA.astype(np.float32):
        total_A = total_A + key_A
    return total_A


def write_all(keys_TKA, values_TKA, dtype):
    """Writes tokens one by one into one sequence; yields pool and landmarks after each."""
    pages_KPCE = jnp.full((K, N + 1, C, 2 * A), np.nan, dtype)
    landmark_BKNA = jnp.full((1, K, N, A), np.nan, dtype)
    table_BN = jnp.asarray([[2, 3, 1]], jnp.int32)
    for position, (k_KA, v_KA) in enumerate(zip(keys_TKA, values_TKA, strict=True)):
        pages_KPCE, landmark_BKNA = landmark_update(
            pages_KPCE,
            landmark_BKNA,
            jnp.asarray(k_KA)[None],
            jnp.asarray(v_KA)[None],
            table_BN,
            jnp.asarray([position], jnp.int32),
            jnp.asarray([True]),
        )
        yield np.asarray(pages_KPCE), np.asarray(landmark_BKNA[0])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_landmark_is_the_mean_in_token_order_rounded_once(dtype):
    rng = np.random.default_rng(0)
    # Sizes from 1e-3 to 1e5, so that another order, or rounding on the way, gives another sum.
    keys_TKA = rng.standard_normal((2 * C, K, A)) * 10.0 ** rng.integers(-3, 6, (2 * C, K, A))
    keys_TKA = keys_TKA.astype(jnp.dtype(dtype))
    *_, (_, landmark_KNA) = write_all(keys_TKA, keys_TKA, dtype)
    for page in range(2):
        stored_CKA = keys_TKA[page * C : (page + 1) * C].astype(np.float32)
        in_order_KA = sum_in_order(stored_CKA)
        assert (in_order_KA != sum_in_order(stored_CKA[::-1])).any(), 'the order does not matter for these keys'
        np.testing.assert_array_equal(landmark_KNA[:, page], (in_order_KA / C).astype(jnp.dtype(dtype)))
    assert np.isnan(landmark_KNA[:, 2]).all()


def test_a_landmark_is_made_when_its_page_fills_and_not_touched_again():
    rng = np.random.default_rng(1)
    keys_TKA, values_TKA = rng.standard_normal((2, 2 * C + 3, K, A)).astype(np.float32)
    made = []
    for position, (_, landmark_KNA) in enumerate(write_all(keys_TKA, values_TKA, 'float32')):
        made.append(landmark_KNA)
        filled = (position + 1) // C
        assert np.isfinite(landmark_KNA[:, :filled]).all()
        assert np.isnan(landmark_KNA[:, filled:]).all()
    np.testing.assert_array_equal(made[-1][:, 0], made[C - 1][:, 0])


def test_tokens_stand_where_the_table_says():
    rng = np.random.default_rng(2)
    keys_TKA, values_TKA = rng.standard_normal((2, C + 2, K, A)).astype(np.float32)
    *_, (pages_KPCE, _) = write_all(keys_TKA, values_TKA, 'float32')
    np.testing.assert_array_equal(pages_KPCE[:, 2, :, :A], keys_TKA[:C].swapaxes(0, 1))
    np.testing.assert_array_equal(pages_KPCE[:, 2, :, A:], values_TKA[:C].swapaxes(0, 1))
    np.testing.assert_array_equal(pages_KPCE[:, 3, :2, :A], keys_TKA[C:].swapaxes(0, 1))
    assert np.isnan(pages_KPCE[:, 3, 2:]).all()
    assert np.isnan(pages_KPCE[:, :2]).all()


@pytest.mark.parametrize('position', [0, C - 2, C - 1, N * C - 1, N * C])
def test_idle_sequences_write_nothing(position):
    """Not at a page's end, and not at a position beyond the cache, where a finished sequence may stand."""
    rng = np.random.default_rng(3)
    pages_KPCE = jnp.asarray(rng.standard_normal((K, 2 * N, C, 2 * A)), jnp.float32)
    landmark_BKNA = jnp.asarray(rng.standard_normal((2, K, N, A)), jnp.float32)
    table_BN = jnp.asarray(rng.permutation(2 * N).reshape(2, N), jnp.int32)
    token_BKA = jnp.ones((2, K, A), jnp.float32)
    position_B = jnp.full(2, position, jnp.int32)

    def update(write_B):
        return landmark_update(
            pages_KPCE, landmark_BKNA, token_BKA, token_BKA, table_BN, position_B, jnp.asarray(write_B)
        )

    after_KPCE, after_BKNA = update([False, False])
    np.testing.assert_array_equal(after_KPCE, pages_KPCE)
    np.testing.assert_array_equal(after_BKNA, landmark_BKNA)
    if position == N * C:
        return
    after_KPCE, after_BKNA = update([False, True])
    changed_P = (np.asarray(after_KPCE) != np.asarray(pages_KPCE)).any(axis=(0, 2, 3))
    assert np.flatnonzero(changed_P).tolist() == [table_BN[1, position // C]]
    np.testing.assert_array_equal(after_BKNA[0], landmark_BKNA[0])


def test_page_mean_runs_over_the_token_axis_of_any_batch():
    keys = np.random.default_rng(4).standard_normal((3, 2, C, A)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(page_mean)(keys), keys.astype(np.float64).mean(axis=-2), rtol=0, atol=1e-6)
