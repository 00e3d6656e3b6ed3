"""A person sees one plain line per step in a file, and an aligned table with a live line on a terminal of any width."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap
import time

import pytest

from sparrow_jax import console as console_module
from sparrow_jax.console import Column, Console, notice_once, spark

METRICS = {
    'critic/score/mean': 0.25,
    'response_length/mean': 1234.5,
    'response_length/clip_ratio': 0.031,
    'sparse/alpha_p05': None,
    'rollout_corr/kl': float('nan'),
    'timing_s/step': 83.4,
}


@pytest.fixture(autouse=True)
def _forget_notices(monkeypatch):
    monkeypatch.setattr(console_module, '_told', set())


class Terminal(io.StringIO):
    encoding = 'utf-8'

    def isatty(self):
        return True


def show(width, monkeypatch, draw, columns=console_module.RL_COLUMNS):
    """What a terminal of that width got, and the console's lines without control sequences."""
    monkeypatch.setenv('COLUMNS', str(width))
    monkeypatch.setenv('TERM', 'xterm-256color')
    terminal = Terminal()
    with Console(steps=120, columns=columns, stream=terminal) as console:
        draw(console)
    raw = terminal.getvalue()
    return raw, re.sub(r'\x1b\[[0-9;?]*[A-Za-z]', '', raw).splitlines()


def test_off_a_terminal_each_step_is_one_plain_line():
    out = io.StringIO()
    with Console(steps=120, stream=out) as console:
        console.start('train', {'model': 'tiny', 'workdir': 'runs/a'})
        console.begin_step(7)
        console.status('sampling', '1,000 tok/s', done=1, total=2)
        console.row(7, METRICS)
        console.warn('careful')
    assert out.getvalue() == (
        'train\n'
        '  model    tiny\n'
        '  workdir  runs/a\n'
        'step 7/120  reward 0.250  tokens 1,234  cut 3.1%  p05 alpha -  kl nan  time 1:23\n'
        'warning: careful\n'
    )


@pytest.mark.parametrize('width', [30, 58, 80, 140])
def test_the_table_fits_the_width_and_stays_aligned(width, monkeypatch):
    def draw(console):
        for step in (9, 10):
            console.row(step, METRICS | {'rollout_corr/kl': -0.029})

    raw, lines = show(width, monkeypatch, draw)
    header, first, second = lines
    assert all(len(line) <= width for line in lines)
    assert len(header) == len(first) == len(second)
    assert first.split()[:2] == ['9/120', '0.250']
    titles = header.split()
    assert titles[:2] == ['step', 'reward']
    assert titles[-1] == ('time' if width > 30 else 'alpha')
    assert ('loss' in titles) == (width == 140)
    assert '\x1b[' in raw


def test_the_header_comes_again_after_other_output_and_now_and_then(monkeypatch):
    def draw(console):
        for step in range(1, 31):
            console.row(step, METRICS)
        console.message('evaluation')
        console.row(31, METRICS)

    _, lines = show(80, monkeypatch, draw)
    headers = [i for i, line in enumerate(lines) if 'reward' in line]
    assert headers == [0, 26, 33]
    assert lines[32] == 'evaluation'


def test_the_live_line_shows_progress_and_never_reaches_the_last_cell(monkeypatch):
    seen = []

    def draw(console):
        console.row(1, METRICS)
        console.begin_step(2)
        console.status('sampling', '1,234 tok/s', done=12, total=64, unit='finished')
        seen.append(console._live_line())
        console.status('learning', done=3, total=8)
        seen.append(console._live_line())

    show(100, monkeypatch, draw)
    sampling, learning = (line.plain for line in seen)
    assert re.fullmatch(r'. step 2/120  sampling  ━{16}  1,234 tok/s  12/64 finished  \d\.\ds  .* left', sampling)
    assert '  learning  ' in learning
    assert '  3/8  ' in learning
    assert '1,234' not in learning
    # 12 of 64 is 3 of 16 cells.
    assert sum(s.end - s.start for s in seen[0].spans if s.style == 'cyan' and '━' in sampling[s.start : s.end]) == 3
    show(20, monkeypatch, draw)
    assert all(line.cell_len <= 19 for line in seen[2:])


def test_no_message_can_command_the_terminal(monkeypatch):
    evil = 'a\x1b[2Jb\rc\x9bd [red]e[/red]'
    raw, lines = show(80, monkeypatch, lambda c: c.message(evil))
    assert '\x1b[2J' not in raw
    assert '\x9b' not in raw
    assert '\r' not in raw
    assert lines == ['a·[2Jb·c·d [red]e[/red]']


def test_a_notice_is_given_once_whoever_gives_it(capsys):
    out = io.StringIO()
    notice_once('early')
    with Console(stream=out) as console:
        notice_once('early')
        notice_once('late')
        console.notice_once('late')
    notice_once('late')
    assert capsys.readouterr().err == 'note: early\n'
    assert out.getvalue() == 'note: late\n'


def test_the_end_block_shows_how_it_went_and_what_to_copy_stays_on_one_line(monkeypatch):
    command = 'python -m sparrow_jax.report --workdir=' + 'x' * 80

    def draw(console):
        for step, score in enumerate((0.0, 0.5, 1.0), 1):
            console.row(step, {'critic/score/mean': score, 'sparse/kv_read_fraction': 0.3})
        console.finish('3 steps done', {'next': command})

    _, lines = show(60, monkeypatch, draw)
    assert any(re.fullmatch(r'  reward +0\.000 ▁▅█ 1\.000', line) for line in lines)
    assert any(command in line for line in lines)


def test_quiet_prints_nothing():
    out = io.StringIO()
    with Console(stream=out, quiet=True) as console:
        console.start('train', {'a': 1})
        console.status('sampling')
        console.row(1, METRICS)
        console.warn('w')
        console.finish('end', {'b': 2})
        console.interrupted(3)
    assert out.getvalue() == ''


def test_numbers_that_look_alike_make_a_flat_curve_and_a_resumed_run_says_where_it_begins(monkeypatch):
    def draw(console):
        for step, alpha in ((4, 0.99991), (5, 0.99999)):
            console.row(step, {'sparse/alpha_p05': alpha, 'critic/score/mean': step / 10})
        console.finish('Done', {})

    screen = '\n'.join(show(100, monkeypatch, draw)[1])
    assert re.search(r'p05 alpha\s+1\.000 ▄▄ 1\.000', screen)
    assert re.search(r'reward\s+0\.400 ▁█ 0\.500', screen)
    assert 'from step 4 on' in screen


def test_a_held_signal_shows_on_the_live_line_at_once(monkeypatch):
    def draw(console):
        console.begin_step(1)
        console.stopping()
        console.status('learning')
        time.sleep(0.3)

    assert 'stopping after this step' in show(100, monkeypatch, draw)[0]


def test_spark_averages_and_scales():
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == '▁▂▃▄▅▆▇█'
    assert spark([0, 0, 7, 7], cells=2) == '▁█'
    assert spark([3, 3]) == '▄▄'


def test_interruption_says_how_to_go_on():
    out = io.StringIO()
    with Console(steps=3, stream=out, columns=(Column('a', 'a'),)) as console:
        console.interrupted(12)
    assert out.getvalue() == 'Stopped. Saved at step 12; run the same command to go on.\n'


IN_A_TERMINAL = """
    import time
    from sparrow_jax.console import Console
    with Console(steps=2) as console:
        console.begin_step(1)
        console.status('sampling', done=1, total=4)
        time.sleep(0.4)
        console.row(1, {'critic/score/mean': 0.5})
        raise SystemExit(7)
"""


def test_a_real_terminal_is_redrawn_and_left_as_found():
    main, child = pty.openpty()
    env = os.environ | {'TERM': 'xterm', 'COLUMNS': '90', 'LINES': '30'}
    with subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(IN_A_TERMINAL)], stdout=child, stderr=child, env=env
    ) as process:
        assert process.wait(timeout=30) == 7
        os.close(child)
        seen = b''
        try:
            while chunk := os.read(main, 65536):
                seen += chunk
        except OSError:  # how Linux reports the end of a terminal
            pass
    os.close(main)
    text = seen.decode()
    assert text.count('sampling') >= 2
    assert text.rfind('\x1b[?25h') > text.rfind('\x1b[?25l') >= 0  # the cursor was hidden and is shown again
    assert '0.500' in text
