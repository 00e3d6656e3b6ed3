"""Every command from its command line: smoke forms of all configurations, what users write themselves, mistakes."""

import json
import re
import shutil

import numpy as np
import pytest
import transformers
from tiny_run import ROOT, contents, newest_checkpoint, rows_of

from sparrow_jax import assembly, commands, evaluate, export, generate, memory, train
from sparrow_jax.config import differing_fields, resolve, to_json
from sparrow_jax.metrics import read_rows
from sparrow_jax.models.weights import load_params
from sparrow_jax.workdir import Workdir

SMOKE = '--config=configs/tiny.py:smoke'
CONFIGS = sorted(
    path.name
    for path in (ROOT / 'configs').glob('*.py')
    if path.stem not in ('__init__', 'algorithms', 'base', 'qwen3')
)


pytestmark = pytest.mark.usefixtures('in_the_repository')


@pytest.fixture(scope='module')
def call(data_cache):
    """Runs a command as its command line would; returns the exit code."""
    options = {
        train: {'main': train.train},
        evaluate: {'main': evaluate.evaluate_run},
        generate: {'main': generate.generate, 'workdir_required': False, 'define_flags': generate._flags},
        export: {'main': export.export, 'config_required': False, 'define_flags': export._flags},
    }

    def run(command, *arguments) -> int:
        prepared = [f'--config.data.cache_dir={data_cache}'] if command is not export else []
        with pytest.raises(SystemExit) as exit_:
            commands.run(**options[command], argv=[command.__name__, *prepared, *map(str, arguments)])
        return exit_.value.code

    return run


@pytest.fixture(scope='module')
def trained(call, tmp_path_factory):
    """A run of two steps."""
    workdir = tmp_path_factory.mktemp('trained') / 'run'
    assert call(train, SMOKE, f'--workdir={workdir}') == 0
    return workdir


# ---------------------------------------------------------------------- train


ALIKE = ('qwen3_0p6b.py', 'qwen3_4b.py', 'qwen3_14b.py', 'qwen3_32b.py')  # but for numbers that smoke forms replace


def test_smoke_forms_that_are_left_to_the_long_checks_are_like_one_that_runs():
    smoke = lambda name: json.loads(to_json(resolve(commands.load_config(f'configs/{name}:smoke'))))
    run = [smoke('qwen3_1p7b.py'), smoke('qwen3_8b.py')]
    for name in ALIKE:
        different = min((differing_fields(one, smoke(name)) for one in run), key=len)
        assert [line.split(':')[0] for line in different] in ([], ['schedule.model'])


@pytest.mark.slow
@pytest.mark.parametrize(
    'config', [pytest.param(name, marks=pytest.mark.verify) if name in ALIKE else name for name in CONFIGS]
)
def test_the_smoke_form_of_every_configuration_runs(config, call, tmp_path, capsys):
    assert call(train, f'--config=configs/{config}:smoke', f'--workdir={tmp_path}/run') == 0
    rows = rows_of(tmp_path / 'run')
    assert [row['step'] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert [name for name, value in row.items() if not np.isfinite(value)] == []
        assert row['compile/count'] == 0
        if config == 'stability.py':  # whose arms have tests of their own; the first one is dense
            assert (row['sparse/kv_read_fraction'], row['sparse/alpha_p05']) == (1, pytest.approx(1, abs=1e-3))
        else:
            assert 0 < row['sparse/kv_read_fraction'] < 1
            assert 0 < row['sparse/alpha_p05'] < 1
        assert row['sparse/alpha_floor_p05'] > 0.999
    assert {'val/accuracy'} < rows[0].keys() & rows[2].keys()
    assert newest_checkpoint(tmp_path / 'run')[0] == 2
    out, err = capsys.readouterr()
    assert 'step 2/2' in out
    assert err == ''


@pytest.mark.slow
def test_a_reward_function_of_the_user_s_own(call, trained, tmp_path, capsys):
    own = '--config.reward.function=reward_functions:always_one'
    assert call(train, SMOKE, own, f'--workdir={tmp_path}/own') == 0
    assert [row['critic/score/mean'] for row in rows_of(trained)[1:]] == [0, 0]
    assert [row['critic/score/mean'] for row in rows_of(tmp_path / 'own')[1:]] == [1, 1]
    assert {row['reward'] for row in read_rows(tmp_path / 'own/samples.jsonl')} == {1}
    capsys.readouterr()
    fails = '--config.reward.function=reward_functions:fails'
    assert call(train, SMOKE, fails, f'--workdir={tmp_path}/fails') == 2
    error = capsys.readouterr().err
    assert re.match(r"error: reward\.function='reward_functions:fails', problem \d \('How many ", error)
    assert "KeyError: 'the reward function is broken'" in error  # where in the user's own code


# ---------------------------------------------------------------------- evaluate, generate, export


@pytest.mark.slow
def test_evaluate_writes_both_samplers_side_by_side(call, trained, capsys):
    before = contents(trained)
    reward = ('--config.reward.function=reward_functions:lower_case', '--config.reward.correct_threshold=0.625')
    sampling = ('--config.evaluate.samples=4', '--config.evaluate.temperature=1.0')
    assert call(evaluate, SMOKE, *reward, *sampling, f'--workdir={trained}') == 0
    dense, sparse = (json.loads(line) for line in (trained / 'evaluation.jsonl').read_text().splitlines())
    assert (dense['step'], dense['sampler'], sparse['step'], sparse['sampler']) == (2, 'dense', 2, 'sparse')
    for row in (dense, sparse):
        get = lambda name, row=row: row[f'{row["sampler"]}/{name}']
        assert get('problems') == 4
        assert 0 < get('accuracy') == get('pass@1') < get('pass@2') < get('pass@4') <= 1
    assert 0.5 < sparse['sparse/kv_read_fraction'] < 1
    answers = [json.loads(line) for line in (trained / 'evaluation_samples.jsonl').read_text().splitlines()]
    assert len(answers) == 2 * 4 * 4
    in_training = read_rows(trained / 'samples.jsonl')[0]
    assert answers[0].keys() - {'sampler'} == in_training.keys()
    assert answers[0]['prompt'].split('\n')[0] == in_training['prompt'].split('\n')[0]  # with the chat template
    for row in (dense, sparse):
        right = [answer['reward'] >= 0.625 for answer in answers if answer['sampler'] == row['sampler']]
        assert np.mean(right) == row[f'{row["sampler"]}/accuracy']
    # The first token is the dense prefill's under both; later ones differ.
    halves = answers[:16], answers[16:]
    assert [a['completion'] for a in halves[0]] != [a['completion'] for a in halves[1]]
    assert 'policy          after step 2' in capsys.readouterr().out
    after = contents(trained)
    assert {name: after[name] for name in before} == before
    (trained / 'evaluation.jsonl').unlink()
    (trained / 'evaluation_samples.jsonl').unlink()


@pytest.mark.slow
def test_generate_streams_the_answer_and_keeps_facts_apart(call, trained, capsys):
    arguments = (SMOKE, '--prompt=How many?', '--config.evaluate.temperature=1')
    assert call(generate, *arguments, f'--workdir={trained}') == 0
    out, err = capsys.readouterr()
    assert len(out.strip()) > 20
    assert 'tokens/s' not in out
    assert ' tokens/s with reference kernels, sparse sampler at temperature 1, finish reason ' in err
    assert '% of the dense KV bytes; policy after step 2\n' in err
    assert err.count('\n') == 1
    # Same prompt and seed: the same answer, but for the sampler.
    assert call(generate, *arguments, f'--workdir={trained}', '--sampler=dense') == 0
    dense, err = capsys.readouterr()
    assert dense != out
    assert 'KV' not in err
    assert call(generate, *arguments, '--sampler=dense') == 0
    _, err = capsys.readouterr()
    assert '; start weights (random)\n' in err


def test_streamed_text_is_the_whole_text_whatever_the_pieces(capsys):
    run = resolve(commands.load_config('configs/tiny.py:smoke'))
    encoder = assembly.PromptEncoder(run.tokenizer, run.data, run.model.path)
    text = '1 + 1 = 2, né? \N{BALLOT BOX WITH CHECK} \N{GRINNING FACE} \N{REPLACEMENT CHARACTER}!'
    ids = [*encoder.tokenizer(text, add_special_tokens=False)['input_ids'], encoder.end_id]
    assert len(ids) > len(text)  # a character has several tokens
    for size in (1, 2, 5, 100):
        stream = generate._Stream(encoder)
        pieces = []
        for start in range(0, len(ids), size):
            stream.write(np.asarray(ids[start : start + size]))
            pieces.append(capsys.readouterr().out)
        stream.end()
        pieces.append(capsys.readouterr().out)
        assert ''.join(pieces) == f'{text}\n'
        assert size == 100 or sum(piece != '' for piece in pieces) > 3


@pytest.mark.slow
def test_an_exported_policy_opens_elsewhere_and_answers_alike(call, trained, tmp_path, capsys, monkeypatch):
    out = tmp_path / 'exported'
    monkeypatch.setattr(export, 'MIB', 2**10)
    assert call(export, f'--workdir={trained}', f'--out={out}', '--shard_mib=128') == 0
    assert f'wrote the policy after step 2 to {out} (float32)' in capsys.readouterr().out
    shards = list(out.glob('*.safetensors'))
    assert len(shards) > 1
    assert all(file.stat().st_size <= 128 * 2**10 for file in shards)

    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers, config.vocab_size) == ('qwen3', 32, 2, 512)
    ours = transformers.AutoTokenizer.from_pretrained(ROOT / 'configs/tiny_start')
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs('1 + 1 = 2?')['input_ids'] == ours('1 + 1 = 2?')['input_ids']
    assert theirs.chat_template == ours.chat_template
    endings = json.loads((out / 'generation_config.json').read_text())
    assert ours.eos_token_id in endings['eos_token_id']

    _, run = Workdir.existing(str(trained))
    parts = assembly.assemble(run)
    policy = assembly.load_policy(parts, str(trained))
    assert policy.step == 2
    loaded = load_params(out, parts.abstract_params())
    flat, flat_loaded = (dict(assembly.nnx.to_flat_state(p)) for p in (policy.params, loaded))
    assert flat.keys() == flat_loaded.keys()
    for name, value in flat.items():
        np.testing.assert_array_equal(np.asarray(value[...]), np.asarray(flat_loaded[name][...]))

    from_run, from_export = tmp_path / 'from_run', tmp_path / 'from_export'
    shutil.copytree(trained, from_run)
    kind = '--config.schedule.kind=fixed'  # the run has moved its budgets
    assert call(evaluate, SMOKE, kind, f'--workdir={from_run}') == 0
    model = ('--noconfig.model.random_weights', f'--config.model.path={out}', f'--config.tokenizer.path={out}')
    assert call(evaluate, SMOKE, kind, *model, f'--workdir={from_export}') == 0
    answers = [
        [json.loads(line)['completion'] for line in (folder / 'evaluation_samples.jsonl').read_text().splitlines()]
        for folder in (from_run, from_export)
    ]
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1


# ---------------------------------------------------------------------- mistakes

START = ('--config=configs/tiny.py', '--config.data.train_examples=64', '--config.data.eval_examples=4')
OWN_REWARD = '--config.reward.function=reward_functions:lower_case'  # its workers start in no time
SUPERVISED = (SMOKE, OWN_REWARD, '--config.phase=supervised')
MISTAKES = {
    'weights': (
        train,
        (*START, '--config.model.path=/nowhere', '--config.tokenizer.path=configs/tiny_start', '--workdir={new}'),
        'error: /nowhere: no such checkpoint; give a folder',
    ),
    'weights of another shape': (
        train,
        (*START, '--config.model.shape.layers=6', '--workdir={new}'),
        'error: model.shape.layers=6: the checkpoint configs/tiny_start has 5',
    ),
    'chat template': (
        train,
        (SMOKE, '--config.tokenizer.path={no_template}', '--workdir={new}'),
        "error: tokenizer.chat_template='': the tokenizer {no_template} brings no chat template",
    ),
    'data file': (
        train,
        (SMOKE, OWN_REWARD, '--config.data.source={tmp}/none.jsonl', '--workdir={new}'),
        "error: data.source='{tmp}/none.jsonl': no such file",
    ),
    'line of a data file': (
        train,
        (SMOKE, OWN_REWARD, '--config.data.source={tmp}/problems.jsonl', '--workdir={new}'),
        'error: {tmp}/problems.jsonl:2: not valid JSON',
    ),
    'reward function': (
        train,
        (SMOKE, '--config.reward.function=no_such_module:f', '--workdir={new}'),
        "error: reward.function='no_such_module:f': No module named 'no_such_module'",
    ),
    'long prompts': (
        train,
        (SMOKE, OWN_REWARD, '--config.rollout.max_prompt_tokens=20', '--workdir={new}'),
        'error: rollout.max_prompt_tokens=20: no training problem has so short a prompt',
    ),
    'no held-out problems': (
        train,
        (SMOKE, OWN_REWARD, '--config.data.eval_examples=0', '--workdir={new}'),
        'error: data.eval_examples=0: there is no held-out problem (evaluate.every_steps=-1 needs none)',
    ),
    'long held-out prompts': (
        evaluate,
        (SMOKE, OWN_REWARD, '--config.rollout.max_prompt_tokens=20', '--workdir={new}'),
        'error: rollout.max_prompt_tokens=20: no held-out problem has so short a prompt',
    ),
    'long worked solutions': (
        train,
        (*SUPERVISED, '--workdir={new}'),
        'error: rollout.max_response_tokens=64: a worked solution has ',
    ),
    'no worked solutions': (
        train,
        (
            *SUPERVISED,
            '--config.data.source=reasoning_gym:chain_sum',
            '--config.data.options=',
            '--config.rollout.max_prompt_tokens=96',
            '--workdir={new}',
        ),
        "error: data.source='reasoning_gym:chain_sum': no worked solutions; they exist for count_bits",
    ),
    'workdir is a file': (
        train,
        (SMOKE, '--workdir={tmp}/problems.jsonl'),
        'error: --workdir={tmp}/problems.jsonl: {tmp}/problems.jsonl is a file; give a folder',
    ),
    'workdir of something else': (
        train,
        (SMOKE, '--workdir={thesis}'),
        'error: --workdir={thesis}: holds something else (thesis.txt, no config.json); give a new or empty folder',
    ),
    'workdir of another run': (
        train,
        (SMOKE, '--config.optimizer.learning_rate=1.0', '--workdir={trained}'),
        'error: --workdir={trained}: belongs to another configuration',
    ),
    'evaluation into something else': (
        evaluate,
        (SMOKE, '--workdir={thesis}'),
        'error: --workdir={thesis}: holds something else',
    ),
    'evaluation of another model': (
        evaluate,
        (*START, OWN_REWARD, '--workdir={trained}'),
        'error: --workdir={trained}: its run trains another model than --config',
    ),
    'generation from no run': (
        generate,
        (SMOKE, '--prompt=?', '--workdir={new}'),
        'error: --workdir={new}: no config.json there; give the folder of an earlier run',
    ),
    'long prompt': (
        generate,
        (SMOKE, f'--prompt={"why " * 100}'),
        'error: --prompt: has ',
    ),
    'empty prompt': (generate, (SMOKE, '--prompt= '), 'error: --prompt= : is empty; give a question'),
    'sampler': (
        generate,
        (SMOKE, '--prompt=?', '--sampler=spares'),
        'error: --sampler=spares: must be sparse or dense',
    ),
    'export of no run': (
        export,
        ('--workdir={new}', '--out={tmp}/out'),
        'error: --workdir={new}: no config.json there',
    ),
    'export before the first checkpoint': (
        export,
        ('--workdir={begun}', '--out={tmp}/out'),
        'error: --workdir={begun}: no checkpoint there yet',
    ),
    'no size of a shard': (
        export,
        ('--workdir={trained}', '--out={tmp}/out', '--shard_mib=0'),
        'error: --shard_mib=0: must be at least 1',
    ),
    'export over something': (
        export,
        ('--workdir={trained}', '--out={thesis}'),
        'error: --out={thesis}: is not empty; give a new folder',
    ),
}


def needs_a_run(name: str) -> bool:
    return any('{trained}' in argument for argument in MISTAKES[name][1])


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=[pytest.mark.slow] if needs_a_run(name) else []) for name in MISTAKES]
)
def test_a_mistake_is_one_sentence_and_changes_nothing(name, call, tmp_path, capsys, request):
    command, arguments, words = MISTAKES[name]
    places = {name: tmp_path / name for name in ('new', 'no_template', 'thesis', 'begun')} | {'tmp': tmp_path}
    if needs_a_run(name):
        places['trained'] = request.getfixturevalue('trained')
    (tmp_path / 'problems.jsonl').write_text('{"problem": "1 + 1 = ?", "answer": "2"}\n{"problem": "1 + 2')
    shutil.copytree(ROOT / 'configs/tiny_start', places['no_template'])
    (places['no_template'] / 'chat_template.jinja').unlink()
    places['thesis'].mkdir()
    (places['thesis'] / 'thesis.txt').write_text('years of work')
    Workdir.open(str(places['begun']), resolve(commands.load_config('configs/tiny.py:smoke')), 'train').close()
    watched = (tmp_path, places.get('trained', tmp_path))
    before = [contents(folder) for folder in watched]

    capsys.readouterr()
    assert call(command, *(argument.format(**places) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert err.startswith(words.format(**places))
    assert 'Traceback' not in err
    assert 'step 1' not in out
    for folder, files in zip(watched, before, strict=True):
        after = contents(folder)
        assert {file: after[file] for file in files} == files


@pytest.mark.parametrize(('command', 'fits'), [(train, False), (generate, True)])
def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_read(
    command, fits, call, tmp_path, capsys, monkeypatch
):
    """What training needs beyond the policy is not asked of a command that only samples."""
    needed = memory.estimate(resolve(commands.load_config('configs/tiny.py')), tiny_shape(), ONE, 'cpu')
    room = needed['parameters'] + needed['optimizer'] + needed['sampler weights'] + needed['rollout: KV pool']
    monkeypatch.setattr(memory, 'available_bytes', lambda _: room)
    monkeypatch.setattr(assembly, 'load_params', reading)
    reached = '--sampler=dense' if command is generate else f'--workdir={tmp_path}/new'
    arguments = ('--config=configs/tiny.py', reached, *(['--prompt=?'] if command is generate else []))
    if fits:
        with pytest.raises(ReadingWeights):
            call(command, *arguments)
        return
    assert call(command, *arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith('error: this run needs about ')
    assert 'on each device, but only ' in err
    assert 'optimizer' in err
    assert 'Set learner.rows_per_microbatch or the lengths in rollout lower' in err
    assert not (tmp_path / 'new').exists()


ONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


class ReadingWeights(Exception):
    """Raised in place of reading them."""


def reading(*_args):
    raise ReadingWeights


def tiny_shape():
    return assembly.read_shape('configs/tiny_start')
