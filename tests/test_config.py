"""Configurations in their frozen form: every impossible value is refused by the name of its field."""

import json

import pytest

from configs import base, tiny
from pallas_kernels.dense_decode import MAX_QUERIES
from pallas_kernels.page_select import policies
from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax import config_checks
from sparrow_jax.config import ConfigError, differing_fields, resolve, to_json


def make_config():
    config = base.get_config()
    config.model.path = 'somewhere'
    return config


def random_weights():
    """A configuration with a shape of its own."""
    config = tiny.get_config('smoke')
    config.schedule.dense_layers = (0,)
    return config


def change(config, changes):
    config.update_from_flattened_dict(changes)
    return config


def test_base_is_valid_once_it_names_a_model():
    with pytest.raises(ConfigError, match=r"model.path='': set it to a checkpoint folder or .gguf file"):
        resolve(base.get_config())
    run = resolve(make_config())
    assert run.rollout.pages_per_sequence == (2048 + 8192) // 16
    assert run.row_tokens == 10_240


@pytest.mark.parametrize('arg', ['', 'scratch', 'smoke'])
def test_json_gives_the_same_run_back(arg):
    run = resolve(tiny.get_config(arg))
    assert resolve(json.loads(to_json(run))) == run
    assert to_json(resolve(json.loads(to_json(run)))) == to_json(run)


def test_derived_sizes():
    config = change(make_config(), {'rollout.max_prompt_tokens': 100, 'rollout.max_response_tokens': 29})
    run = resolve(config)
    assert run.rollout.pages_per_sequence == 16  # 129 tokens of 16 take 9, rounded up to 8
    assert run.row_tokens == 256  # 129 rounded up to 128
    assert resolve(change(config, {'learner.row_tokens': 129})).row_tokens == 129


@pytest.mark.parametrize(
    ('field', 'value', 'what'),
    [
        ('phase', 'sft', 'must be one of rl, supervised'),
        ('steps', -1, 'must not be negative'),
        ('model.compute_dtype', 'float16', 'must be one of bfloat16, float32'),
        ('model.param_dtype', 'f32', 'must be one of bfloat16, float32'),
        *((f'rollout.{name}', 0, 'must be positive') for name in ('prompts_per_step', 'samples_per_prompt', 'slots')),
        *((f'rollout.{name}', 0, 'must be positive') for name in ('max_prompt_tokens', 'max_response_tokens')),
        *((f'rollout.{name}', 0, 'must be positive') for name in ('segment_steps', 'prefill_rows')),
        *(('rollout.page_tokens', pages, 'must be a power of two from 8 to 128') for pages in (0, 4, 24, 256)),
        ('rollout.pool_pages', 639, 'cannot hold one longest sequence, which needs 640 pages'),
        ('rollout.pool_pages', -1, 'cannot hold one longest sequence'),
        ('rollout.temperature', 0.0, 'must be positive'),
        ('rollout.temperature', float('nan'), 'must be positive'),
        ('rollout.samples_per_prompt', 1, 'grpo compares the samples of a prompt: set at least 2'),
        ('schedule.kind', 'sparse', 'must be one of dense, fixed, published, file'),
        ('schedule.reserved_first_pages', 0, 'must be at least 1'),
        ('schedule.reserved_last_pages', 0, 'must be at least 1'),
        ('schedule.dense_layers', (0, -1), 'layer numbers start at 0'),
        ('schedule.budget_pages', 0, 'must be at least 1'),
        ('mismatch.every_steps', -1, 'must not be negative'),
        ('mismatch.bin_width_tokens', 0, 'a length bin of an adaptive schedule holds at least a page'),
        ('mismatch.min_count', 0, 'must be positive'),
        ('mismatch.floor_every_steps', -1, 'must not be negative'),
        ('mismatch.floor_sequences', 0, 'must be positive'),
        ('learner.advantage', 'ppo', 'must be one of grpo, dr_grpo, rloo, reinforce_pp, reinforce_pp_baseline, gae'),
        ('learner.updates_per_step', 0, 'must be at least 1'),
        ('learner.updates_per_step', 3, 'must divide rollout.prompts_per_step=64'),
        ('learner.rows_per_microbatch', 0, 'must be at least 1'),
        ('learner.row_tokens', 10_239, 'must hold the longest prompt + response, 10240 tokens'),
        ('learner.row_tokens', -1, 'must hold the longest prompt + response'),
        ('learner.packing', 'yes', 'must be one of on, off, auto'),
        ('learner.head_chunk_tokens', 0, 'must be at least 1'),
        ('learner.clip_low', 1.0, 'must be in [0, 1)'),
        ('learner.clip_low', -0.1, 'must be in [0, 1)'),
        ('learner.clip_high', -0.1, 'must not be negative'),
        ('learner.ratio', 'response', 'must be one of token, sequence'),
        ('learner.aggregation', 'mean', 'must be one of token_mean, sequence_mean, constant'),
        ('learner.correction', 'clip', 'must be one of none, tis, token_mask, sequence_mask, icepop'),
        ('learner.correction_high', 0.0, 'must be positive; learner.correction=none corrects nothing'),
        (
            'learner.correction_low',
            0.5,
            'tis has no lower limit; set 0, or learner.correction to sequence_mask or icepop',
        ),
        ('learner.kl_placement', 'both', 'must be one of loss, reward'),
        ('learner.kl_placement', 'reward', 'grpo has one reward a response, not one a token'),
        ('rollout.extra_batches', -1, 'must not be negative'),
        ('reward.overlong_buffer_tokens', 8193, 'must be from 0 to rollout.max_response_tokens=8192'),
        ('reward.overlong_buffer_tokens', -1, 'must be from 0'),
        ('reward.overlong_penalty', -0.5, 'must be a finite number that is not negative'),
        ('critic.kind', 'tree', 'must be one of none, head, trunk'),
        ('critic.kind', 'head', 'learner.advantage=grpo uses no values; set none, or learner.advantage=gae'),
        ('critic.learning_rate', -1.0, 'must not be negative'),
        ('critic.clip', 0.0, 'must be positive'),
        ('critic.gamma', 1.1, 'must be in [0, 1]'),
        ('critic.lam', -0.1, 'must be in [0, 1]'),
        ('critic.passes', 0, 'must be at least 1'),
        ('critic.warmup_steps', -1, 'must not be negative'),
        ('learner.kl_coef', -0.1, 'must not be negative'),
        ('optimizer.learning_rate', -1e-6, 'must not be negative'),
        ('optimizer.warmup_steps', -1, 'must not be negative'),
        ('optimizer.decay_steps', -1, 'must not be negative'),
        ('optimizer.weight_decay', -0.1, 'must not be negative'),
        ('optimizer.beta1', 1.0, 'must be in [0, 1)'),
        ('optimizer.beta2', -0.1, 'must be in [0, 1)'),
        ('optimizer.eps', 0.0, 'must be positive'),
        ('optimizer.max_grad_norm', 0.0, 'must be positive'),
        ('data.source', '', "set 'reasoning_gym:<task>'"),
        ('data.layout', 'csv', 'must be one of auto, polaris'),
        ('data.answer_format', 'json', 'must be one of boxed, tag'),
        ('data.options', '{', 'must be a JSON object'),
        ('data.options', '[1]', 'must be a JSON object'),
        ('reward.workers', 0, 'must be at least 1'),
        ('reward.timeout_s', 0.0, 'must be positive'),
        ('reward.function', 'my_reward', "must be 'module:function'"),
        ('evaluate.every_steps', -2, 'must be at least -1'),
        ('evaluate.samples', 0, 'must be at least 1'),
        ('evaluate.temperature', -0.1, 'must not be negative'),
        ('evaluate.top_p', 0.0, 'must be in (0, 1]'),
        ('evaluate.top_p', 1.1, 'must be in (0, 1]'),
        ('checkpoint.every_steps', 0, 'must be at least 1'),
        ('checkpoint.keep', 0, 'must be at least 1'),
        *(
            (f'parallel.{axis}', size, 'must be positive, or -1')
            for axis in ('data', 'fsdp', 'tensor')
            for size in (0, -2)
        ),
        ('parallel.distributed', 'on', 'must be one of off, auto, address'),
        ('parallel.coordinator', 'host:1234', "is for parallel.distributed='address', which is 'off'; leave it out"),
        ('parallel.processes', 2, "is for parallel.distributed='address'"),
        ('parallel.process', 0, "is for parallel.distributed='address'"),
        ('log.samples_per_step', -1, 'must not be negative'),
        ('data.options', '[' * 100_000, 'must be a JSON object'),
        *((f'optimizer.{name}', float('inf'), 'must be finite') for name in ('learning_rate', 'eps', 'weight_decay')),
        *((f'{name}.temperature', float('inf'), 'must be finite') for name in ('rollout', 'evaluate')),
        ('learner.kl_coef', float('inf'), 'must be finite'),
        ('reward.timeout_s', 1e300, 'at most a day'),
        *((f'reward.{name}', float('nan'), 'must be a finite') for name in ('correct_threshold', 'format_bonus')),
        *((f'reward.{name}', float('-inf'), 'must be finite') for name in ('correct_threshold', 'format_bonus')),
        *(
            ('reward.function', name, "must be 'module:function'")
            for name in (':', 'rewards:', ':length', '.rewards:length', 'rewards:a:b', 'rewards.py:length ', 'a/b.py:f')
        ),
        ('steps', 2**31, 'must be at most 2147483647'),
        ('schedule.policy', 'blockmean', 'must be one of block_mean, quest, group_softmax'),
        ('schedule.budget_pages', 10**14, 'must be at most 2147483647'),
        ('data.train_examples', 10**14, 'must be at most 2147483647'),
        *((name, 10**20, 'must be at most 9223372036854775807') for name in ('seed', 'data.seed')),
    ],
)
def test_an_impossible_value_is_refused_by_name(field, value, what):
    with pytest.raises(ConfigError) as caught:
        resolve(change(make_config(), {field: value}))
    assert str(caught.value).startswith(f'{field}={value!r}: ')
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ('field', 'value', 'what'),
    [
        ('model.path', 'somewhere', 'keep one of them'),
        ('model.shape.family', 'gpt2', 'must be one of qwen3, llama'),
        *(
            (f'model.shape.{name}', 0, 'must be positive')
            for name in ('vocab_size', 'd_model', 'layers', 'query_heads')
        ),
        *((f'model.shape.{name}', 0, 'must be positive') for name in ('kv_heads', 'head_dim', 'd_ff', 'max_positions')),
        *((f'model.shape.{name}', 0.0, 'must be positive') for name in ('rope_theta', 'norm_eps')),
        ('model.shape.query_heads', 3, 'must be a multiple of model.shape.kv_heads=2'),
        ('model.shape.head_dim', 7, 'must be even'),
        ('schedule.dense_layers', (0, 2), 'the model has 2 layers'),
    ],
)
def test_an_impossible_shape_is_refused_by_name(field, value, what):
    resolve(random_weights())
    with pytest.raises(ConfigError) as caught:
        resolve(change(random_weights(), {field: value}))
    assert str(caught.value).startswith(f'{field}={value!r}: ')
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ('field', 'value', 'what'),
    [
        ('coordinator', '', "must be 'host:port'"),
        ('coordinator', 'host', "must be 'host:port'"),
        ('coordinator', ':80', "must be 'host:port'"),
        ('coordinator', 'host:99999', "must be 'host:port'"),
        ('processes', 0, 'must be the number of processes'),
        ('process', -1, 'must be from 0 to 1'),
        ('process', 2, 'must be from 0 to 1'),
    ],
)
def test_processes_by_address_need_all_their_fields(field, value, what):
    config = make_config()
    p = config.parallel
    p.distributed, p.coordinator, p.processes, p.process = 'address', 'host:1234', 2, 1
    resolve(config)
    p[field] = value
    with pytest.raises(ConfigError) as error:
        resolve(config)
    assert f'parallel.{field}={value!r}: {what}' in str(error.value)


def test_kernels_that_do_not_have_the_policy_are_refused():
    for policy in ('quest', 'group_softmax'):
        for kernels in ('mosaic_gpu', 'mosaic_tpu_interpreted'):
            settings = {'schedule.policy': policy, 'rollout.kernels': kernels}
            with pytest.raises(ConfigError) as caught:
                resolve(change(make_config(), settings))
            assert str(caught.value).startswith(f"rollout.kernels='{kernels}': schedule.policy={policy} has no kernels")
            assert str(caught.value).endswith('set it to auto or reference')
        for kernels in ('auto', 'reference'):
            resolve(change(make_config(), {'schedule.policy': policy, 'rollout.kernels': kernels}))
    resolve(change(make_config(), {'rollout.kernels': 'mosaic_gpu'}))


PPO = {'learner.advantage': 'gae', 'critic.kind': 'trunk'}
REINFORCE = {'learner.advantage': 'reinforce_pp'}


@pytest.mark.parametrize(
    ('settings', 'field', 'value', 'what'),
    [
        ({'learner.advantage': 'gae'}, 'critic.kind', 'none', 'learner.advantage=gae needs values; set head or trunk'),
        (PPO | {'phase': 'supervised'}, 'critic.kind', 'trunk', 'phase=supervised has no rewards'),
        (PPO | {'steps': 5}, 'critic.warmup_steps', 5, 'must be fewer than steps=5, or the policy never learns'),
        (PPO, 'rollout.extra_batches', 1, 'prompts whose rewards are all equal do teach gae something; set 0'),
        (REINFORCE, 'rollout.extra_batches', 1, 'do teach reinforce_pp something'),
        *(
            ({'learner.advantage': name}, 'rollout.samples_per_prompt', 1, f'{name} compares the samples of a prompt')
            for name in ('dr_grpo', 'rloo', 'reinforce_pp_baseline')
        ),
        *(
            (
                {'learner.correction': name},
                'learner.correction_low',
                low,
                f'{name} keeps weights from correction_low to',
            )
            for name in ('icepop', 'sequence_mask')
            for low in (0.0, 1.5)
        ),
        ({'learner.correction': 'token_mask'}, 'learner.correction_low', 0.5, 'token_mask has no lower limit'),
    ],
)
def test_parts_of_algorithms_that_do_not_go_together_are_refused(settings, field, value, what):
    with pytest.raises(ConfigError) as caught:
        resolve(change(make_config(), settings | {field: value}))
    assert str(caught.value).startswith(f'{field}={value!r}: ')
    assert what in str(caught.value)


def test_parts_of_algorithms_that_go_together():
    for settings in (
        PPO | {'rollout.samples_per_prompt': 1, 'learner.kl_placement': 'reward'},
        REINFORCE | {'rollout.samples_per_prompt': 1},
        {'learner.correction': 'icepop', 'learner.correction_low': 0.5, 'learner.correction_high': 5.0},
        {'learner.correction': 'none', 'learner.correction_high': 0.0},
        {'rollout.extra_batches': 3, 'learner.mask_truncated': True, 'reward.overlong_buffer_tokens': 8192},
    ):
        resolve(change(make_config(), settings))


def test_checks_that_depend_on_another_field():
    with pytest.raises(ConfigError, match=r"schedule.path='': a schedule from a file needs the path"):
        resolve(change(make_config(), {'schedule.kind': 'file'}))
    # One sample a prompt and no budget are fine where nothing compares samples or reads budgets.
    resolve(change(make_config(), {'phase': 'supervised', 'rollout.samples_per_prompt': 1}))
    resolve(change(make_config(), {'schedule.kind': 'dense', 'schedule.budget_pages': 0}))
    # With a checkpoint, its own shape counts: no field of `shape` is judged here.
    resolve(change(make_config(), {'schedule.dense_layers': (0, 99), 'model.shape.query_heads': 3}))


@pytest.mark.parametrize(
    ('section', 'name', 'value', 'message'),
    [
        ('rollout', 'slots', 4.0, 'rollout.slots=4.0: must be of type int'),
        ('rollout', 'slots', True, 'rollout.slots=True: must be of type int'),
        ('rollout', 'temperature', '1', "rollout.temperature='1': must be of type float"),
        ('rollout', 'temperature', False, 'rollout.temperature=False: must be of type float'),
        ('model', 'remat', 1, 'model.remat=1: must be of type bool'),
        ('model', 'path', None, 'model.path=None: must be of type str'),
        ('model', 'shape', 'qwen3', "model.shape='qwen3': must be a section"),
        ('tokenizer', 'template_options', 'x=1', "tokenizer.template_options='x=1': must be a section"),
        ('tokenizer', 'end_tokens', 'ab', "tokenizer.end_tokens='ab': must be a tuple"),
        ('schedule', 'dense_layers', 3, 'schedule.dense_layers=3: must be a tuple'),
        ('schedule', 'dense_layers', ['0'], "schedule.dense_layers='0': must be of type int"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(section, name, value, message):
    config = make_config().to_dict()
    config[section][name] = value
    with pytest.raises(ConfigError) as caught:
        resolve(config)
    assert str(caught.value).startswith(message)


def test_a_whole_number_serves_as_a_float():
    config = make_config().to_dict()
    config['rollout']['temperature'] = 1
    temperature = resolve(config).rollout.temperature
    assert (temperature, type(temperature)) == (1.0, float)


def test_limits_may_be_infinite_and_seeds_large():
    limits = {
        name: float('inf')
        for name in ('learner.correction_high', 'critic.clip', 'learner.clip_high', 'optimizer.max_grad_norm')
    }
    resolve(change(make_config(), {**limits, 'seed': 1_700_000_000_000, 'data.seed': -5}))


def test_unknown_and_missing_fields():
    config = make_config().to_dict()
    config['rollout']['temprature'] = 1.0
    with pytest.raises(ConfigError, match=r'^rollout.temprature: no such field; configs/base.py lists them all$'):
        resolve(config)
    del config['rollout']['temprature'], config['model']['shape']['d_ff']
    with pytest.raises(ConfigError, match=r'^model.shape.d_ff: missing; start the config from configs/base.py$'):
        resolve(config)
    with pytest.raises(ConfigError, match=r'^modle: no such field'):
        resolve({**make_config().to_dict(), 'modle': {}})
    with pytest.raises(ConfigError, match=r'^rollout=3: must be a section'):
        resolve({**make_config().to_dict(), 'rollout': 3})


def test_limits_that_are_written_down_twice_are_the_same():
    assert tuple(SelectionPolicy) == config_checks.POLICIES
    assert config_checks.MOST_CHUNK_TOKENS == MAX_QUERIES


def test_a_registered_policy_can_be_named(monkeypatch):
    config = make_config()
    config.schedule.policy = 'mine'
    with pytest.raises(ConfigError, match=r"^schedule.policy='mine': must be one of block_mean, quest, group_softmax$"):
        resolve(config)
    monkeypatch.setattr(policies, '_RULES', dict(policies._RULES))
    monkeypatch.setattr(policies, '_REGISTERED', {})
    policies.register_policy('mine', policies.block_mean)
    assert resolve(config).schedule.policy == 'mine'


def test_differing_fields_lists_leaves():
    old = {'seed': 0, 'rollout': {'slots': 4, 'page_tokens': 16}, 'gone': 1, 'same': [1, 2]}
    new = {'seed': 1, 'rollout': {'slots': 4, 'page_tokens': 32}, 'added': {'x': 'y'}, 'same': [1, 2]}
    assert differing_fields(old, new) == [
        "added: '(absent)' -> {'x': 'y'}",
        "gone: 1 -> '(absent)'",
        'rollout.page_tokens: 16 -> 32',
        'seed: 0 -> 1',
    ]
    assert differing_fields(old, old) == []


def test_a_changed_configuration_differs_from_its_saved_form_in_that_field_alone():
    saved = json.loads(to_json(resolve(make_config())))
    changed = json.loads(to_json(resolve(change(make_config(), {'schedule.dense_layers': (0, 1, 2)}))))
    assert differing_fields(saved, changed) == ['schedule.dense_layers: [0, 1] -> [0, 1, 2]']
