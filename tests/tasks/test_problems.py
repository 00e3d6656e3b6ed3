import json
import os
import pathlib
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks import generated
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
        data = data_config(source='reasoning_gym:ransom_note', train_examples=5, eval_examples=1, cache_dir=tmp_path / str(i))
        script = f'from sparrow_jax.tasks.problems import *; print(load_problems({data!r}, "train").fingerprint)'
        script = 'from sparrow_jax.config import DataConfig; ' + script
        environment = {**os.environ, 'PYTHONHASHSEED': hash_seed}
        seen.add(subprocess.run([sys.executable, '-c', script], env=environment, capture_output=True, check=True).stdout)
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
        ({'source': 'reasoning_gym:chainsum'}, 'near names: chain_sum'),
        ({'source': 'reasoning_gym:'}, 'no such task; known: .*chain_sum'),
        ({'source': 'reasoning_gym:composite'}, 'no such task'),
        ({'options': '{"min_term": 3}'}, "chain_sum has no field 'min_term'; it has min_terms"),
        ({'options': '{"min_terms": 9, "max_terms": 2}'}, 'chain_sum refuses .*max_terms must be'),
        ({'options': '{"max_digits": "x"}'}, 'chain_sum refuses'),
        ({'options': '{"seed": 3}'}, "'seed' cannot stand there; data.seed"),
        ({'options': '{"mixture": [{"size": 3}]}'}, "'size' cannot stand there"),
        ({'options': '{"mixture": []}'}, 'mixture'),
        ({'options': '{"level": 11}'}, 'must be a number from 0 to 10'),
        ({'options': '{"level": true}'}, 'must be a number from 0 to 10'),
        ({'options': '{"level": {"terms": 1}}'}, "no curriculum attribute 'terms'; it has num_terms, num_digits"),
        ({'source': 'reasoning_gym:acre', 'options': '{"level": 0}'}, 'acre has no curriculum'),
        ({'options': '{"eval": 3}'}, 'eval=3 must be an object'),
        ({'options': '[]'}, 'must be a JSON object'),
        ({'train_examples': 0}, 'say how many'),
        ({'train_examples': -1}, 'must not be negative'),
        ({'source': '/nowhere/p.jsonl'}, 'no such file'),
        ({'cache_dir': '/proc/data'}, 'data.cache_dir=.*cannot be written'),
    ],
)
def test_bad_settings(data_config, changes, error):
    with pytest.raises(ConfigError, match=error):
        load_problems(data_config(**changes), 'train')


def test_levels_and_mixtures(data_config):
    low = load_problems(data_config(options='{"level": 0, "max_terms": 3}'), 'train')
    assert {p.metadata['num_digits'] for p in low} == {1}
    assert {p.metadata['num_terms'] for p in low} == {2, 3}
    options = {'max_digits': 6, 'mixture': [{'min_terms': 2, 'max_terms': 2}, {'min_terms': 9, 'max_terms': 9}]}
    mixed = load_problems(data_config(options=json.dumps(options)), 'train')
    assert sorted(p.metadata['num_terms'] for p in mixed) == [2] * 20 + [9] * 20
    by_attribute = load_problems(data_config(options='{"level": {"num_terms": 10, "*": 0}}'), 'train')
    assert max(p.metadata['num_terms'] for p in by_attribute) > 6
    assert {p.metadata['num_digits'] for p in by_attribute} == {1}


def test_held_out_options_and_sources(data_config, samples):
    harder = data_config(options='{"max_terms": 3, "eval": {"min_terms": 8, "max_terms": 8}}')
    assert {p.metadata['num_terms'] for p in load_problems(harder, 'held_out')} == {8}
    assert max(p.metadata['num_terms'] for p in load_problems(harder, 'train')) == 3
    # The same generator as a source of its own: still no shared text.
    small = '{"min_terms": 2, "max_terms": 2, "max_digits": 1}'
    same = data_config(options=small, eval_source='reasoning_gym:chain_sum', train_examples=100, eval_examples=90)
    assert not set(texts(load_problems(same, 'train'))) & set(texts(load_problems(same, 'held_out')))
    other = data_config(options=small, eval_source='reasoning_gym:bitwise_arithmetic')
    assert {p.source for p in load_problems(other, 'held_out')} == {'reasoning_gym:bitwise_arithmetic'}
    file = data_config(eval_source=samples / 'aime.jsonl', eval_examples=0)
    assert [p.source for p in load_problems(file, 'held_out')] == ['aime'] * 5
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


def test_order_is_kept_over_many_rows(data_config, tmp_path):
    path = tmp_path / 'p.jsonl'
    path.write_text(''.join(f'{{"problem": "number {i} é", "answer": "{i}"}}\n' for i in range(3000)))
    problems = load_problems(data_config(source=path, train_examples=0, eval_examples=0), 'train')
    assert [p.question for p in problems] == [f'number {i} é' for i in range(3000)]


def test_prepared_by_several_at_once(data_config, tmp_path):
    data = data_config(train_examples=300)
    script = textwrap.dedent(f"""
        from sparrow_jax.config import DataConfig
        from sparrow_jax.tasks.problems import load_problems
        problems = load_problems({data!r}, 'train')
        print(problems.fingerprint, len(problems), problems[299].question)
    """)

    def prepare(_):
        return subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True).stdout

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(prepare, range(3)))) == 1
    assert len(list(pathlib.Path(data.cache_dir).iterdir())) == 1  # nothing left of those that came second


def test_tensorflow_and_jax_are_not_imported(data_config):
    # An import hook sees attempts even where TensorFlow is not installed, or where the attempt is caught.
    script = textwrap.dedent(f"""
        import sys
        tried = set()
        class Watch:
            def find_spec(self, name, path=None, target=None):
                tried.add(name.split('.')[0])
        sys.meta_path.insert(0, Watch())
        from sparrow_jax.config import DataConfig
        from sparrow_jax.tasks.problems import load_problems
        problems = load_problems({data_config()!r}, 'train')
        problems.at(3)
        assert 'tensorflow_datasets' in tried
        assert not tried & {{'tensorflow', 'jax', 'torch'}}, tried
    """)
    subprocess.run([sys.executable, '-c', script], check=True)


def test_metadata_keeps_its_types():
    value = {'t': (1, [2, (3,)]), 's': {2, 1}, 'k': {1: 'a', (0, 1): 'b'}, 'plain': {'x': None}}
    assert generated.read_metadata(json.dumps(generated._plain(value))) == value


FIRST_EPOCH = [8, 3, 2, 4, 7, 0, 1, 9, 6, 5]
