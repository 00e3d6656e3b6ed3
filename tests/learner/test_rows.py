"""Sequences into rows: nothing lost, nothing shifted, the same rows every time."""

import dataclasses

import numpy as np
import pytest

from sparrow_jax.learner.advantages import grpo
from sparrow_jax.learner.rows import Counts, RowLayout, Sample, empty_rows, micro_batches

D = 3


def make_sample(number, prompt, response, hidden=True):
    """A sample whose tokens, log-probs and hidden states all tell where they belong: token t of it is 1000 number +
    t.
    """
    ids = 1000 * number + np.arange(prompt + response)
    answer = ids[prompt:].astype(np.float32)
    return Sample(
        prompt_ids=ids[:prompt],
        response_ids=ids[prompt:],
        logp_actor=-answer,
        advantage=float(number),
        hidden=np.repeat(answer[:, None], D, axis=1) if hidden else None,
    )


def make_samples(lengths):
    return [make_sample(i + 1, prompt, response) for i, (prompt, response) in enumerate(lengths)]


def rows_of(batches):
    """Every row of every micro-batch as the sample numbers in it."""
    return [
        [int(row_T[segment_T == s][0]) // 1000 for s in range(1, segment_T.max() + 1)]
        for rows in batches
        for row_T, segment_T in zip(rows.token_BT, rows.segment_BT, strict=True)
    ]


def test_places_of_one_sequence_by_hand():
    """Prompt [5, 6, 7], response [8, 9, 2], row of 8 places: place 2, the prompt's last token, predicts 8."""
    sample = Sample(np.array([5, 6, 7]), np.array([8, 9, 2]), np.array([-0.1, -0.2, -0.3]), 1.5)
    (rows,) = micro_batches([sample], RowLayout(row_tokens=8, rows=2, packing=True))
    expected = {
        'token_BT': [5, 6, 7, 8, 9, 2, 0, 0],
        'position_BT': [0, 1, 2, 3, 4, 5, 0, 0],
        'segment_BT': [1, 1, 1, 1, 1, 1, 0, 0],
        'target_BT': [6, 7, 8, 9, 2, 0, 0, 0],
        'mask_BT': [0, 0, 1, 1, 1, 0, 0, 0],
        'logp_actor_BT': [0, 0, -0.1, -0.2, -0.3, 0, 0, 0],
        'advantage_BT': [0, 0, 1.5, 1.5, 1.5, 0, 0, 0],
        'first_BT': [0, 0, 1, 0, 0, 0, 0, 0],
        'learned_BT': [1, 1, 1, 1, 1, 1, 0, 0],
    }
    for name, row in expected.items():
        array_BT = getattr(rows, name)
        assert array_BT.shape == (2, 8)
        np.testing.assert_array_equal(array_BT[0], np.array(row, array_BT.dtype), err_msg=name)
        np.testing.assert_array_equal(array_BT[1], np.zeros(8), err_msg=f'{name} of a row of padding')
    assert rows.hidden_BTD.shape == (2, 8, 0)
    assert rows.counts == Counts(3, 1)


@pytest.mark.parametrize('layout', [RowLayout(32, 2, True), RowLayout(32, 3, False), RowLayout(1024, 1, False)])
def test_every_response_token_stands_once_at_the_place_that_predicts_it(layout):
    rng = np.random.default_rng(0)
    samples = make_samples(rng.integers(1, 15, (25, 2)))
    batches = micro_batches(samples, layout)
    targets = []
    for rows in batches:
        kept_BT = rows.mask_BT > 0
        target_N = rows.target_BT[kept_BT]
        targets += target_N.tolist()
        np.testing.assert_array_equal(rows.token_BT[kept_BT], target_N - 1)
        np.testing.assert_array_equal(rows.position_BT[kept_BT], target_N % 1000 - 1)
        np.testing.assert_array_equal(rows.logp_actor_BT[kept_BT], -target_N)
        np.testing.assert_array_equal(rows.advantage_BT[kept_BT], target_N // 1000)
        np.testing.assert_array_equal(rows.hidden_BTD[kept_BT], np.repeat(target_N[:, None], D, axis=1))
        first_N = rows.target_BT[rows.first_BT]
        np.testing.assert_array_equal(first_N, [samples[n // 1000 - 1].response_ids[0] for n in first_N])
        for array in (rows.logp_actor_BT, rows.advantage_BT, rows.hidden_BTD):
            assert not array[~kept_BT].any()
    assert sorted(targets) == sorted(np.concatenate([s.response_ids for s in samples]).tolist())
    assert sorted(n for row in rows_of(batches) for n in row) == list(range(1, 26))


@pytest.mark.parametrize('packing', [True, False])
def test_a_sequence_that_fills_its_row_keeps_its_end_token(packing):
    """An end token at exactly the longest length is a response token like any other."""
    (rows,) = micro_batches([make_sample(1, 3, 5)], RowLayout(8, 1, packing))
    np.testing.assert_array_equal(rows.mask_BT, [[0, 0, 1, 1, 1, 1, 1, 0]])
    assert rows.target_BT[0, 6] == 1007


def test_masks_come_from_lengths_where_the_end_token_is_the_padding_token():
    """Response [a, b, end] with end = padding = 0: 1, 1, 1, then padding. An end token inside a prompt masks
    nothing.
    """
    end = 0
    samples = [Sample(np.array([7, end, 7]), np.array([3, 4, end])), Sample(np.array([end, 8]), np.array([end]))]
    (rows,) = micro_batches(samples, RowLayout(8, 2, False))
    np.testing.assert_array_equal(rows.mask_BT, [[0, 0, 1, 1, 1, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(rows.target_BT[rows.mask_BT > 0], [3, 4, end, end])


@pytest.mark.parametrize(
    ('row_tokens', 'packing', 'buckets'),
    [
        (1024, True, (1024,)),
        (1024, False, (256, 512, 1024)),
        (768, False, (384, 768)),  # a half of 384 is no multiple of 128 any more
        (640, False, (640,)),
        (256, False, (256,)),
        (4096, False, (256, 512, 1024, 2048, 4096)),
    ],
)
def test_buckets(row_tokens, packing, buckets):
    layout = RowLayout(row_tokens, 2, packing)
    assert layout.buckets() == buckets
    # The tokens of a micro-batch are the same in every bucket.
    assert {length * layout.rows_of(length) for length in buckets} == {2 * row_tokens}


def test_each_sequence_goes_to_the_shortest_row_that_holds_it():
    totals = [256, 257, 512, 513, 1024, 2]
    batches = micro_batches(make_samples([(1, total - 1) for total in totals]), RowLayout(1024, 1, False))
    inside = {rows.token_BT.shape[1]: sorted(n for row in rows_of([rows]) for n in row) for rows in batches}
    assert [rows.token_BT.shape for rows in batches] == [(4, 256), (2, 512), (1, 1024), (1, 1024)]
    assert inside[256] == [1, 6]
    assert inside[512] == [2, 3]
    assert rows_of(batches[2:]) == [[5], [4]]  # longest first


def test_first_fit_by_falling_length():
    """5 | 4 | 3 beside the 5 | 3 beside the 4 | 2 in a new row, and two rows a micro-batch."""
    samples = make_samples([(1, 1), (1, 2), (1, 4), (1, 2), (1, 3)])
    batches = micro_batches(samples, RowLayout(8, 2, True))
    assert rows_of(batches) == [[3, 2], [5, 4], [1], []]
    np.testing.assert_array_equal(batches[0].segment_BT[1], [1, 1, 1, 1, 2, 2, 2, 0])
    np.testing.assert_array_equal(batches[0].position_BT[1], [0, 1, 2, 3, 0, 1, 2, 0])


def test_rows_are_a_function_of_the_lengths():
    lengths = np.random.default_rng(1).integers(1, 12, (40, 2))
    layout = RowLayout(32, 4, True)
    first = micro_batches(make_samples(lengths), layout)
    again = micro_batches(
        [dataclasses.replace(s, logp_actor=None, advantage=-1.0, hidden=None) for s in make_samples(lengths)], layout
    )
    assert rows_of(first) == rows_of(again)
    # First fit by falling length needs at most 11/9 of the best possible rows, plus one.
    assert len(rows_of(first)) <= 11 / 9 * -(-lengths.sum() // 32) + 1 + layout.rows


def test_groups_survive_micro_batching():
    """4 samples of a prompt in micro-batches of 2 rows, rewards [1, 0, 0, 0]: 1.5 and -.5 stand in the rows; normalized
    within a micro-batch they would read .707, -.707 and 0, 0."""
    advantages = np.asarray(grpo(np.array([[1.0, 0.0, 0.0, 0.0]], np.float32)))[0]
    samples = [
        dataclasses.replace(s, advantage=float(a)) for s, a in zip(make_samples([(3, 4)] * 4), advantages, strict=True)
    ]
    batches = micro_batches(samples, RowLayout(8, 2, False))
    assert len(batches) == 2
    pairs = [pair for rows in batches for pair in zip(rows.advantage_BT, rows.mask_BT, strict=True)]
    seen = [sorted(set(advantage_T[mask_T > 0])) for advantage_T, mask_T in pairs]
    np.testing.assert_allclose(seen, [[1.5], [-0.5], [-0.5], [-0.5]], rtol=1e-5)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match='a sequence of 9 tokens does not fit a row of 8'):
        micro_batches(make_samples([(2, 2), (4, 5)]), RowLayout(8, 2, True))
    with pytest.raises(ValueError, match='without a prompt'):
        micro_batches([Sample(np.array([], int), np.array([3, 4]))], RowLayout(8, 2, True))


@pytest.mark.parametrize('records_pages', [False, True])
def test_no_samples_give_no_rows_and_padding_has_the_shape_of_real_rows(records_pages):
    layout = RowLayout(512, 2, False)
    assert micro_batches([], layout) == []
    pages = np.asarray([0, 4, 5], np.int32) if records_pages else None
    (real,) = micro_batches([dataclasses.replace(make_sample(1, 2, 3), pages_read=pages)], layout)
    padding = empty_rows(layout, 256, D, np.float32, records_pages)
    for field in dataclasses.fields(real):
        a, b = getattr(real, field.name), getattr(padding, field.name)
        if field.name == 'pages_read_BT' and not records_pages:
            assert a is b is None
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype), field.name
        assert not b.any()


def test_pages_stand_where_their_token_is_predicted():
    pages = np.asarray([0, 4, 5], np.int32)
    (rows,) = micro_batches([dataclasses.replace(make_sample(1, 2, 3), pages_read=pages)], RowLayout(8, 1, False))
    assert rows.pages_read_BT.tolist() == [[0, 0, 4, 5, 0, 0, 0, 0]]
    assert rows.mask_BT.tolist() == [[0, 1, 1, 1, 0, 0, 0, 0]]
