"""Schedules: what is published loads, budgets switch at bin edges, and what does not fit is refused by name."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.config import ConfigError, RolloutConfig, ScheduleConfig
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule, budget_for_length, load_schedule, to_file

ROLLOUT = RolloutConfig(
    prompts_per_step=1,
    samples_per_prompt=1,
    extra_batches=0,
    slots=1,
    max_prompt_tokens=2048,
    max_response_tokens=30_000,
    page_tokens=16,
    pool_pages=0,
    temperature=1.0,
    segment_steps=1,
    prefill_rows=1,
    halvings=0,
    kernels='auto',
)
WHOLE_NUMBERS = ('bin_width_tokens', 'reserved_first_pages', 'reserved_last_pages')
FIXED = ScheduleConfig(
    'fixed',
    'fixed',
    64,
    '',
    0.86,
    '',
    reserved_first_pages=1,
    reserved_last_pages=2,
    dense_layers=(0, 1),
    policy='block_mean',
)
LAYERS = 28
PUBLISHED = {
    'qwen3-1.7b': (0.75, 0.8, 0.83, 0.86, 0.88, 0.9, 0.92, 0.94),
    'qwen3-4b': (0.75, 0.8, 0.86, 0.88, 0.9, 0.92),
    'qwen3-8b': (0.75, 0.8, 0.86, 0.87, 0.92),
    'qwen3-14b': (0.86,),
}
GOOD_FILE = {
    'about': 'fields that a schedule does not have are kept out',
    'page_tokens': 16,
    'bin_width_tokens': 1000,
    'reserved_first_pages': 1,
    'reserved_last_pages': 2,
    'dense_layers': [0],
    'budget_pages': [10, 20, 30],
    'policy': 'block_mean',
}


def load(rollout=ROLLOUT, layers=LAYERS, **changes):
    return load_schedule(dataclasses.replace(FIXED, **changes), rollout, layers)


def load_file(tmp_path, content):
    path = tmp_path / 'schedule.json'
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return load(kind='file', path=str(path))


@pytest.mark.parametrize(('model', 'target'), [(m, t) for m, targets in PUBLISHED.items() for t in targets])
def test_every_published_schedule_loads(model, target):
    schedule = load(kind='published', model=model, target_p05=target)
    assert dataclasses.replace(schedule, budget_pages=()) == Schedule('published', 16, 2000, 1, 2, (0, 1), ())
    assert len(schedule.budget_pages) == 20
    assert list(schedule.budget_pages) == sorted(schedule.budget_pages), 'longer contexts never get fewer pages'
    # Budget and reserved pages are chosen in whole sixteens; the one misprint is kept as published.
    odd = [budget for budget in schedule.budget_pages if (budget + 3) % 16]
    assert odd == ([385] if (model, target) == ('qwen3-8b', 0.86) else [])


def test_a_published_schedule_as_printed():
    schedule = load(kind='published', model='qwen3-4b', target_p05=0.86)
    expected = (29, 45, 61, 77, 93, 125, 157, 221, 253, 253, 317, 317, 317, 317, 381, 381, 381, 381, 509, 509)
    assert schedule.budget_pages == expected


def test_fixed_and_dense():
    assert load() == Schedule('fixed', 16, 32_048, 1, 2, (0, 1), (64,))
    dense = load(kind='dense', budget_pages=0)
    assert dense.budget_pages == (EVERY_PAGE,)
    assert dense.most_pages(ROLLOUT.pages_per_sequence) == ROLLOUT.pages_per_sequence == 2008


@pytest.mark.parametrize('kind', ['fixed', 'dense', 'published', 'file', 'adaptive'])
def test_every_kind_of_schedule_has_the_policy_of_the_configuration(tmp_path, kind):
    for policy in ('block_mean', 'quest'):
        (tmp_path / 's.json').write_text(json.dumps(GOOD_FILE | {'policy': policy}))
        changes = {'kind': kind, 'model': 'qwen3-4b', 'path': str(tmp_path / 's.json'), 'policy': policy}
        assert load(**changes).policy is SelectionPolicy(policy)


@pytest.mark.parametrize(
    ('policy', 'message'),
    [
        ('quest', r"schedule\.policy='block_mean': the budgets of .*s\.json were found with 'quest'; set it to that"),
        ('best', r"s\.json: policy='best' must be one of block_mean, quest, group_softmax"),
        (None, r's\.json: field policy is missing; it says how the budgets were found: block_mean'),
    ],
)
def test_a_file_of_another_policy_is_refused(tmp_path, policy, message):
    (tmp_path / 's.json').write_text(json.dumps(GOOD_FILE | {'policy': policy}))
    with pytest.raises(ConfigError, match=message):
        load(kind='file', path=str(tmp_path / 's.json'))


def test_a_schedule_comes_back_from_its_file(tmp_path):
    schedule = dataclasses.replace(load_file(tmp_path, GOOD_FILE), policy=SelectionPolicy.QUEST)
    (tmp_path / 's.json').write_text(json.dumps(to_file(schedule)))
    assert load(kind='file', path=str(tmp_path / 's.json'), policy='quest') == schedule


def test_file(tmp_path):
    assert load_file(tmp_path, GOOD_FILE) == Schedule('file', 16, 1000, 1, 2, (0,), (10, 20, 30))


def test_budgets_switch_at_bin_edges():
    schedule = Schedule('file', 16, 1000, 1, 2, (), (10, 20, 30))
    length_B = jnp.array([0, 1, 999, 1000, 1999, 2000, 2999, 3000, 1_000_000])
    budget_B = budget_for_length(schedule.budgets(), length_B, schedule.bin_width_tokens)
    np.testing.assert_array_equal(budget_B, [10, 10, 10, 20, 20, 30, 30, 30, 30])
    assert budget_B.dtype == jnp.int32


def test_an_adaptive_schedule_may_come_to_read_every_page_or_its_limit():
    schedule = Schedule('adaptive', 16, 1000, 1, 2, (), (10, 20, 30))
    found = [schedule.most_pages(100, most_budget) for most_budget in (0, 40, 97, 98)]
    assert found == [100, 43, 100, 100]


@pytest.mark.parametrize(
    ('pages_per_sequence', 'most'),
    [
        (5, 5),  # fewer pages than budget and reserved ones
        (62, 13),  # 992 tokens: the first bin alone
        (63, 23),  # 1008 tokens reach the second
        (125, 23),  # 2000 tokens: the 2000th token of a sequence is never cached, so the third bin is not reached
        (126, 33),
        (5000, 33),
    ],
)
def test_most_pages_covers_every_reachable_bin(pages_per_sequence, most):
    schedule = Schedule('file', 16, 1000, 1, 2, (), (10, 20, 30))
    assert schedule.most_pages(pages_per_sequence) == most
    length_N = np.arange(80_000)
    budget_N = np.asarray(budget_for_length(schedule.budgets(), jnp.asarray(length_N), 1000))
    pages_N = np.minimum(budget_N + schedule.reserved_pages, -(-length_N // 16))
    assert pages_N[: 16 * pages_per_sequence].max() <= most


def test_most_pages_where_a_middle_bin_has_the_largest_budget():
    assert Schedule('file', 16, 1000, 1, 2, (), (10, 40, 30)).most_pages(5000) == 43


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'kind': 'published', 'model': 'qwen2'}, "schedule.model='qwen2': published schedules exist for qwen3-1.7b"),
        (
            {'kind': 'published', 'model': 'qwen3-8b', 'target_p05': 0.9},
            'schedule.target_p05=0.9: qwen3-8b has 0.75, 0.8, 0.86, 0.87, 0.92',
        ),
        ({'kind': 'file', 'path': '/no/such.json'}, 'schedule.path=/no/such.json: no such file'),
        ({'kind': 'file', 'path': '/'}, 'schedule.path=/: no such file'),
        ({'dense_layers': (0, 28)}, 'schedule.dense_layers=(0, 28): the model has 28 layers, there is no layer 28'),
        ({'reserved_first_pages': 0}, "schedule.kind='fixed': reserved_first_pages=0 must be an integer of at least 1"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(**changes)


def test_a_published_dense_layer_beyond_the_model_is_refused():
    with pytest.raises(ConfigError, match='there is no layer 1'):
        load(kind='published', model='qwen3-4b', layers=1)


@pytest.mark.parametrize('changes', [{'kind': 'published', 'model': 'qwen3-4b'}, {'kind': 'file'}])
def test_another_page_size_than_the_cache_is_refused(tmp_path, changes):
    (tmp_path / 's.json').write_text(json.dumps(GOOD_FILE))
    changes = {**changes, 'path': str(tmp_path / 's.json')}
    with pytest.raises(ConfigError, match=r'rollout.page_tokens=32: .* pages of 16 tokens; set it to 16'):
        load(dataclasses.replace(ROLLOUT, page_tokens=32), **changes)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'{"page_tokens": 16,', 'not JSON (Expecting property name'),
        (b'\xff\xfe\x00', 'not JSON'),
        (b'', 'not JSON'),
        (b'[' * 100_000, 'not JSON'),
        ([1, 2], 'must hold one JSON object'),
        *(
            ({k: v for k, v in GOOD_FILE.items() if k != field}, f'field {field} is missing')
            for field in GOOD_FILE
            if field != 'about'
        ),
        ({**GOOD_FILE, 'page_tokens': 4}, 'page_tokens=4 must be an integer of at least 8'),
        ({**GOOD_FILE, 'page_tokens': '16'}, "page_tokens='16' must be an integer"),
        ({**GOOD_FILE, 'bin_width_tokens': 0}, 'bin_width_tokens=0 must be an integer of at least 1'),
        ({**GOOD_FILE, 'bin_width_tokens': 1000.0}, 'bin_width_tokens=1000.0 must be an integer'),
        ({**GOOD_FILE, 'reserved_first_pages': 0}, 'reserved_first_pages=0 must be an integer of at least 1'),
        ({**GOOD_FILE, 'reserved_last_pages': True}, 'reserved_last_pages=True must be an integer'),
        ({**GOOD_FILE, 'dense_layers': 1}, 'dense_layers=1 must be a list of integers'),
        ({**GOOD_FILE, 'dense_layers': [-1]}, 'dense_layers=-1 must be an integer of at least 0'),
        *(({**GOOD_FILE, field: 10**12}, f'{field}=1000000000000 must be at most') for field in WHOLE_NUMBERS),
        ({**GOOD_FILE, 'budget_pages': [10**12]}, 'budget_pages=1000000000000 must be at most'),
        ({**GOOD_FILE, 'budget_pages': []}, 'budget_pages is empty'),
        ({**GOOD_FILE, 'budget_pages': [29, None]}, 'budget_pages=None must be an integer of at least 0'),
        ({**GOOD_FILE, 'budget_pages': [29, -1]}, 'budget_pages=-1 must be an integer of at least 0'),
    ],
)
def test_a_malformed_file_is_refused_with_its_path_and_the_field(tmp_path, content, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_file(tmp_path, content)
    assert f'schedule.path={tmp_path}/schedule.json' in str(caught.value)
