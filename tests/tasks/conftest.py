"""Sections of a configuration for the tests of tasks; a test names the fields it is about."""

import pathlib

import pytest

from sparrow_jax.config import DataConfig, RewardConfig

SAMPLES = pathlib.Path(__file__).parents[2] / 'sparrow_jax' / 'tasks' / 'samples'


@pytest.fixture
def data_config(tmp_path):
    def make(**changes) -> DataConfig:
        fields = {
            'source': 'reasoning_gym:chain_sum',
            'layout': 'auto',
            'options': '',
            'train_examples': 40,
            'seed': 17,
            'eval_source': '',
            'eval_examples': 8,
            'cache_dir': str(tmp_path / 'cache'),
            'instruction': '',
            'answer_format': 'boxed',
        }
        return DataConfig(**(fields | {k: str(v) if isinstance(v, pathlib.Path) else v for k, v in changes.items()}))

    return make


@pytest.fixture
def reward_config():
    def make(**changes) -> RewardConfig:
        fields = {'function': '', 'correct_threshold': 0.99, 'format_bonus': 0.0, 'workers': 2, 'timeout_s': 10.0}
        length = {'overlong_buffer_tokens': 0, 'overlong_penalty': 0.0}
        return RewardConfig(**(fields | length | changes))

    return make


@pytest.fixture(scope='session')
def samples() -> pathlib.Path:
    return SAMPLES
