"""The model configurations: valid, locked, of the published shapes, and small in their smoke form."""

import importlib

import pytest

from configs import base
from configs.algorithms import ALGORITHMS
from sparrow_jax.config import resolve
from sparrow_jax.models.shape import DecoderShape

# Parameters of the published checkpoints; a tied head counts once.
PARAMETERS = {
    'qwen3_0p6b': 596_049_920,
    'qwen3_1p7b': 1_720_574_976,
    'qwen3_4b': 4_022_468_096,
    'qwen3_8b': 8_190_735_360,
    'qwen3_14b': 14_768_307_200,
    'qwen3_32b': 32_762_123_264,
    'smollm2_135m': 134_515_008,
    'smollm2_long': 134_515_008,
}


def config(name, arg=''):
    return importlib.import_module(f'configs.{name}').get_config(arg)


@pytest.mark.parametrize('name', PARAMETERS)
def test_published_shapes(name):
    shape = DecoderShape(**config(name).model.shape.to_dict())
    assert shape.parameter_count() == PARAMETERS[name]


@pytest.mark.parametrize('name', PARAMETERS)
def test_full_and_smoke_form_are_valid_and_locked(name):
    full, smoke = config(name), config(name, 'smoke')
    for c in (full, smoke):
        with pytest.raises(AttributeError):
            c.rollout.no_such_field = 1
    run, small = resolve(full), resolve(smoke)
    assert run.rollout.max_prompt_tokens + run.rollout.max_response_tokens <= run.model.shape.max_positions
    assert DecoderShape(**smoke.model.shape.to_dict()).parameter_count() < 300_000
    assert (small.steps, small.rollout.max_prompt_tokens, small.rollout.max_response_tokens) == (2, 96, 32)
    # What makes the configuration what it is stays.
    assert (small.model.shape.family, small.learner.advantage, small.learner.clip_high, small.optimizer) == (
        run.model.shape.family,
        run.learner.advantage,
        run.learner.clip_high,
        run.optimizer,
    )


@pytest.mark.parametrize('name', PARAMETERS)
def test_a_mistyped_argument_lists_the_valid_ones(name):
    with pytest.raises(ValueError, match=f"{name}.py:smok: unknown argument; it must be '' or 'smoke'"):
        config(name, 'smok')


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_every_algorithm_can_be_chosen_in_full_and_in_smoke_form(algorithm):
    for name, words in (('qwen3_8b', ()), ('smollm2_long', ('smoke',)), ('tiny', ()), ('tiny', ('smoke',))):
        run = resolve(config(name, ','.join((*words, algorithm))))
        for field, value in ALGORITHMS[algorithm].items():
            section, _, key = field.partition('.')
            assert getattr(getattr(run, section), key) == value, field
        expected = run.rollout.max_response_tokens // 5 if algorithm == 'dapo' else 0
        assert run.reward.overlong_buffer_tokens == expected
    assert resolve(config('tiny', f'smoke,{algorithm}')).steps == 2


def test_an_unknown_algorithm_lists_those_that_there_are():
    with pytest.raises(ValueError, match=r"tiny.py:gpso: unknown argument; .*'scratch' or 'smoke', .*gspo, dapo"):
        config('tiny', 'smoke,gpso')


def test_smoke_changes_values_only():
    before = base.get_config()
    after = base.get_config()
    base.smoke(after)
    assert before.to_dict().keys() == after.to_dict().keys()
    for section in before:
        if hasattr(before[section], 'keys'):
            assert before[section].keys() == after[section].keys(), section
