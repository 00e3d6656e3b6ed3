import json

import pyarrow
import pytest
from pyarrow import parquet

from sparrow_jax.config import ConfigError
from sparrow_jax.config_checks import LAYOUTS as CONFIG_LAYOUTS
from sparrow_jax.tasks.files import LAYOUTS, read_file


def test_every_layout_of_the_configuration_can_be_read():
    assert set(LAYOUTS) == set(CONFIG_LAYOUTS) - {'auto'}


@pytest.mark.parametrize('layout', sorted(LAYOUTS))
def test_samples(layout, samples):
    (path,) = samples.glob(f'{layout}.*')
    rows = read_file(path, layout)
    assert len(rows) >= 5
    assert rows == read_file(path, 'auto')  # the columns tell the layout


def test_what_is_read(samples):
    row = read_file(samples / 'dapo_math.parquet', 'auto')[0]
    assert row.question == 'The product of two consecutive positive even integers is 528. Find their sum.'
    assert (row.answer, row.source) == ('46', 'math_dapo')
    row = read_file(samples / 'gsm8k.jsonl', 'auto')[1]
    assert row.answer == '1680'  # 1,680 in the file
    assert row.metadata['solution'].startswith('A day it carries')
    row = read_file(samples / 'amc.jsonl', 'auto')[0]
    assert row.answer == '6'  # 6.0 in the file
    assert read_file(samples / 'aime.jsonl', 'auto')[0].answer == '024'
    assert read_file(samples / 'math500.jsonl', 'auto')[0].metadata['subject'] == 'Prealgebra'
    assert read_file(samples / 'polaris.jsonl', 'auto')[0].metadata == {'difficulty': '5/8'}
    assert read_file(samples / 'problem_answer.jsonl', 'auto')[1].answer == '1'  # a number in the file


@pytest.mark.parametrize(
    ('row', 'question', 'answer'),
    [
        ({'prompt': 'Why?', 'solution': '4', 'data_source': 'x'}, 'Why?', '4'),  # DAPO-Math without wrapping
        ({'Problem': 'Why?', 'Answer': 33}, 'Why?', '33'),
        ({'question': 'Why?', 'answer': '33'}, 'Why?', '33'),
    ],
)
def test_variants_of_layouts(tmp_path, row, question, answer):
    path = tmp_path / 'p.jsonl'
    path.write_text(json.dumps(row) + '\n')
    (read,) = read_file(path, 'auto')
    assert (read.question, read.answer) == (question, answer)


GOOD = '{"problem": "1 + 1?", "answer": "2"}'


@pytest.mark.parametrize(
    ('line', 'error'),
    [
        ('{"problem": "1 + 2?", ', 'p.jsonl:3: not valid JSON'),
        ('[1, 2]', 'p.jsonl:3: must be a JSON object'),
        ('[' * 100_000, 'p.jsonl:3: not valid JSON'),
        ('{"problem": "2?", "answer": ' + '9' * 5000 + '}', 'p.jsonl:3: not valid JSON'),
        ('{"problem": "2?"}', 'p.jsonl:3: no column answer'),
        ('{"question_text": "2?", "answer": "2"}', 'p.jsonl:3: no column problem'),
        ('{"problem": "  ", "answer": "2"}', "p.jsonl:3: 'problem' must"),
        ('{"problem": 5, "answer": "2"}', "p.jsonl:3: 'problem' must"),
        ('{"problem": "2?", "answer": ""}', "p.jsonl:3: 'answer' must"),
        ('{"problem": "2?", "answer": null}', "p.jsonl:3: 'answer' must"),
        ('{"problem": "2?", "answer": NaN}', "p.jsonl:3: 'answer' must"),
        ('{"problem": "2?", "answer": ["2"]}', "p.jsonl:3: 'answer' must"),
        ('{"problem": "2?", "answer": "2", "source": 4}', 'p.jsonl:3: source'),
        ('{"problem": "2?", "answer": "2", "source": "reasoning_gym:chain_sum"}', 'p.jsonl:3: source'),
        ('{"problem": "\\ud800?", "answer": "2"}', 'p.jsonl:3: holds half a surrogate pair'),
    ],
)
def test_broken_line_is_named(tmp_path, line, error):
    path = tmp_path / 'p.jsonl'
    path.write_text(f'{GOOD}\n\n{line}\n{GOOD}\n')
    with pytest.raises(ConfigError) as raised:
        read_file(path, 'problem_answer')
    assert error in str(raised.value)


def test_line_that_is_no_text_is_named(tmp_path):
    path = tmp_path / 'p.jsonl'
    path.write_bytes(f'{GOOD}\n'.encode() + b'{"problem": "\xff\xfe?", "answer": "2"}\n')
    with pytest.raises(ConfigError, match=r'p\.jsonl:2: not UTF-8'):
        read_file(path, 'auto')


def test_gsm8k_without_final_answer_is_named(tmp_path):
    path = tmp_path / 'p.jsonl'
    path.write_text('{"question": "a?", "answer": "x #### 2"}\n{"question": "b?", "answer": "3"}\n')
    with pytest.raises(ConfigError, match=r'p\.jsonl:2: .*####'):
        read_file(path, 'auto')


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match=r'data\.eval_source=.*no such file'):
        read_file(tmp_path / 'none.jsonl', 'auto', 'data.eval_source')
    with pytest.raises(ConfigError, match='no such file'):
        read_file(tmp_path, 'auto')
    (tmp_path / 'p.csv').write_text('problem,answer\n')
    with pytest.raises(ConfigError, match=r'must end in \.jsonl or \.parquet'):
        read_file(tmp_path / 'p.csv', 'auto')
    (tmp_path / 'empty.jsonl').write_text('\n')
    with pytest.raises(ConfigError, match='holds no problems'):
        read_file(tmp_path / 'empty.jsonl', 'auto')
    (tmp_path / 'odd.jsonl').write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(ConfigError, match='columns text, label fit no known layout'):
        read_file(tmp_path / 'odd.jsonl', 'auto')
    (tmp_path / 'p.parquet').write_bytes(b'PAR1 this is none')
    with pytest.raises(ConfigError, match='cannot be read as Parquet'):
        read_file(tmp_path / 'p.parquet', 'auto')
    table = pyarrow.Table.from_pylist([{'problem': 'a?', 'answer': '1'}, {'problem': 'b?', 'answer': None}])
    parquet.write_table(table, tmp_path / 'q.parquet')
    with pytest.raises(ConfigError, match=r"q\.parquet: row 2: 'answer' must"):
        read_file(tmp_path / 'q.parquet', 'auto')
    parquet.write_table(table.slice(0, 0), tmp_path / 'r.parquet')
    with pytest.raises(ConfigError, match='holds no problems'):
        read_file(tmp_path / 'r.parquet', 'auto')
