"""Runs with an adapter in the sampler: what they write, how they go on, what is refused."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
from tiny_run import TinyRuns, assert_same_run, exit_code, newest_checkpoint, rows_of

from sparrow_jax import commands, evaluate, export
from sparrow_jax.assembly import assemble
from sparrow_jax.config import ConfigError, resolve
from sparrow_jax.learner.distill import Distiller
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.rollout.engine import Engine

STEPS = 4
DISTILL = {'steps': STEPS, 'distill.enabled': True, 'distill.learning_rate': 1e-3, 'distill.warmup_steps': 2}

pytestmark = pytest.mark.usefixtures('in_the_repository')


@pytest.fixture(scope='module')
def runs(tmp_path_factory, data_cache, compile_cache):
    return TinyRuns(tmp_path_factory.mktemp('distill'), data_cache, compile_cache)


@pytest.fixture(scope='module')
def trained(runs):
    return runs.train('trained', DISTILL)


@pytest.mark.slow
def test_every_step_updates_the_adapter_and_nothing_compiles_late(trained):
    rows = rows_of(trained)[1:]
    assert len(rows) == STEPS
    for row in rows:
        assert 0 < row['distill/kl'] < 1
        assert row['distill/grad_norm'] > 0
        assert row['distill/alpha_p05'] <= row['distill/alpha_mean'] < 1
        assert row['timing_s/distill'] > 0
        assert row['compile/count'] == 0
    # The sampler measured with the adapter is the teacher-forced policy: both see the same weights in the first step,
    # as the policy's update is not yet in what the sampler drew from.
    assert rows[0]['distill/alpha_p05'] == pytest.approx(rows[0]['sparse/alpha_p05'], abs=0.02)
    _, arrays, _ = newest_checkpoint(trained)
    learned = [array for name, array in arrays.items() if name.startswith('adapter.params') and name.endswith('.b')]
    assert len(learned) == 2 * 7
    assert all(np.abs(array).max() > 1e-4 for array in learned)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_bit_for_bit(runs, trained):
    runs.train('stopped', DISTILL | {'steps': 2})
    assert_same_run(runs.train('stopped', DISTILL), trained)


@pytest.mark.slow
def test_commands_take_the_adapter_of_a_run(runs, trained, tmp_path, monkeypatch):
    """The exported factors are the checkpoint's, and so are those that an evaluation samples with."""
    flags = {'config_required': False, 'define_flags': export._flags}
    assert exit_code(export.export, (f'--workdir={trained}', f'--out={tmp_path}/out'), **flags) == 0
    tensors = safetensors.numpy.load_file(tmp_path / 'out/sampler_adapter/adapter_model.safetensors')
    _, arrays, _ = newest_checkpoint(trained)
    for target, name in (('q', 'self_attn.q_proj'), ('down', 'mlp.down_proj')):
        a, b = (tensors[f'base_model.model.model.layers.1.{name}.lora_{which}.weight'] for which in 'AB')
        pair = [arrays[f'adapter.params.1.{target}.{which}'] for which in 'ab']
        expected = np.tensordot(*pair, axes=1).reshape(a.shape[1], b.shape[0]).T
        np.testing.assert_allclose(b @ a, expected, rtol=1e-5, atol=1e-7)
    assert json.loads((tmp_path / 'out/sampler_adapter/adapter_config.json').read_text())['r'] == 4

    given, generate = [], Engine.generate
    monkeypatch.setattr(Engine, 'generate', lambda *args, **how: given.append(how['adapter']) or generate(*args, **how))
    assert exit_code(evaluate.evaluate_run, [*runs.flags(DISTILL), f'--workdir={trained}']) == 0
    assert len(given) == 2
    for adapter in given:  # the engine leaves it out of the dense sampler
        np.testing.assert_array_equal(adapter.factors[1]['q']['b'], arrays['adapter.params.1.q.b'])
    for name in ('evaluation.jsonl', 'evaluation_samples.jsonl'):
        (trained / name).unlink()


def small(**changes):
    return commands.load_config('configs/tiny.py:smoke', [f'--config.{k}={v}' for k, v in changes.items()])


MISTAKES = {
    'distill.rank=0: must be at least 1': {'distill.rank': 0},
    'distill.alpha=0.0: must be positive': {'distill.alpha': 0.0},
    "distill.targets='x': must be one of q, k, v": {'distill.targets': "('q','x')"},
    'must be one or more, each once': {'distill.targets': "('q','q')"},
    'distill.kl_coef=0.0: must be positive where distill.pg_coef is 0': {
        'distill.kl_coef': 0.0,
        'distill.pg_coef': 0.0,
    },
    'distill.updates_per_step=0': {'distill.updates_per_step': 0},
    "schedule.kind='dense': distill.enabled=True teaches": {'schedule.kind': 'dense'},
    "schedule.policy='quest': distill.enabled=True needs": {'schedule.policy': 'quest'},
    "phase='supervised': there is no sampler": {'phase': 'supervised'},
}


@pytest.mark.parametrize('sentence', MISTAKES)
def test_what_cannot_work_is_refused(sentence):
    with pytest.raises(ConfigError) as error:
        resolve(small(**{'distill.enabled': True, **MISTAKES[sentence]}))
    assert sentence in str(error.value)


def test_a_rank_that_no_matrix_can_use_and_tensor_shards_that_split_a_head_are_refused():
    with pytest.raises(ConfigError, match=r'distill\.rank=40: is above the smaller side of'):
        assemble(resolve(small(**{'distill.enabled': True, 'distill.rank': 40})))
    run = resolve(small(**{'distill.enabled': True}))
    mesh = SimpleNamespace(shape={'data': 1, 'fsdp': 1, 'tensor': 4})
    with pytest.raises(ConfigError, match=r'parallel\.tensor=4: distill\.enabled=True splits the 2 KV heads'):
        Distiller(DecoderShape(**vars(run.model.shape)), None, mesh, run, None, None, 'xla')
