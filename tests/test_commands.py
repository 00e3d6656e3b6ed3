"""A mistake on the command line is one sentence and exit code 2; otherwise the command gets validated settings."""

import errno
import re
import signal
import subprocess
import sys
import textwrap

import pytest
from absl import flags

from sparrow_jax import commands
from sparrow_jax.config import ConfigError

CONFIG = """
    from configs import base

    def get_config(arg=''):
        if arg not in ('', 'big'):
            raise ValueError(f"the argument must be '' or 'big', not {arg!r}")
        c = base.get_config()
        c.model.path = 'weights'
        c.seed = 7 if arg else 1
        return c
"""


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / 'mine.py'
    file.write_text(textwrap.dedent(CONFIG))
    return file


def call(arguments, main=None, **options):
    """Exit code, and what main got."""
    got = {}

    def record(*args, **more):
        got['args'], got['more'] = args, more
        return 5

    with pytest.raises(SystemExit) as exit_:
        commands.run(main or record, argv=['prog', *arguments], **options)
    return exit_.value.code, got


def test_the_command_gets_the_validated_settings_with_overrides_in_any_place(config_file):
    code, got = call(
        [
            '--config.rollout.temperature=0.5',
            '--workdir=w',
            f'--config={config_file}:big',
            '--config.steps',
            '12',
            '--noconfig.model.remat',
            '--config.schedule.dense_layers=(0,3)',
            '--config.optimizer.learning_rate=1',
            '--config.data.source=reasoning_gym:a=b',
        ]
    )
    assert code == 5
    run, workdir = got['args']
    assert (workdir, run.seed, run.steps, run.rollout.temperature) == ('w', 7, 12, 0.5)
    assert (run.model.remat, run.schedule.dense_layers, run.optimizer.learning_rate) == (False, (0, 3), 1.0)
    assert run.data.source == 'reasoning_gym:a=b'
    assert got['more'] == {}


MISTAKES = [
    (['--workdir=w'], r'--config: missing'),
    (['--config='], r'--config: missing'),
    (['--config={config}'], r'--workdir: missing'),
    (['--config=nowhere.py', '--workdir=w'], r'--config=nowhere\.py: no such file'),
    (['--config={folder}', '--workdir=w'], r'is a folder \(.*has mine\.py\)'),
    (['--config={config}:huge', '--workdir=w'], r"mine\.py:huge: the argument must be '' or 'big'"),
    (
        ['--config={config}', '--workdir=w', '--config.stepz=1'],
        r'--config\.stepz: no such field, did you mean --config\.steps\?',
    ),
    (
        ['--config={config}', '--workdir=w', '--config.temperature=1'],
        r'did you mean .* or --config\.rollout\.temperature\?',
    ),
    (['--config={config}', '--workdir=w', '--config.steps.x=1'], r'--config\.steps\.x: no such field'),
    (['--config={config}', '--workdir=w', '--config.model=1'], r'--config\.model: is a section; .* path, '),
    (
        ['--config={config}', '--workdir=w', '--config.steps=many'],
        r'--config\.steps=many: must be of type int, like 100',
    ),
    (
        ['--config={config}', '--workdir=w', '--config.model.remat=3'],
        r'--config\.model\.remat=3: must be of type bool, like True',
    ),
    (['--config={config}', '--workdir=w', '--config.steps'], r'--config\.steps: give a value'),
    (
        ['--config={config}', '--workdir=w', '--config.rollout.page_tokens=24'],
        r'rollout\.page_tokens=24: must be a power of two',
    ),
    (['--config={config}', '--workdir=w', '--wrokdir=x'], r"Unknown command line flag 'wrokdir'"),
    (['--config={config}', '--workdir=w', 'stray'], r"'stray' is not a flag"),
]


@pytest.mark.parametrize(('arguments', 'words'), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, config_file, capsys, monkeypatch):
    monkeypatch.chdir(config_file.parent)
    before = sorted(config_file.parent.iterdir())
    code, got = call([a.format(config=config_file, folder=config_file.parent) for a in arguments])
    captured = capsys.readouterr()
    assert code == 2
    assert got == {}
    assert captured.out == ''
    assert re.search(words, captured.err)
    assert captured.err.startswith('error: ')
    assert captured.err.count('\n') == 1
    assert [p for p in sorted(config_file.parent.iterdir()) if p.name != '__pycache__'] == before


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('def get_config(:', 'line 1 is not Python'),
        ('import no_such_module', 'cannot be imported'),
        ('x = 1', 'has no function get_config'),
        ('def get_config():\n    return {}', 'returned dict, not a ConfigDict'),
        ('\n1 / 0\ndef get_config():\n    pass', r'line 2 \(1 / 0\) raised ZeroDivisionError: division by zero'),
        (
            'from configs import base\ndef get_config():\n    c = base.get_config()\n    c.rolout.slots = 3\n',
            r'line 4 \(c\.rolout\.slots = 3\) raised AttributeError: .*rolout',
        ),
        ('get_config = 3', 'has no function get_config'),
    ],
)
def test_a_broken_config_file_is_named(text, words, tmp_path):
    file = tmp_path / 'broken.py'
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        commands.load_config(str(file))
    assert '\n' not in str(raised.value)
    if text.startswith('def get_config():'):
        with pytest.raises(ConfigError, match='takes no argument'):
            commands.load_config(f'{file}:big')


def define_prompt(values):
    flags.DEFINE_string('prompt', None, 'the question', flag_values=values)
    flags.DEFINE_integer('count', 3, 'how many answers', flag_values=values)


def test_a_command_s_own_flags_reach_it_as_keywords(config_file, capsys):
    options = {'define_flags': define_prompt, 'workdir_required': False}
    _, got = call([f'--config={config_file}', '--prompt=1 + 1 = ?'], **options)
    assert got['args'][1] == ''
    assert got['more'] == {'prompt': '1 + 1 = ?', 'count': 3}
    code, _ = call([f'--config={config_file}', '--count=4'], **options)
    assert code == 2
    assert capsys.readouterr().err == 'error: --prompt: missing; the question\n'


def test_a_command_on_a_work_directory_takes_no_config(config_file, capsys):
    _, got = call(['--workdir=w'], config_required=False)
    assert got['args'] == ('w',)
    code, _ = call(['--workdir=w', f'--config={config_file}'], config_required=False)
    assert code == 2
    assert 'reads the configuration of --workdir' in capsys.readouterr().err


def test_help_lists_the_flags(capsys):
    code, got = call(['--help'], define_flags=define_prompt)
    assert code == 0
    assert got == {}
    out = capsys.readouterr().out
    assert '--config.section.field=value' in out
    assert '--prompt=...' in out
    assert 'how many answers (default 3)' in out


def raising(error):
    def main(_run, _workdir):
        raise error

    return main


def test_errors_of_the_command_itself(config_file, capsys):
    arguments = [f'--config={config_file}', '--workdir=w']
    assert call(arguments, raising(ConfigError('weights: no such folder')))[0] == 2
    assert capsys.readouterr().err == 'error: weights: no such folder\n'
    assert call(arguments, raising(KeyboardInterrupt()))[0] == 130
    assert call(arguments, lambda *_: None)[0] == 0
    assert call(arguments, raising(OSError(errno.ENOSPC, 'No space left on device', 'runs/w')))[0] == 2
    assert capsys.readouterr().err == 'error: runs/w: No space left on device\n'
    with pytest.raises(FileNotFoundError):
        commands.run(raising(FileNotFoundError(errno.ENOENT, 'no such file')), argv=['prog', *arguments])
    with pytest.raises(ZeroDivisionError):
        commands.run(raising(ZeroDivisionError()), argv=['prog', *arguments])


PROCESS = """
    import time
    from sparrow_jax import commands

    def main(run, workdir):
        try:
            print('ready', flush=True)
            time.sleep(30)
        finally:
            print('saved', flush=True)

    commands.run(main)
"""


def test_ctrl_c_ends_the_command_without_a_traceback_after_it_has_saved(config_file):
    with subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(PROCESS), f'--config={config_file}', '--workdir=w'],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == 'ready\n'
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (out, err, process.returncode) == ('saved\n', '', 130)


def test_a_mistake_costs_no_import_of_jax():
    code = 'import sys; from sparrow_jax import commands; sys.exit("jax" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
