import contextlib
import json
import os
import pathlib
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks import generated, scoring
from sparrow_jax.tasks import problems as problems_module
from sparrow_jax.tasks.problems import load_problems, order


def texts(problems):
    return [p.question for p in problems]


def test_generated_splits_are_distinct_and_share_no_text(data_config):
    # Two one-digit terms make 200 texts: without care, duplicates are certain.
    options = json.dumps({'min_terms': 2, 'max_terms': 2, 'max_digits': 1})
    data = data_config(options=options, train_examples=120, eval_examples=40)
    train, held_out = load_problems(data, 'train'), load_problems(data, 'held_out')
    assert (len(train), len(held_out)) == (120, 40)
    assert len(set(texts(train)) | set(texts(held_out))) == 160
    problem = train[5]
    assert problem.index == 5
    assert problem.source == 'reasoning_gym:chain_sum'
    assert str(eval(problem.metadata['expression'])) == problem.answer
    with pytest.raises(IndexError):
        train[120]


def test_data_repeats_exactly_and_depends_on_its_settings(data_config, tmp_path):
    first = load_problems(data_config(), 'train')
    again = load_problems(data_config(cache_dir=tmp_path / 'other'), 'train')
    assert list(first) == list(again)
    assert first.fingerprint == again.fingerprint
    other_seed = load_problems(data_config(seed=18_000), 'train')
    assert other_seed.fingerprint != first.fingerprint
    assert set(texts(other_seed)) != set(texts(first))
    # More training problems leave the held-out ones alone.
    more = load_problems(data_config(train_examples=60), 'held_out')
    assert texts(more) == texts(load_problems(data_config(), 'held_out'))


def test_problems_do_not_depend_on_the_hash_seed(data_config, tmp_path):
    # ransom_note draws from a set of letters: unfixed, every process would make problems of its own.
    seen = set()
    for i, hash_seed in enumerate(('1', '2')):
        data = data_config(
            source='reasoning_gym:ransom_note', train_examples=5, eval_examples=1, cache_dir=tmp_path / str(i)
        )
        script = f'from sparrow_jax.tasks.problems import *; print(load_problems({data!r}, "train").fingerprint)'
        script = 'from sparrow_jax.config import DataConfig; ' + script
        environment = {**os.environ, 'PYTHONHASHSEED': hash_seed}
        seen.add(
            subprocess.run([sys.executable, '-c', script], env=environment, capture_output=True, check=True).stdout
        )
    assert len(seen) == 1


def test_order_is_a_permutation_an_epoch_and_a_function_of_its_arguments():
    epochs = [[order(17, e * 10 + i, 10) for i in range(10)] for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    # Frozen: a run resumed under another release goes on with the same problems.
    assert epochs[0] == FIRST_EPOCH
    assert [order(18, i, 10) for i in range(10)] != FIRST_EPOCH
    assert order(17, 23, 10) == epochs[2][3]  # asked for alone, as after a resume
    assert order(-1, 0, 1) == 0


def test_position_of_a_run(data_config):
    problems = load_problems(data_config(), 'train')
    assert sorted(problems.at(i).index for i in range(40)) == list(range(40))
    assert problems.at(43).index == order(17, 43, 40)


def test_too_few_problems(data_config):
    options = '{"min_terms": 2, "max_terms": 2, "max_digits": 1}'
    with pytest.raises(ConfigError, match=r'chain_sum: only 200 distinct problems in \d+ tries .* of 208 wanted'):
        load_problems(data_config(options=options, train_examples=200), 'train')


@pytest.mark.parametrize(
    ('changes', 'error'),
    [
        # The first two are found by the helper process, and must come through whole.
        ({'source': 'reasoning_gym:chainsum'}, 'near names: chain_sum'),
        ({'options': '{"min_terms": 9, "max_terms": 2}'}, 'chain_sum refuses .*max_terms must be'),
        ({'options': '{"seed": 3}'}, "'seed' cannot stand there; data.seed"),
        ({'options': '{"mixture": [{"size": 3}]}'}, "'size' cannot stand there"),
        ({'options': '{"mixture": [{"mixture": []}]}'}, "'mixture' cannot stand there"),
        ({'options': '{"mixture": []}'}, 'mixture'),
        ({'options': '{"eval": 3}'}, 'eval=3 must be an object'),
        ({'options': '[]'}, 'must be a JSON object'),
        ({'train_examples': 0}, 'say how many'),
        ({'train_examples': -1}, 'must not be negative'),
        ({'eval_source': 'reasoning_gym:chain_sum', 'eval_examples': 0}, r'data\.eval_examples=0: .* say how many'),
        ({'source': '/nowhere/p.jsonl'}, 'no such file'),
        ({'cache_dir': '/proc/data'}, 'data.cache_dir=.*cannot be written'),
    ],
)
def test_bad_settings(data_config, changes, error):
    with pytest.raises(ConfigError, match=error):
        load_problems(data_config(**changes), 'train')


@pytest.mark.parametrize(
    ('task', 'part', 'error'),
    [
        ('', {}, 'no such task; known: .*chain_sum'),
        ('composite', {}, 'no such task'),
        ('chain_sum', {'min_term': 3}, "chain_sum has no field 'min_term'; it has min_terms"),
        ('chain_sum', {'max_digits': 'x'}, 'chain_sum refuses'),
        ('chain_sum', {'level': 11}, 'must be a number from 0 to 10'),
        ('chain_sum', {'level': True}, 'must be a number from 0 to 10'),
        ('chain_sum', {'level': {'terms': 1}}, "no curriculum attribute 'terms'; it has num_terms, num_digits"),
        ('acre', {'level': 0}, 'acre has no curriculum'),
    ],
)
def test_bad_options_of_a_task(task, part, error):
    with pytest.raises(ConfigError, match=error):
        generated.task_config(task, part)


def test_levels():
    low = generated.task_config('chain_sum', {'level': 0, 'max_terms': 3})
    assert (low.min_terms, low.max_terms, low.min_digits, low.max_digits) == (2, 3, 1, 1)
    third = generated.task_config('chain_sum', {'level': 3})
    assert (third.min_terms, third.max_terms, third.max_digits) == (2, 5, 4)
    by_attribute = generated.task_config('chain_sum', {'level': {'num_terms': 10, '*': 0}})
    assert (by_attribute.max_terms, by_attribute.max_digits) == (12, 1)


def test_mixture_shares_and_held_out_options(data_config):
    options = {
        'max_digits': 6,
        'mixture': [{'min_terms': 2, 'max_terms': 2}, {'min_terms': 9, 'max_terms': 9}],
        'eval': {'min_terms': 12, 'max_terms': 12},
    }
    data = data_config(options=json.dumps(options))
    train = load_problems(data, 'train')
    assert sorted(p.metadata['num_terms'] for p in train) == [2] * 20 + [9] * 20
    assert json.loads(train[0].options) == {'max_digits': 6, 'min_terms': 2, 'max_terms': 2}
    assert {p.metadata['num_terms'] for p in load_problems(data, 'held_out')} == {12}


def test_the_same_generator_as_held_out_source(data_config):
    options = '{"min_terms": 2, "max_terms": 2, "max_digits": 1}'
    data = data_config(options=options, eval_source='reasoning_gym:chain_sum', train_examples=100, eval_examples=90)
    assert not set(texts(load_problems(data, 'train'))) & set(texts(load_problems(data, 'held_out')))


def test_another_held_out_task_has_its_own_options(data_config):
    data = data_config(options='{"max_terms": 3}', eval_source='reasoning_gym:bitwise_arithmetic')
    assert {p.source for p in load_problems(data, 'held_out')} == {'reasoning_gym:bitwise_arithmetic'}


def test_file_as_held_out_source(data_config, samples):
    data = data_config(eval_source=samples / 'aime.jsonl', eval_examples=0)
    assert [p.source for p in load_problems(data, 'held_out')] == ['aime'] * 5
    with pytest.raises(ConfigError, match=r'data\.eval_examples=9: .*aime.jsonl has 5 distinct problems'):
        load_problems(data_config(eval_source=samples / 'aime.jsonl', eval_examples=9), 'held_out')


@pytest.mark.parametrize('suffix', ['.jsonl', '.parquet'])
def test_files(data_config, samples, suffix):
    (path, *_) = sorted(samples.glob(f'*{suffix}'), reverse=True)
    data = data_config(source=path, train_examples=0, eval_examples=2)
    train, held_out = load_problems(data, 'train'), load_problems(data, 'held_out')
    assert len(held_out) == 2
    assert len(train) >= 4
    assert not set(texts(train)) & set(texts(held_out))
    assert train.at(0).answer


def test_file_rows_with_the_same_text_count_once(data_config, tmp_path):
    path = tmp_path / 'p.jsonl'
    rows = [{'problem': text, 'answer': '1'} for text in ('What is it?', 'what  is it? ', 'Another?', 'A third?')]
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    data = data_config(source=path, train_examples=0, eval_examples=1)
    train, held_out = load_problems(data, 'train'), load_problems(data, 'held_out')
    assert sorted(texts(train) + texts(held_out)) == ['A third?', 'Another?', 'What is it?']
    # A held-out file that repeats a training problem takes it out of the training set.
    evaluation = tmp_path / 'e.jsonl'
    evaluation.write_text('{"problem": "ANOTHER?", "answer": "1"}\n')
    data = data_config(source=path, eval_source=evaluation, train_examples=0, eval_examples=0)
    assert texts(load_problems(data, 'train')) == ['What is it?', 'A third?']
    with pytest.raises(ConfigError, match=r'train_examples=3: .* has 2 distinct problems beside 1 held-out'):
        load_problems(data_config(source=path, train_examples=3, eval_examples=1), 'train')
    with pytest.raises(ConfigError, match=r'eval_examples=3: .* has only 3 distinct problems'):
        load_problems(data_config(source=path, train_examples=0, eval_examples=3), 'train')


def test_changed_file_is_prepared_again(data_config, tmp_path):
    path = tmp_path / 'p.jsonl'
    path.write_text('{"problem": "a?", "answer": "1"}\n')
    data = data_config(source=path, train_examples=0, eval_examples=0)
    assert [p.answer for p in load_problems(data, 'train')] == ['1']
    path.write_text('{"problem": "a?", "answer": "2"}\n')
    assert [p.answer for p in load_problems(data, 'train')] == ['2']
    assert len(load_problems(data, 'held_out')) == 0


@pytest.mark.parametrize('name', ['prepared.json', 'dataset_info.json', '*train*'])
@pytest.mark.parametrize('kept_bytes', [0, 20, None])
def test_broken_prepared_data_is_named(data_config, name, kept_bytes):
    data = data_config(train_examples=5, eval_examples=1)
    load_problems(data, 'train')
    [folder] = pathlib.Path(data.cache_dir).iterdir()
    [file] = folder.glob(name)
    if kept_bytes is None:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:kept_bytes])
    if (name, kept_bytes) == ('prepared.json', None):
        return  # the folder of an interrupted copy
    with pytest.raises(ConfigError, match=rf'{folder}: the prepared data is broken'):
        load_problems(data, 'train')


def test_a_full_disk_is_named(data_config, monkeypatch):
    def fail(_):
        raise OSError('Not enough disk space.')

    monkeypatch.setattr(problems_module.PreparedProblems, 'download_and_prepare', fail)
    with pytest.raises(ConfigError, match=r'data\.cache_dir=.*cannot be written \(Not enough disk space'):
        load_problems(data_config(train_examples=5, eval_examples=1), 'train')


def test_order_is_kept_over_many_rows(data_config, tmp_path):
    path = tmp_path / 'p.jsonl'
    path.write_text(''.join(f'{{"problem": "number {i} é", "answer": "{i}"}}\n' for i in range(3000)))
    problems = load_problems(data_config(source=path, train_examples=0, eval_examples=0), 'train')
    assert [p.question for p in problems] == [f'number {i} é' for i in range(3000)]


def test_prepared_by_several_at_once(data_config):
    data = data_config(train_examples=300)
    script = textwrap.dedent(f"""
        from sparrow_jax.config import DataConfig
        from sparrow_jax.tasks.problems import load_problems
        problems = load_problems({data!r}, 'train')
        print(problems.fingerprint, len(problems), problems[299].question)
    """)

    def prepare(_):
        return subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(prepare, range(2)))) == 1
    assert len(list(pathlib.Path(data.cache_dir).iterdir())) == 1  # nothing left of those that came second


def test_tensorflow_and_jax_are_not_imported(data_config, tmp_path):
    # A decoy stands where TensorFlow could be: what looks for it finds it, and what imports it is seen.
    for name in ('tensorflow', 'torch'):
        (tmp_path / 'decoys' / name).mkdir(parents=True)
        (tmp_path / 'decoys' / name / '__init__.py').write_text('')
    script = textwrap.dedent(f"""
        import importlib.util, sys
        assert importlib.util.find_spec('tensorflow')
        from sparrow_jax.config import DataConfig
        from sparrow_jax.tasks.problems import load_problems
        problems = load_problems({data_config()!r}, 'train')
        problems.at(3)
        assert 'tensorflow_datasets' in sys.modules
        assert not {{'tensorflow', 'torch', 'jax'}} & set(sys.modules)
    """)
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path / 'decoys')}
    subprocess.run([sys.executable, '-c', script], env=environment, check=True)


def test_metadata_keeps_its_types():
    value = {'t': (1, [2, (3,)]), 's': {2, 1}, 'k': {1: 'a', (0, 1): 'b'}, 'plain': {'x': None}}
    assert generated.read_metadata(json.dumps(generated._plain(value))) == value


FIRST_EPOCH = [8, 3, 2, 4, 7, 0, 1, 9, 6, 5]


class FirstMessage:
    """A connection that ends the generator after its first message."""

    def send(self, rows):
        self.rows = rows
        raise BrokenPipeError


@pytest.mark.slow
def test_every_task_accepts_its_own_answers(monkeypatch):
    """What a record keeps is enough for the task's own verifier, for all tasks of reasoning-gym."""
    from reasoning_gym.factory import DATASETS

    monkeypatch.setattr(generated, '_MESSAGE_ROWS', 2)
    tasks = sorted(set(DATASETS) - {'composite'})
    assert len(tasks) > 100
    unverified = set()
    for task in tasks:
        connection = FirstMessage()
        with contextlib.suppress(BrokenPipeError):
            generated.generate(connection, task, [{}], 5)
        for record in connection.rows:
            entry = {**record, 'metadata': generated.read_metadata(record['metadata'])}
            if record['answer']:
                assert scoring.judge_task(task, record['options'], entry, record['answer']) >= 0.99, (task, record)
            else:
                unverified.add(task)
    assert unverified == {'boxnet', 'graph_color', 'propositional_logic', 'rubiks_cube', 'rush_hour'}
