"""Guards: what makes them act, and that they remember it."""

import dataclasses
import json

import pytest

from sparrow_jax.config import GuardConfig
from sparrow_jax.guards import History, judge

CONFIG = GuardConfig('stop', window_steps=3, least_p05=0.5, least_length_share=0.5, least_entropy_share=0.2)


def metrics(p05=0.9, length=100.0, entropy=1.0):
    return {'sparse/alpha_p05': p05, 'response_length/mean': length, 'actor/entropy': entropy}


def reasons(rows, config=CONFIG, history=None):
    history = history or History()
    return [judge(config, history, row) for row in rows]


def test_nothing_happens_while_all_is_well():
    assert reasons([metrics(length=100 + i % 7, entropy=1 - i / 50) for i in range(30)]) == [None] * 30


def test_a_mean_over_the_window_counts_not_one_step():
    assert reasons([metrics(0.9), metrics(0.1), metrics(0.9), metrics(0.9)]) == [None] * 4
    *before, last = reasons([metrics(0.6), metrics(0.5), metrics(0.3)])
    assert before == [None, None]
    assert last == 'p05 of alpha is 0.467 over 3 steps, below guard.least_p05=0.5'


def test_shrinking_answers_and_entropy_are_judged_against_their_best():
    rows = [metrics(length=n) for n in (100, 200, 300, 150, 90, 50)]
    assert [bool(reason) for reason in reasons(rows)] == [False] * 5 + [True]
    assert reasons(rows)[-1].startswith('response_length/mean has fallen from 217 to 96.7 over 3 steps')
    rows = [metrics(entropy=e) for e in (1.0, 1.0, 1.0, 0.1, 0.1, 0.1)]
    assert 'actor/entropy has fallen from 1 to 0.1' in reasons(rows)[-1]


def test_after_acting_a_whole_window_passes():
    rows = [metrics(0.1)] * 7
    assert [bool(reason) for reason in reasons(rows)] == [False, False, True, False, False, True, False]


def test_the_worst_bin_of_the_probes_counts_by_itself():
    row = {'sparse/probe_p05/bin_0_64': 0.9, 'sparse/probe_p05/bin_64_128': 0.2, 'sparse/alpha_p05': 0.8}
    assert "in the probes' worst length bin is 0.200 over 3 steps" in reasons([row] * 3)[-1]
    assert reasons([row | {'sparse/probe_p05/bin_64_128': 0.6}] * 3)[-1] is None
    nothing = dict.fromkeys(row, float('nan'))
    assert reasons([nothing] * 3 + [row] * 2) == [None] * 5


def test_what_is_not_watched_never_acts():
    config = dataclasses.replace(CONFIG, least_p05=0.0, least_length_share=0.0, least_entropy_share=0.0)
    rows = [metrics()] * 3 + [metrics(0.0, 0.0, 0.0)] * 6
    assert reasons(rows, config) == [None] * 9


@pytest.mark.parametrize('cut', range(1, 7))
def test_a_history_from_a_checkpoint_acts_in_the_same_step(cut):
    rows = [metrics(length=n) for n in (100, 200, 300, 150, 90, 50, 40)]
    history = History()
    first = reasons(rows[:cut], history=history)
    again = History(**json.loads(json.dumps(dataclasses.asdict(history))))
    assert first + reasons(rows[cut:], history=again) == reasons(rows)
