"""Long checks of what the project claims; `make verify` runs them."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import ROOT, TinyRuns, assert_same_run, rows_of

from configs.algorithms import ALGORITHMS

pytestmark = [pytest.mark.verify, pytest.mark.timeout(7200)]

SEEDS = (0, 1, 2)
SAMPLERS = {'sparse': [], 'dense': ['--config.schedule.kind=dense']}


def run_demo(workdir: Path, *arguments: str, algorithm: str = '') -> dict:
    """Runs configs/tiny.py, or a published algorithm on it, from its command line; its results."""
    config = f'--config=configs/tiny.py:{algorithm}' if algorithm else '--config=configs/tiny.py'
    command = [sys.executable, '-m', 'sparrow_jax.train', config, *arguments]
    began = time.monotonic()
    done = subprocess.run(
        [*command, f'--workdir={workdir}'],
        cwd=ROOT,
        env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    rows = rows_of(workdir)
    evaluated = [row for row in rows if 'val/accuracy' in row]
    mean = lambda name: sum(row[name] for row in rows[1:]) / len(rows[1:])
    return {
        'steps': rows[-1]['step'],
        'accuracy_before': evaluated[0]['val/accuracy'],
        'accuracy_after': evaluated[-1]['val/accuracy'],
        'format_valid_before': evaluated[0]['val/format_valid'],
        'tokens_before': rows[1]['response_length/mean'],
        'tokens_after': rows[-1]['response_length/mean'],
        'kv_read_fraction': mean('sparse/kv_read_fraction'),
        'alpha_p05': mean('sparse/alpha_p05'),
        'late_compiles': sum(row['compile/count'] for row in rows[1:]),
        'seconds': seconds,
    }


def shortfalls(sampler: str, result: dict) -> list[str]:
    """What the demonstration promises and this run does not keep."""
    gain = result['accuracy_after'] - result['accuracy_before']
    promises = {
        'format valid >= 0.9 before': result['format_valid_before'] >= 0.9,
        'accuracy from 0.1 to 0.6 before': 0.1 <= result['accuracy_before'] <= 0.6,
        'accuracy + 0.25 after': gain >= 0.25,
        'KV read < 0.6': sampler == 'dense' or result['kv_read_fraction'] < 0.6,
        'nothing compiled late': result['late_compiles'] == 0,
        'under 360 s': result['seconds'] < 360,
    }
    return [promise for promise, kept in promises.items() if not kept]


def test_demo_three_seeds(tmp_path, capsys):
    """Six trainings, one after the other: they share the machine with nothing, so that their times count."""
    broken = {}
    for seed in SEEDS:
        for sampler, arguments in SAMPLERS.items():
            result = run_demo(tmp_path / f'{sampler}_{seed}', f'--config.seed={seed}', *arguments)
            with capsys.disabled():
                print(json.dumps({'sampler': sampler, 'seed': seed, **result}), flush=True)
            if missed := shortfalls(sampler, result):
                broken[f'{sampler}, seed {seed}'] = missed
    assert broken == {}


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_every_algorithm_trains_above_its_start(algorithm, tmp_path, capsys):
    """Half of the demonstration's steps; a gain of 0.1 is four standard errors of the 256 held-out problems."""
    result = run_demo(tmp_path / algorithm, '--config.steps=12', algorithm=algorithm)
    with capsys.disabled():
        print(json.dumps({'algorithm': algorithm, **result}), flush=True)
    assert result['accuracy_after'] >= result['accuracy_before'] + 0.1
    assert result['late_compiles'] == 0


def test_ten_kills(tmp_path, data_cache, compile_cache, monkeypatch, capsys):
    """One run, killed ten times at seeded random moments, is bit for bit the run that nothing disturbed.

    In turn: while it starts, in the middle of its steps, while it writes a checkpoint.
    """
    monkeypatch.chdir(ROOT)
    draw = random.Random(18)
    runs = TinyRuns(tmp_path, data_cache, compile_cache)
    changes = {'steps': 100, 'evaluate.every_steps': 5}
    whole = runs.train('whole', changes)
    for kill in range(10):
        done = max((row['step'] for row in rows_of(tmp_path / 'killed')), default=0)
        with runs.start('killed', changes) as process:
            moment = ('start', 'step', 'save')[kill % 3]
            if moment == 'start':
                time.sleep(draw.uniform(0, 5))
            elif moment == 'step':
                process.wait_for_step(done + draw.randint(1, 4))
                time.sleep(draw.uniform(0, 0.3))
            else:
                process.wait_for_save(after_step=done + draw.randint(1, 4))
            assert process.end(signal.SIGKILL)[0] == -signal.SIGKILL, 'it ended before it was killed'
        reached = max((row['step'] for row in rows_of(process.workdir)), default=0)
        with capsys.disabled():
            print(json.dumps({'kill': kill + 1, 'moment': moment, 'from_row': done, 'to_row': reached}), flush=True)
    assert_same_run(runs.train('killed', changes), whole)
