"""The numbers of a step on rows and responses made by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.learner.learner import Scores
from sparrow_jax.learner.rows import RowLayout, Sample, micro_batches
from sparrow_jax.measures import (
    answer_rows,
    entropy_metric,
    length_metrics,
    mismatch_metrics,
    pass_at_k,
    read_metrics,
    reward_metrics,
)
from sparrow_jax.rollout.engine import Response
from sparrow_jax.sparsity.schedules import Schedule
from sparrow_jax.tasks.problems import Problem
from sparrow_jax.tasks.verifiers import Score

NAN = np.nan


def make_response(tokens, pages_read=None, finish_reason='stop'):
    pages_read = [0] * tokens if pages_read is None else pages_read
    return Response(np.arange(tokens), np.zeros(tokens), np.asarray(pages_read), None, finish_reason)


def make_scored(alpha_BT, entropy_BT):
    """One micro-batch of two packed rows of 8 places, scored; NaN stands wherever a number must not be used.

    Row 0: prompt of 5 and response of 2 (places 4, 5).
    Row 1: prompt of 2 and response of 3 (places 1, 2, 3), prompt of 1 and response of 2 (places 5, 6).
    """
    samples = [Sample(np.arange(p), np.arange(r), np.zeros(r), 0.0) for p, r in ((5, 2), (2, 3), (1, 2))]
    (rows,) = micro_batches(samples, RowLayout(8, 2, True))
    np.testing.assert_array_equal(rows.mask_BT, [[0, 0, 0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 1, 1, 0]])
    alpha_BT, entropy_BT = jnp.asarray(alpha_BT, jnp.float32), jnp.asarray(entropy_BT, jnp.float32)
    return [(rows, Scores(jnp.full((2, 8), NAN), entropy_BT, alpha_BT, alpha_BT / 2))]


def test_mismatch_leaves_out_first_tokens_and_counts_cached_tokens():
    """Kept places: row 0's 5 (6 cached tokens), row 1's 2, 3 (3 and 4) and 6 (2 of the second sequence)."""
    alpha_BT = [[NAN, NAN, NAN, NAN, NAN, 0.9, NAN, NAN], [NAN, NAN, 0.8, 0.6, NAN, NAN, 0.7, NAN]]
    metrics, tail = mismatch_metrics(make_scored(alpha_BT, np.zeros((2, 8))), bin_width_tokens=3, min_count=1)
    expected = {
        'sparse/alpha_p05': 0.6,
        'sparse/alpha_p01': 0.6,
        'sparse/alpha_p05_top20': 0.3,
        'sparse/alpha_mean': 0.75,
        'sparse/bins_below_min_count': 0.0,
        'sparse/alpha_p05/bin_0_3': 0.7,
        'sparse/alpha_p05/bin_3_6': 0.6,
        'sparse/alpha_p05/bin_6_9': 0.9,
    }
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert tail.tokens == 4
    metrics, _ = mismatch_metrics(make_scored(alpha_BT, np.zeros((2, 8))), bin_width_tokens=3, min_count=2)
    assert metrics['sparse/bins_below_min_count'] == 2
    assert [name for name in metrics if 'bin_' in name] == ['sparse/alpha_p05/bin_3_6']


def test_mismatch_of_responses_of_one_token_is_nan_not_an_error():
    """Every first token is the dense prefill's: nothing of the sparse sampler was measured."""
    (rows,) = micro_batches([Sample(np.arange(3), np.arange(1), np.zeros(1), 0.0)], RowLayout(8, 1, True))
    ones_BT = jnp.ones((1, 8))
    metrics, tail = mismatch_metrics([(rows, Scores(ones_BT, ones_BT, ones_BT, ones_BT))], 8, 1)
    assert tail.tokens == 0
    assert np.isnan(metrics['sparse/alpha_p05'])
    assert np.isnan(metrics['sparse/alpha_p05_top20'])


def test_entropy_is_the_mean_over_response_tokens_of_all_micro_batches():
    entropy_BT = [[9, 9, 9, 9, 1, 2, 9, 9], [9, 3, 4, 5, 9, 6, 7, 9]]
    scored = make_scored(np.zeros((2, 8)), entropy_BT) + make_scored(np.zeros((2, 8)), np.full((2, 8), 1.0))
    assert entropy_metric(scored) == pytest.approx({'actor/entropy': (28 + 7) / 14})
    assert entropy_metric([]) == {'actor/entropy': 0.0}


def test_reads_follow_the_recorded_pages():
    """Pages of 4, one dense and one sparse layer, one reserved page at each end; the prefill's first token is left out.

    Prompt 4, response 3: cached 5 and 6 tokens, 2 + 2 pages, read 2 + 2, landmarks of 1 + 1 full pages.
    Prompt 11, response 2: cached 12 tokens, 3 pages, read 2, landmarks of 3. A page is 8 rows:
    sparse layer 6 + 5 / 8 of 7 pages; fraction (7 + 6.625) / 14. Budget beyond the reserved: 0, 0, 0.
    """
    schedule = Schedule('fixed', 4, 100, 1, 1, (0,), (1,))
    responses = [make_response(3, [0, 2, 2]), make_response(2, [0, 2])]
    metrics = read_metrics(schedule, 2, [4, 11], responses)
    assert metrics == pytest.approx(
        {'sparse/kv_read_fraction': 13.625 / 14, 'sparse/pages_read/mean': 2.0, 'sparse/budget_pages/mean': 0.0}
    )
    metrics = read_metrics(schedule, 2, [4, 11], [make_response(3, [0, 1, 2]), make_response(2, [0, 3])])
    assert metrics['sparse/budget_pages/mean'] == pytest.approx(1 / 3)  # 1 - 2 reserved counts as 0, then 0 and 1
    only_first = read_metrics(schedule, 2, [4], [make_response(1)])
    assert all(np.isnan(value) for value in only_first.values())


def test_lengths_and_the_recorded_finish_reason():
    """An end token at exactly the longest length is "stop": clipping is recorded, not read off the length."""
    responses = [make_response(8, finish_reason='stop'), make_response(8, finish_reason='length'), make_response(2)]
    assert length_metrics([3, 3, 6], responses) == pytest.approx(
        {
            'prompt_length/mean': 4.0,
            'response_length/mean': 6.0,
            'response_length/max': 8.0,
            'response_length/min': 2.0,
            'response_length/clip_ratio': 1 / 3,
        }
    )


def test_an_answer_is_a_row_of_a_samples_file():
    problem = Problem(0, '2 + 2 = ?', '4', 'sums', {})
    score, response = Score(1.5, 1.0, True, False, '4'), make_response(3, finish_reason='length')
    assert answer_rows(['<user>2 + 2 = ?'], [problem], ['It is 4'], [score], [response]) == [
        {
            'prompt': '<user>2 + 2 = ?',
            'completion': 'It is 4',
            'answer': '4',
            'reward': 1.5,
            'finish_reason': 'length',
            'tokens': 3,
        }
    ]
    with pytest.raises(ValueError, match='zip'):
        answer_rows(['a', 'b'], [problem], ['It is 4'], [score], [response])


def test_rewards():
    scores = [
        Score(1.5, 1.0, True, False, '4'),
        Score(0.5, 0.0, True, False, '5'),
        Score(0.0, 0.0, False, True, None),
        Score(0.0, 0.0, False, False, None),
    ]
    assert reward_metrics(scores) == {
        'critic/score/mean': 0.5,
        'critic/score/max': 1.5,
        'critic/score/min': 0.0,
        'reward/correct': 0.25,
        'reward/format_valid': 0.5,
        'reward/timed_out': 1.0,
    }


@pytest.mark.parametrize(
    ('correct', 'samples', 'k', 'expected'),
    [
        (0, 4, 2, 0.0),
        (1, 4, 1, 0.25),
        (1, 4, 2, 0.5),  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
        (2, 4, 2, 5 / 6),  # 1 - C(2, 2) / C(4, 2)
        (3, 4, 2, 1.0),  # only one wrong answer: any two hold a correct one
        (2, 10, 3, 8 / 15),  # 1 - C(8, 3) / C(10, 3) = 1 - 56 / 120
        (4, 4, 4, 1.0),
        (0, 4, 4, 0.0),
        (1, 4, 4, 1.0),
    ],
)
def test_pass_at_k(correct, samples, k, expected):
    assert pass_at_k(correct, samples, k) == pytest.approx(expected, abs=1e-12)
