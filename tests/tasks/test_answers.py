import time

import pytest

from sparrow_jax.tasks.answers import last_boxed, last_tagged, read_answer


@pytest.mark.parametrize(
    ('text', 'answer'),
    [
        (r'so \boxed{4}.', '4'),
        (r'\boxed{1} no, \boxed{2}', '2'),
        (r'\boxed{\frac{1}{2}}', r'\frac{1}{2}'),
        (r'\boxed {  7 }', '7'),
        (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
        (r'\boxed{\left\{ x \right.} }', r'\left\{ x \right.'),  # an escaped brace opens nothing
        (r'\boxed{a\\{b}}', r'a\\{b}'),  # after a line break a brace does
        (r'\boxed{\boxed{3}}', '3'),
        ('\\boxed{a\nb}', 'a\nb'),
        (r'\boxed{}', None),
        (r'\boxed{4', None),
        (r'\boxed{1} then \boxed{', None),  # cut off: the last answer was not given
        (r'boxed{4}', None),
        ('', None),
    ],
)
def test_last_boxed(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ('text', 'answer'),
    [
        ('<answer>4</answer>', '4'),
        ('<answer>1</answer><answer> 2\n</answer> end', '2'),
        ('<answer>a <b> c</answer>', 'a <b> c'),
        ('<answer></answer>', None),
        ('<answer>4', None),
        ('4</answer>', None),
        ('</answer>4<answer>', None),
    ],
)
def test_last_tagged(text, answer):
    assert last_tagged(text) == answer


@pytest.mark.parametrize(
    ('completion', 'opened', 'answer', 'valid'),
    [
        (r'x</think> \boxed{4}', True, '4', True),  # the prompt ends in <think>
        (r'<think>x</think> \boxed{4}', False, '4', True),
        (r'\boxed{4}', False, '4', True),
        (r'<think>a</think> b <think>c</think> \boxed{4}', False, '4', True),
        (r'x</think> \boxed{4}', False, '4', False),  # closes what nobody opened
        (r'<think>x</think> \boxed{4}', True, '4', False),  # opens what is open
        (r'</think></think> \boxed{4}', True, '4', False),
        (r'\boxed{4}', True, None, False),  # never stops thinking
        (r'<think> \boxed{4}', False, None, False),
        (r'\boxed{3}</think> so it is 4', True, None, False),  # a box inside the thought is no answer
        (r'x</think> \boxed{4} <think> \boxed{5}', True, None, False),
    ],
)
def test_thoughts(completion, opened, answer, valid):
    reading = read_answer(completion, 'boxed', opened)
    assert (reading.answer, reading.format_valid) == (answer, valid)


def test_completion_of_an_open_thought_is_well_formed_in_tag_format():
    assert read_answer('x</think> <answer>4</answer>', 'tag', True).format_valid


@pytest.mark.parametrize(
    'unit', ['\\boxed{', '{', '<think>', '</think>', '<answer>', '\\boxed ', '\\', '</answer><answer>']
)
def test_time_is_linear_in_the_text(unit):
    start = time.monotonic()
    for format_ in ('boxed', 'tag'):
        read_answer('\\boxed{' + unit * 300_000, format_)
    assert time.monotonic() - start < 5  # a quadratic reader would take hours
