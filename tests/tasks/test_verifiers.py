import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks import scoring, verifiers
from sparrow_jax.tasks.problems import Problem, load_problems
from sparrow_jax.tasks.verifiers import RewardError, Verifier

MATH = Problem(0, 'What is 2 + 2?', '4', 'sample', {})


@pytest.fixture(scope='module')
def both():
    """One verifier for the tests that need nothing special: mathematics and reasoning-gym tasks."""
    from sparrow_jax.config import DataConfig, RewardConfig

    data = DataConfig('reasoning_gym:chain_sum', 'auto', '', 1, 0, 'file.jsonl', 1, '', '', 'boxed')
    with Verifier(RewardConfig('', 0.99, 0.125, 2, 20.0, 0, 0.0), data) as verifier:
        yield verifier


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of reward functions and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text, name='my_rewards'):
        (tmp_path / f'{name}.py').write_text(textwrap.dedent(text))
        return name

    return write


def alive(pid):
    """Whether a process runs; one that is dead but not yet waited for does not."""
    stat = pathlib.Path(f'/proc/{pid}/stat')
    try:
        return stat.read_text().rpartition(')')[2].split()[0] != 'Z'
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pids, within_s=10.0):
    end = time.monotonic() + within_s
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def workers(verifier):
    return [judge.worker.pid for judge in verifier._judges]


@pytest.mark.parametrize(
    ('reference', 'answer', 'correct'),
    [
        ('4', '4', 1),
        ('4', '5', 0),
        ('24', '024', 1),
        ('1/2', r'\frac{1}{2}', 1),
        ('0.5', r'\dfrac12', 1),
        ('1000', '1{,}000', 1),
        (r'3\sqrt{2}', r'\sqrt{18}', 1),
        ('12', '12.', 1),
        ('10', r'10 \text{ cm}', 1),
        ('(1, 2)', '(1,2)', 1),
        ('(1, 2)', '(2, 1)', 0),
        (r'\{1, 2\}', r'\{2, 1\}', 1),
        (r'(-\infty, 3]', r'(-\infty,3]', 1),
        ('(x-7)(x+4)', 'x^2-3x-28', 1),
        ('Evelyn', r'\text{Evelyn}', 1),
        ('4', r'\[4\]', 1),
        ('4', '3 or 4', 0),  # a list of guesses
        ('4', '$3$ or $4$', 0),
        ('4', '3, 4', 0),
        ('4', '(' * 1_000_000, 0),
        ('4', r'\frac{', 0),
    ],
)
def test_mathematics(both, reference, answer, correct):
    (score,) = both.score([Problem(0, 'q', reference, 'sample', {})], [rf'So it is \boxed{{{answer}}}.'])
    assert (score.correct, score.timed_out) == (correct, False)
    assert score.reward == correct + 0.125 * score.format_valid


def test_reference_answers_of_the_samples_are_accepted(both, data_config, samples):
    for path in samples.iterdir():
        problems = list(load_problems(data_config(source=path, train_examples=0, eval_examples=0), 'train'))
        scores = both.score(problems, [rf'\boxed{{{p.answer}}}' for p in problems])
        assert all(s.correct == 1 for s in scores), path


def test_task_scores_are_thresholded_and_order_is_kept(both, data_config):
    problems = list(load_problems(data_config(), 'train'))
    texts, expected = [], []
    for i, problem in enumerate(problems * 3):
        kind = i % 4
        texts.append(
            [rf'\boxed{{{problem.answer}}}', r'\boxed{junk}', problem.answer, rf'\boxed{{{int(problem.answer) + 1}}}'][
                kind
            ]
        )
        expected.append((kind == 0, kind != 2))
    scores = both.score(problems * 3, texts)
    assert [(s.correct == 1, s.format_valid) for s in scores] == expected
    # Junk has a score of 0.01 in this task: it must not count.
    assert {s.reward for s in scores} == {1.125, 0.125, 0.0}
    assert scores == both.score(problems * 3, texts)


def test_task_without_reference_answer(both, data_config):
    data = data_config(source='reasoning_gym:propositional_logic', train_examples=3, eval_examples=0)
    problems = list(load_problems(data, 'train'))
    assert {p.answer for p in problems} == {''}
    scores = both.score(problems, [rf'\boxed{{{p.metadata["example_answer"]}}}' for p in problems])
    assert [s.correct for s in scores] == [1, 1, 1]
    assert both.score(problems[:1], [r'\boxed{Q ∧}'])[0].correct == 0


def test_options_of_the_problem_reach_its_verifier():
    # The tolerance of this task is one unit in the last of its decimal places.
    entry = {'answer': '0.50', 'question': '', 'metadata': {}}
    assert scoring.judge_task('decimal_arithmetic', '{"max_num_decimal_places": 2}', entry, '0.51') == 1
    assert scoring.judge_task('decimal_arithmetic', '{"max_num_decimal_places": 6}', entry, '0.51') < 0.99


@pytest.mark.parametrize('text', ['', 'no answer', r'\boxed{', r'\boxed{' * 300_000, '{' * 1_000_000, '\x00\ud800'])
def test_completions_without_an_answer(both, text):
    (score,) = both.score([MATH], [text])
    assert score == type(score)(0.0, 0.0, False, False, None)


@pytest.mark.parametrize('text', ['\x00', '\ud800', 'é' * 1_000_000, '9' * 1_000_000, '{}' * 100_000, r'\frac' * 300])
def test_odd_answers_are_wrong_and_cost_little(both, text, data_config):
    task = load_problems(data_config(), 'train')[0]
    start = time.monotonic()
    scores = both.score([MATH, task], [rf'\boxed{{{text}}}'] * 2)
    assert [(s.correct, s.timed_out) for s in scores] == [(0, False)] * 2
    assert time.monotonic() - start < 5


def test_wrong_use(both):
    assert both.score([], []) == []
    with pytest.raises(ValueError, match='1 problems but 2'):
        both.score([MATH], ['a', 'b'])


def test_thoughts_that_the_prompt_opens(reward_config, data_config):
    data = data_config(source='file.jsonl')
    with Verifier(reward_config(workers=1, format_bonus=0.5), data, prompt_opens_think=True) as verifier:
        scores = verifier.score([MATH] * 3, [r'x</think> \boxed{4}', r'\boxed{4}', r'<think>x</think> \boxed{4}'])
    assert [(s.reward, s.format_valid) for s in scores] == [(1.5, True), (0.0, False), (1.0, False)]


def test_hung_answer_is_a_time_out_and_its_worker_is_replaced(reward_config, data_config):
    # Holds the interpreter's lock in one multiplication after the other: no thread and no signal handler gets a turn.
    data = data_config(source='file.jsonl')
    with Verifier(reward_config(timeout_s=2.0), data) as verifier:
        before = workers(verifier)
        answers = ['4', '9^{9^{9^{9}}}', '5'] + ['4'] * 20
        start = time.monotonic()
        scores = verifier.score([MATH] * len(answers), [rf'\boxed{{{a}}}' for a in answers])
        assert time.monotonic() - start < 30
        assert [s.timed_out for s in scores] == [False, True] + [False] * 21
        assert [s.correct for s in scores] == [1, 0, 0] + [1] * 20
        assert scores[1].format_valid
        after = workers(verifier)
        assert len(after) == 2
        assert len(set(before) & set(after)) == 1
        assert gone(set(before) - set(after), 0)
        assert verifier.score([MATH], [r'\boxed{4}'])[0].correct == 1
    assert gone(before + after, 0)


def test_user_function(module, reward_config, data_config):
    name = module("""
        import sys
        print('printing must not disturb the connection')
        def length(problem, completion):
            assert not {'jax', 'tensorflow', 'reasoning_gym'} & set(sys.modules)
            assert (problem['question'], problem['answer'], problem['source']) == ('What is 2 + 2?', '4', 'sample')
            print(completion)
            return len(completion)
    """)
    config = reward_config(function=f'{name}:length', correct_threshold=3, format_bonus=0.5)
    with Verifier(config, data_config()) as verifier:
        scores = verifier.score([MATH] * 3, ['ab', r'\boxed{4}', 'abc'])
    assert [s.reward for s in scores] == [2, 9.5, 3]
    assert [s.correct for s in scores] == [0, 1, 1]


@pytest.mark.parametrize(
    ('function', 'error'),
    [
        ('no_such_module:f', "reward.function='no_such_module:f': No module named 'no_such_module'"),
        ('my_rewards:g', 'my_rewards .* has no function .g.'),
        ('my_rewards:constant', 'has no function'),
        ('broken_rewards:f', '(?s)importing broken_rewards failed.*ValueError: broken at import'),
        ('leaving_rewards:f', '(?s)importing leaving_rewards failed.*SystemExit: 3'),
        ('math:nosuch', r'math \(.*\) has no function'),
        ('sys:nosuch', r'sys \(no file\) has no function'),
        ('my_rewards:one_argument', r'is called as one_argument\(problem, completion\): too many positional arguments'),
    ],
)
def test_function_that_cannot_be_imported_is_an_error_at_the_start(module, reward_config, data_config, function, error):
    module('constant = 3\ndef f(problem, completion):\n    return 1.0\ndef one_argument(completion):\n    return 1.0\n')
    module('import sys\nsys.exit(3)\n', 'leaving_rewards')
    module("raise ValueError('broken at import')\n", 'broken_rewards')
    with pytest.raises(ConfigError, match=error):
        Verifier(reward_config(function=function), data_config())


@pytest.mark.parametrize(
    ('completion', 'error'),
    [
        ('raise', r"(?s)problem 0 \('What is 2 \+ 2\?'\): raised.*in f.*ZeroDivisionError"),
        ('nan', 'returned nan; it must return a finite number'),
        ('inf', 'returned inf; it must return a finite number'),
        ('none', 'returned None; it must return a number'),
        ('text', "returned '1'; it must return a number"),
        ('huge', 'returned 1000.*; it must return a number'),
        ('exit', r"(?s)problem 0 \('What is 2 \+ 2\?'\): raised.*in f.*SystemExit"),
    ],
)
def test_errors_of_a_user_function(module, reward_config, data_config, completion, error):
    name = module("""
        def f(problem, completion):
            if completion == 'raise':
                return 1 / 0
            if completion == 'exit':
                raise SystemExit(3)
            if completion == 'huge':
                return 10**400
            return {'nan': float('nan'), 'inf': float('inf'), 'none': None, 'text': '1', 'good': True}[completion]
    """)
    with Verifier(reward_config(function=f'{name}:f'), data_config()) as verifier:
        assert verifier.score([MATH], ['good'])[0].reward == 1
        pids = workers(verifier)
        with pytest.raises(RewardError, match=error):
            verifier.score([MATH] * 5, ['good', 'good', completion, 'good', 'good'])
        assert gone(pids, 0)
        with pytest.raises(RuntimeError, match='closed'):
            verifier.score([MATH], ['good'])


@pytest.mark.parametrize('process', [0, 1])
def test_two_processes_judge_half_each(process, module, reward_config, data_config, tmp_path, monkeypatch):
    name = module(f"""
        import pathlib
        def f(problem, completion):
            with open(pathlib.Path({str(tmp_path)!r}, 'judged'), 'a') as file:
                print(completion, file=file)
            return float(completion)
    """)
    of_process = [[0.1, 0.3, 0.5], [0.2, float('nan'), float('nan')]]  # the other had no time for the fourth
    others = np.asarray(of_process[1 - process])
    if process == 1:
        of_process[1][1] = 0.4

    def of_all(own):
        np.testing.assert_array_equal(own, of_process[process])
        return np.stack([own, others] if process == 0 else [others, own])

    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(jax, 'process_index', lambda: process)
    monkeypatch.setattr(verifiers.transfer, 'of_all', of_all)
    with Verifier(reward_config(function=f'{name}:f', workers=1), data_config()) as verifier:
        scores = verifier.score([MATH] * 5, ['0.1', '0.2', '0.3', '0.4', '0.5'])
    assert (tmp_path / 'judged').read_text().split() == ['0.1 0.3 0.5', '0.2 0.4'][process].split()
    assert [s.reward for s in scores] == [0.1, 0.2, 0.3, 0.0 if process == 0 else 0.4, 0.5]
    assert [s.timed_out for s in scores] == [False, False, False, process == 0, False]


def test_dying_worker_is_replaced_and_its_answer_has_no_verdict(module, reward_config, data_config, tmp_path):
    name = module(f"""
        import os, pathlib
        def f(problem, completion):
            if completion == 'die':
                os._exit(3)
            if completion == 'die once' and not pathlib.Path({str(tmp_path)!r}, 'died').exists():
                pathlib.Path({str(tmp_path)!r}, 'died').touch()
                os._exit(3)
            return 1.0
    """)
    with Verifier(reward_config(function=f'{name}:f'), data_config()) as verifier:
        scores = verifier.score([MATH] * 12, ['die', 'die once'] + ['live'] * 10)
        assert [s.timed_out for s in scores] == [True] + [False] * 11
        assert [s.reward for s in scores] == [0] + [1] * 11
        # Ended from outside between two calls: nothing is lost.
        for pid in workers(verifier):
            os.kill(pid, signal.SIGKILL)
        assert [s.reward for s in verifier.score([MATH] * 4, ['live'] * 4)] == [1] * 4


def test_worker_that_dies_while_it_starts_is_an_error(module, reward_config, data_config):
    name = module('import os\nos._exit(5)\n')
    with pytest.raises(RuntimeError, match='exit code 5 while it started'):
        Verifier(reward_config(function=f'{name}:f'), data_config())


HANGING = """
    import os, subprocess, sys
    def f(problem, completion):
        child = subprocess.Popen(['sleep', '1000'])
        with open(completion, 'a') as out:
            print(os.getpid(), child.pid, file=out)
        sum(range(10**15))  # in C, with the interpreter's lock
"""


def test_what_a_function_started_ends_with_its_worker(module, reward_config, data_config, tmp_path):
    name = module(HANGING)
    with Verifier(reward_config(function=f'{name}:f', workers=1, timeout_s=1.0), data_config()) as verifier:
        assert verifier.score([MATH], [str(tmp_path / 'pids')])[0].timed_out
        assert gone([int(pid) for pid in (tmp_path / 'pids').read_text().split()])


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_running_when_the_parent_dies(module, reward_config, data_config, tmp_path, how):
    name = module(HANGING)
    pids = tmp_path / 'pids'
    script = textwrap.dedent(f"""
        from sparrow_jax.config import DataConfig, RewardConfig
        from sparrow_jax.tasks.problems import Problem
        from sparrow_jax.tasks.verifiers import Verifier
        with Verifier({reward_config(function=f'{name}:f', timeout_s=500.0)!r}, {data_config()!r}) as verifier:
            print(*[judge.worker.pid for judge in verifier._judges], verifier._group._warden.pid, flush=True)
            verifier.score([Problem(0, 'q', '4', 's', {{}})] * 2, [{str(pids)!r}] * 2)
    """)
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, '-c', script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    all_pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(all_pids) == 3
    end = time.monotonic() + 20
    while (not pids.exists() or len(pids.read_text().split()) < 4) and time.monotonic() < end:
        time.sleep(0.05)
    all_pids += [int(pid) for pid in pids.read_text().split()]
    assert all(alive(pid) for pid in all_pids)
    parent.send_signal(how)
    parent.wait(20)
    assert gone(all_pids)


def test_workers_start_without_jax_and_leave_the_main_module_alone(tmp_path):
    # As under `python -m sparrow_jax.train`: a main module without the usual guard, which must not be run again.
    script = tmp_path / 'main_module.py'
    script.write_text(
        textwrap.dedent("""
            import pathlib, sys
            from sparrow_jax.config import DataConfig, RewardConfig
            from sparrow_jax.tasks.problems import Problem
            from sparrow_jax.tasks.verifiers import Verifier
            pathlib.Path('runs').open('a').write('x')
            data = DataConfig('file.jsonl', 'auto', '', 1, 0, '', 1, '', '', 'tag')
            with Verifier(RewardConfig('', 0.99, 0.0, 1, 20.0, 0, 0.0), data) as verifier:
                maps = pathlib.Path(f'/proc/{verifier._judges[0].worker.pid}/maps').read_text()
                (score,) = verifier.score([Problem(0, 'q', '4', 's', {})], ['<answer>4</answer>'])
            assert score.correct == 1
            assert 'jaxlib' not in maps and 'tensorflow' not in maps
        """)
    )
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True)
    assert (tmp_path / 'runs').read_text() == 'x'
