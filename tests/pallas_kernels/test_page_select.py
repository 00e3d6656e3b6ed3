"""Which pages are chosen: reserved ones whatever their score, ties, budgets around the number of pages, sinks."""

import jax.numpy as jnp
import jitted_operations
import numpy as np
import numpy_reference
import pytest

from pallas_kernels.random_cache import random_pool

K, GROUP, A, C, N = 2, 2, 16, 8, 10


def select(q_BHA, landmark_BKNA, lengths, budgets, table_BN=None, *, max_pages=N, reserved_first=1, reserved_last=1):
    ids_BKM, count_B = jitted_operations.page_select(
        jnp.asarray(q_BHA, jnp.float32),
        jnp.asarray(landmark_BKNA, jnp.float32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(budgets, jnp.int32),
        table_BN,
        page_tokens=C,
        max_pages=max_pages,
        reserved_first=reserved_first,
        reserved_last=reserved_last,
    )
    return np.asarray(ids_BKM), np.asarray(count_B)


def select_by_score(score_N, budget, **options):
    """Chosen pages of a full sequence whose pages score as given."""
    pages = len(score_N)
    q_1HA = np.zeros((1, 1, A), np.float32)
    q_1HA[0, 0, 0] = 1
    landmark_BKNA = np.zeros((1, 1, pages, A), np.float32)
    landmark_BKNA[0, 0, :, 0] = score_N
    ids_BKM, count_B = select(q_1HA, landmark_BKNA, [pages * C], [budget], max_pages=pages, **options)
    return ids_BKM[0, 0, : count_B[0]].tolist()


@pytest.fixture(scope='module')
def cache():
    """q_BHA, pages, table, landmarks of four full sequences; made by hand, without the operations under test."""
    rng = np.random.default_rng(3)
    pages_KPCE, table_BN = random_pool(
        rng, kv_heads=K, head_dim=A, page_tokens=C, pages=N, lengths=[N * C] * 4, dtype='float32', free=0.0
    )
    landmark_BKNA = pages_KPCE[:, table_BN, :, :A].mean(axis=-2).swapaxes(0, 1)
    q_BHA = rng.standard_normal((4, K * GROUP, A)).astype(np.float32)
    return q_BHA, pages_KPCE, table_BN, landmark_BKNA


def attend_chosen(cache, lengths, budgets, **options):
    q_BHA, pages_KPCE, table_BN, landmark_BKNA = cache
    ids_BKM, count_B = select(q_BHA, landmark_BKNA, lengths, budgets, **options)
    return np.asarray(
        jitted_operations.sparse_decode(q_BHA, pages_KPCE, table_BN, ids_BKM, count_B, jnp.asarray(lengths, jnp.int32))
    )


def attend_all(cache, lengths):
    q_BHA, pages_KPCE, table_BN, _ = cache
    return np.asarray(
        jitted_operations.dense_decode(q_BHA[:, None], pages_KPCE, table_BN, jnp.asarray(lengths, jnp.int32))
    )[:, 0]


def test_reserved_pages_are_read_at_the_worst_score_and_at_budget_zero():
    score_N = [-9.0, 5, 4, 3, 2, -9, -9]
    assert select_by_score(score_N, 0, reserved_first=1, reserved_last=2) == [0, 5, 6]
    assert select_by_score(score_N, 2, reserved_first=1, reserved_last=2) == [0, 1, 2, 5, 6]
    # What is not reserved has to earn its place.
    assert select_by_score(score_N, 2, reserved_first=0, reserved_last=1) == [1, 2, 6]


def test_equal_scores_choose_the_lower_page():
    assert select_by_score([0.0, 1, 2, 1, 2, 1, 2, 0], 2) == [0, 2, 4, 7]
    assert select_by_score([0.0, 1, 2, 1, 2, 1, 2, 0], 4) == [0, 1, 2, 4, 6, 7]
    assert select_by_score([7.0] * 8, 3) == [0, 1, 2, 3, 7]


def test_zero_and_minus_zero_are_equal_scores():
    score_N = np.asarray([0.0, -0.0, 0.0, -0.0, 0.0, -1, 0])
    # With heads of one number nothing is added up, so that the sign of zero reaches the score.
    ids_BKM, count_B = select(np.ones((1, 1, 1)), score_N[None, None, :, None], [7 * C], [2], max_pages=7)
    # Sorting in total order would put pages 2 and 4 before 1 and 3.
    assert ids_BKM[0, 0, : count_B[0]].tolist() == [0, 1, 2, 6]


def test_the_groups_mean_query_counts_not_the_loudest_head():
    q_BHA = np.zeros((1, 2, A), np.float32)
    q_BHA[0, 0, :2] = [1, 0]
    q_BHA[0, 1, :2] = [0, 3]
    landmark_BKNA = np.zeros((1, 1, 5, A), np.float32)
    landmark_BKNA[0, 0, 1, :2] = [4, 0]  # 4 for the first head, mean 2
    landmark_BKNA[0, 0, 2, :2] = [3, 0.5]  # 3 and 1.5, mean 2.25
    landmark_BKNA[0, 0, 3, :2] = [-3, 2]  # -3 and 6, mean 1.5
    ids_BKM, count_B = select(q_BHA, landmark_BKNA, [5 * C], [1], max_pages=5)
    assert ids_BKM[0, 0, : count_B[0]].tolist() == [0, 2, 4]


def test_each_sequence_has_its_own_budget(cache):
    q_BHA, _, _, landmark_BKNA = cache
    ids_BKM, count_B = select(q_BHA, landmark_BKNA, [80, 80, 73, 9], [0, 3, 100, 5])
    assert count_B.tolist() == [2, 5, 10, 2]
    for ids_KM, count in zip(ids_BKM, count_B, strict=True):
        assert (ids_KM[:, :count] < N).all()
        assert (ids_KM[:, count:] == N).all()


def test_a_budget_of_all_pages_equals_dense_attention(cache):
    """Lengths of budget - 1, budget and budget + 1 pages: the reserved pages come on top, so all three are covered."""
    budget = 6
    lengths = [(budget - 1) * C, budget * C, (budget + 1) * C, budget * C + 3]
    np.testing.assert_allclose(
        attend_chosen(cache, lengths, [budget] * 4), attend_all(cache, lengths), rtol=0, atol=1e-6
    )


def test_budget_and_reserved_pages_end_where_dense_attention_ends(cache):
    """One token beyond the last page that the budget covers, and a page is left out; not before."""
    budget, reserved = 4, 2
    edge = (budget + reserved) * C
    lengths = [edge - 1, edge, edge + 1, edge + C]
    o_BHA, dense_BHA = attend_chosen(cache, lengths, [budget] * 4), attend_all(cache, lengths)
    np.testing.assert_allclose(o_BHA[:2], dense_BHA[:2], rtol=0, atol=1e-6)
    assert (np.abs(o_BHA[2:] - dense_BHA[2:]).max(axis=(1, 2)) > 0.01).all()


def test_a_sink_at_position_0_is_always_read(cache):
    """One key that gets nearly all the weight, in a page whose landmark scores last."""
    q_BHA, pages_KPCE, table_BN, _ = cache
    q_BHA = np.abs(q_BHA)  # so that a key of ones is large for every head and a key of minus ones small
    pages_KPCE = pages_KPCE.copy()
    first_B = table_BN[:, 0]
    pages_KPCE[:, first_B, :, :A] = -20
    pages_KPCE[:, first_B, 0, :A] = 20
    landmark_BKNA = pages_KPCE[:, table_BN, :, :A].mean(axis=-2).swapaxes(0, 1)
    planted = q_BHA, pages_KPCE, table_BN, landmark_BKNA
    lengths = [N * C] * 4
    dense_BHA = attend_all(planted, lengths)
    sink_BHA = pages_KPCE[:, first_B, 0, A:].swapaxes(0, 1).repeat(GROUP, axis=1)
    np.testing.assert_allclose(dense_BHA, sink_BHA, rtol=0, atol=1e-3)
    np.testing.assert_allclose(attend_chosen(planted, lengths, [2] * 4), dense_BHA, rtol=0, atol=1e-3)
    without_BHA = attend_chosen(planted, lengths, [2] * 4, reserved_first=0)
    assert (np.abs(without_BHA - dense_BHA).max(axis=-1) > 0.1).all()


def test_chosen_pages_carry_more_weight_than_the_others(cache):
    """Landmarks are there for this; a selection by anything unrelated to q . k would not pass."""
    q_BHA, pages_KPCE, table_BN, landmark_BKNA = cache
    ids_BKM, _ = select(q_BHA, landmark_BKNA, [N * C] * 4, [3] * 4)
    inside, outside = [], []
    for b in range(4):
        for k in range(K):
            keys_SA, _ = numpy_reference.cached_tokens(pages_KPCE, table_BN[b], k, range(N * C))
            score_NC = (keys_SA @ q_BHA[b].reshape(K, GROUP, A)[k].mean(axis=0)).reshape(N, C)
            chosen = set(ids_BKM[b, k].tolist()) - {0, N - 1}
            inside += [score_NC[n].mean() for n in range(1, N - 1) if n in chosen]
            outside += [score_NC[n].mean() for n in range(1, N - 1) if n not in chosen]
    assert np.mean(inside) > np.mean(outside) + 0.5


def test_physical_ids_read_the_same_pages(cache):
    """Through the table or past it: the same bits; entries beyond the count name page 0."""
    q_BHA, pages_KPCE, table_BN, landmark_BKNA = cache
    lengths, budgets = [N * C, N * C - 3, 2 * C + 1, 5], [2, 3, 1, 4]
    logical_BKM, count_B = select(q_BHA, landmark_BKNA, lengths, budgets)
    physical_BKM, same_count_B = select(q_BHA, landmark_BKNA, lengths, budgets, jnp.asarray(table_BN))
    np.testing.assert_array_equal(count_B, same_count_B)
    for b, count in enumerate(np.asarray(count_B)):
        np.testing.assert_array_equal(physical_BKM[b, :, :count], table_BN[b][logical_BKM[b, :, :count]])
        assert not np.asarray(physical_BKM)[b, :, count:].any()
    length_B = jnp.asarray(lengths, jnp.int32)
    np.testing.assert_array_equal(
        jitted_operations.sparse_decode(q_BHA, pages_KPCE, None, physical_BKM, count_B, length_B),
        jitted_operations.sparse_decode(q_BHA, pages_KPCE, table_BN, logical_BKM, count_B, length_B),
    )


def test_physical_ids_of_an_empty_sequence_give_zeros(cache):
    q_BHA, pages_KPCE, _, _ = cache
    ids_BKM = jnp.ones((4, K, 2), jnp.int32)
    o_BHA = jitted_operations.sparse_decode(
        q_BHA, pages_KPCE, None, ids_BKM, jnp.ones(4, jnp.int32), jnp.zeros(4, jnp.int32)
    )
    np.testing.assert_array_equal(o_BHA, 0)
