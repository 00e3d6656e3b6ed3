"""What the README shows runs as shown."""

import json
import pathlib
import re

from sparrow_jax.sparsity.schedules import FILE_FIELDS, POLICY_FIELD

README = (pathlib.Path(__file__).parents[1] / 'README.md').read_text()


def block(language):
    [text] = re.findall(rf'```{language}\n(.*?)```', README, re.DOTALL)
    return text


def test_the_reward_of_ones_own_credits_a_right_answer():
    names: dict = {}
    exec(block('python'), names)
    reward = names['short_and_right']
    problem = {'question': 'What is 6 * 7?', 'answer': '42'}
    threshold = 0.99  # reward.correct_threshold
    assert reward(problem, 'Six times seven ' * 40 + r'is \boxed{42}.') >= threshold
    assert reward(problem, r'It is \boxed{421}.') < 0


def test_the_schedule_has_the_fields_of_a_schedule_file():
    assert set(json.loads(block('json'))) == {*FILE_FIELDS, POLICY_FIELD}


def test_it_opens_with_the_two_commands():
    commands = re.findall(r'^    (make \w+)', README, re.MULTILINE)
    assert commands[:2] == ['make demo', 'make test']
