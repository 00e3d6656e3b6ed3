"""Which answers are learned from, and what their length costs."""

import numpy as np

from sparrow_jax.answers import Answers, choose_prompts, has_signal, overlong_penalty
from sparrow_jax.config import RewardConfig


def test_length_costs_nothing_then_more_and_more():
    """Limit 100, buffer 20: from 80 tokens on a twentieth a token (DAPO, eq. 13, with the sign of a cost)."""
    tokens = np.array([1, 80, 81, 90, 100])
    np.testing.assert_allclose(overlong_penalty(tokens, np.full(5, 100), 20), [0, 0, 0.05, 0.5, 1])
    np.testing.assert_array_equal(overlong_penalty(tokens, np.full(5, 100), 0), np.zeros(5))


SCORE_PR = np.array([[1, 1], [0, 1], [0, 0], [1, 0], [0.1, 0.2]], np.float32)


def test_prompts_with_signal_are_chosen_first():
    np.testing.assert_array_equal(has_signal(SCORE_PR), [False, True, False, True, True])
    assert choose_prompts(SCORE_PR, 2) == [1, 3]
    assert choose_prompts(SCORE_PR, 3) == [1, 3, 4]
    assert choose_prompts(SCORE_PR, 4) == [0, 1, 3, 4]  # topped up with the first without
    assert choose_prompts(SCORE_PR, 5) == [0, 1, 2, 3, 4]


class Scored:
    def __init__(self, reward):
        self.reward = reward


class Sized:
    """Stands for a response or a request."""

    limit_tokens = 10

    def __init__(self, tokens):
        self.tokens = range(tokens)


def test_answers_of_prompts_stay_together():
    names = ['a0', 'a1', 'b0', 'b1']
    sizes = [Sized(n) for n in (5, 9, 10, 1)]
    first = Answers(names, sizes, sizes, names, [Scored(r) for r in (0, 1, 0, 0)], 2)
    both = first + Answers(['c0', 'c1'], sizes[:2], sizes[:2], ['c0', 'c1'], [Scored(1), Scored(1)], 2)
    np.testing.assert_array_equal(both.scores_PR(), [[0, 1], [0, 0], [1, 1]])
    kept = both.of_prompts([2, 0])
    assert kept.completions == ['c0', 'c1', 'a0', 'a1']
    np.testing.assert_array_equal(kept.scores_PR(), [[1, 1], [0, 1]])
    config = RewardConfig('', 0.5, 0.0, 1, 1.0, overlong_buffer_tokens=4, overlong_penalty=2.0)
    np.testing.assert_allclose(first.penalties_PR(config), [[0, 1.5], [2, 0]])
