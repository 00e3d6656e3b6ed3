"""Worked solutions against the task's own scorer, and the tokenizer made for them."""

import json
import pathlib
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import reasoning_gym
from transformers import AutoTokenizer

from configs import tiny
from sparrow_jax.config import ConfigError, resolve
from sparrow_jax.tasks.worked import CAREFUL_FRACTION, STYLES, supported_tasks, worked_solution

ROOT = pathlib.Path(__file__).parents[2]
START = ROOT / 'configs' / 'tiny_start'


def _problems(size, seed=3):
    config = tiny.get_config()
    task = config.data.source.split(':')[1]
    dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(config.data.options))
    items = list(dataset)
    problems = [
        SimpleNamespace(index=i, source=config.data.source, question=item['question'], metadata=item['metadata'])
        for i, item in enumerate(items)
    ]
    return problems, [lambda answer, item=item: dataset.score_answer(answer, item) for item in items]


def _answer(text):
    return re.fullmatch(r'<think>\n.*\n</think>\n\\boxed\{(\d+)\}', text, re.DOTALL).group(1)


@pytest.fixture(scope='module')
def tokenizer():
    return AutoTokenizer.from_pretrained(START)


def test_literal_solutions_of_both_styles():
    problem = SimpleNamespace(index=0, source='reasoning_gym:count_bits', question='', metadata={'number': 5001})
    careful = """<think>
Every bit:
5001 odd 1
2500 even 1
1250 even 1
625 odd 2
312 even 2
156 even 2
78 even 2
39 odd 3
19 odd 4
9 odd 5
4 even 5
2 even 5
1 odd 6
</think>
\\boxed{6}"""
    hasty = """<think>
In short:
5001 odd 1
2500 even 1
1250 even 1
625, say 5 more: 6
</think>
\\boxed{6}"""
    assert worked_solution(problem, style='careful') == careful
    assert worked_solution(problem, style='hasty') == hasty


def test_careful_is_always_right_and_hasty_seldom():
    problems, scorers = _problems(400)
    right = {
        style: sum(
            score(_answer(worked_solution(p, style=style))) == 1 for p, score in zip(problems, scorers, strict=True)
        )
        for style in STYLES
    }
    assert right['careful'] == 400
    assert 0.18 < right['hasty'] / 400 < 0.33


def test_style_is_a_pure_function_of_problem_and_seed():
    problems, _ = _problems(600)
    first = [worked_solution(p, seed=1) for p in problems]
    assert first == [worked_solution(p, seed=1) for p in reversed(problems)][::-1]
    other = [worked_solution(p, seed=2) for p in problems]
    for draw in (first, other):
        assert abs(sum('Every bit' in text for text in draw) / 600 - CAREFUL_FRACTION) < 0.06
    assert 100 < sum(a != b for a, b in zip(first, other, strict=True)) < 400  # 2 * 0.3 * 0.7 of 600 is 252


def test_unknown_task_and_style_are_named():
    problem = SimpleNamespace(index=0, source='reasoning_gym:sudoku', question='', metadata={})
    with pytest.raises(ConfigError, match=r'sudoku.*count_bits'):
        worked_solution(problem)
    with pytest.raises(ConfigError, match=r'lazy.*careful, hasty'):
        worked_solution(_problems(1)[0][0], style='lazy')
    assert supported_tasks() == ('count_bits', 'trails')


def test_tokenizer_has_512_tokens_and_single_digits(tokenizer):
    assert len(tokenizer) == 512
    assert sorted(tokenizer.get_vocab().values()) == list(range(512))
    assert all(len(text) == 1 for text in tokenizer.get_vocab() if re.search(r'\d', text, re.ASCII))
    ends = json.loads((START / 'generation_config.json').read_text())['eos_token_id']
    assert tokenizer.convert_ids_to_tokens(ends) == ['<|endoftext|>', '<|im_end|>']
    assert tokenizer.pad_token == '<|endoftext|>'
    assert tokenizer.eos_token == '<|im_end|>'


def test_any_text_round_trips(tokenizer):
    rng = random.Random(0)
    texts = [''.join(chr(rng.randrange(1, 0xD800)) for _ in range(200)) for _ in range(20)]
    texts += ['  two  spaces \r\n\t', ' a', 'a ', '', '12, 345.60 = -7 ', 'naïve 数学 🙂', 'a <think> b </think>\n']
    for text in texts:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_chat_template_with_system_message_and_thinking_switch(tokenizer):
    messages = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': '1 + 1 ='}]
    start = '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n'

    def render(**options):
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)

    assert render() == render(enable_thinking=True) == start
    assert render(enable_thinking=False) == start + '<think>\n\n</think>\n\n'


def test_lengths_fit_the_configuration(tokenizer):
    config = tiny.get_config()
    problems, _ = _problems(300)
    prompts, lengths = [], {style: [] for style in STYLES}
    for problem in problems:
        content = f'{problem.question}\n{config.data.instruction}'
        text = tokenizer.apply_chat_template(
            [{'role': 'user', 'content': content}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(len(tokenizer(text).input_ids))
        for style in STYLES:
            lengths[style].append(len(tokenizer(worked_solution(problem, style=style)).input_ids) + 1)
    assert max(prompts) <= config.rollout.max_prompt_tokens
    assert max(lengths['careful']) <= config.rollout.max_response_tokens
    mean = {style: sum(values) / len(values) for style, values in lengths.items()}
    assert 160 < mean['hasty'] < 180 < 205 < mean['careful'] < 225


@pytest.mark.parametrize('arg', ['', 'scratch', 'smoke'])
def test_configurations_resolve(arg):
    run = resolve(tiny.get_config(arg))
    assert run.model.shape.vocab_size == 512
    assert run.phase == ('supervised' if arg == 'scratch' else 'rl')


@pytest.mark.slow
def test_committed_tokenizer_is_what_the_script_makes(tmp_path):
    script = ROOT / 'scripts' / 'make_tiny_tokenizer.py'
    subprocess.run([sys.executable, script, f'--out={tmp_path}'], check=True, cwd=ROOT)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (START / path.name).read_bytes(), path.name
