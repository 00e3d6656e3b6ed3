"""The task of trails: its problems, its scorer, and its worked solutions read by the verifier's own eyes."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from configs import stability
from sparrow_jax.config import resolve
from sparrow_jax.tasks import generated, scoring
from sparrow_jax.tasks.answers import read_answer
from sparrow_jax.tasks.prompts import PromptEncoder
from sparrow_jax.tasks.trails import TrailsConfig, TrailsDataset
from sparrow_jax.tasks.worked import worked_solution

FEW = {'digits': 2, 'width': 1, 'min_steps': 1, 'max_steps': 2, 'starts': 2}
PROBLEMS = 100


def items(count=PROBLEMS, **options):
    dataset = TrailsDataset(TrailsConfig(seed=5, **options))
    return dataset, [dataset[i] for i in range(count)]


def problem(item):
    return SimpleNamespace(index=0, source='reasoning_gym:trails', question=item['question'], metadata=item['metadata'])


def table(item):
    lines = item['question'].split('Table:\n')[1].split('\nStarts:\n')[0].splitlines()
    return dict(line.split() for line in lines), item['question'].split('Starts:\n')[1].split()


@pytest.fixture(scope='module')
def full():
    """Problems as the experiment has them."""
    return items(**json.loads(stability.get_config().data.options))


def test_trails_follow_the_table_to_its_ends(full):
    for item in full[1]:
        after, starts = table(item)
        trails = item['metadata']['trails']
        assert len(after) == 192
        assert [trail[0] for trail in trails] == starts
        assert len(set(starts)) == 32
        for trail in trails:
            assert 3 <= len(trail) - 1 <= 8
            assert [after[number] for number in trail[:-1]] == trail[1:]
            assert trail[-1] in ('000', '111', '222', '333')
            assert trail[-1] not in after


def test_problems_are_a_function_of_their_number_and_differ():
    _, some = items(20, **FEW)
    dataset = TrailsDataset(TrailsConfig(seed=7, **FEW))
    assert dataset[3] == some[5]  # seed + i
    assert len({item['question'] for item in some}) == 20


def test_the_score_is_the_share_of_right_ends():
    dataset, (item, *_) = items(1, **FEW | {'starts': 2})
    (first, *_, end), (second, *_, other) = item['metadata']['trails']
    wrong = '99'
    for answer, score in (
        (f'{first}={end} {second}={other}', 1.0),
        (f'{second}={other}, {first}={end}', 1.0),
        (f'{first}={end} {second}={wrong}', 0.5),
        (f'{first}={end} {first}={wrong} {second}={other}', 0.5),
        (f'{first}={end}', 0.5),
        ('', 0.0),
        (None, 0.0),
    ):
        assert dataset.score_answer(answer, item) == score


def test_careful_solutions_are_right_and_hasty_ones_on_a_third(full):
    dataset, problems = full
    threshold = stability.get_config().reward.correct_threshold
    right = {}
    for style in ('careful', 'hasty'):
        answers = [read_answer(worked_solution(problem(item), style=style), 'boxed') for item in problems]
        assert all(reading.format_valid for reading in answers)
        scores = [dataset.score_answer(one.answer, item) for one, item in zip(answers, problems, strict=True)]
        right[style] = sum(score >= threshold for score in scores) / PROBLEMS
    assert right['careful'] == 1
    assert 0.2 <= right['hasty'] <= 0.45
    # The verifier's judge finds the task by its name.
    item, answer = problems[0], f'{problems[0]["metadata"]["trails"][0][0]}=000'
    options = stability.get_config().data.options
    assert scoring.judge_task('trails', options, item, answer) == dataset.score_answer(answer, item)


def test_a_literal_solution():
    trails = [['47', '82', '00'], ['15', '11']]
    item = {'question': '', 'metadata': {'trails': trails}}
    assert worked_solution(problem(item), style='careful') == (
        '<think>\nEvery step:\n47 82 00\n47=00\n15 11\n15=11\n</think>\n\\boxed{47=00 15=11}'
    )
    assert worked_solution(problem(item), style='hasty') == (
        '<think>\nIn short:\nmost say 00\n</think>\n\\boxed{47=00 15=00}'
    )


def test_prompts_and_solutions_fit_the_experiment(full):
    run = resolve(stability.get_config('start'))
    tokenizer = AutoTokenizer.from_pretrained('configs/tiny_start')
    encoder = PromptEncoder(run.tokenizer, run.data, '', tokenizer=tokenizer)
    lengths = {'careful': [], 'hasty': []}
    for item in full[1][:20]:
        for style, found in lengths.items():
            prompt, response = encoder.encode_worked(problem(item), worked_solution(problem(item), style=style))
            assert len(prompt) <= run.rollout.max_prompt_tokens
            found.append(len(response))
    assert 1200 < min(lengths['careful']) <= max(lengths['careful']) < run.rollout.max_response_tokens
    assert max(lengths['hasty']) < 300
    # Ids of numbers are those of their digits, wherever they stand: a look-up has the same tokens as what it finds.
    digits = tokenizer('482', add_special_tokens=False)['input_ids']
    for text in ('\n482 905', ' 482\n', '482=000', '{482='):
        ids = tokenizer(text, add_special_tokens=False)['input_ids']
        assert any(ids[i : i + 3] == digits for i in range(len(ids) - 2)), text


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'min_steps': 9}, 'min_steps=9: must be from 1 to max_steps=8'),
        ({'starts': 37}, r'starts=37: must be from 1 to width \* \(max_steps - min_steps \+ 1\) = 36'),
        ({'digits': 2}, 'the table needs 192 numbers, and 81 have 2 digits'),
        ({'common': 2}, 'common=2: must be from 0 to 1'),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        TrailsConfig(**options).validate()
    with pytest.raises(ValueError, match=message):
        generated.task_config('trails', options)
