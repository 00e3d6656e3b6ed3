"""The smallest run that goes through every part, for tests of whole runs: in this process, or in one that is killed."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np

from sparrow_jax import commands
from sparrow_jax.assembly import assemble
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.config import RunConfig, resolve
from sparrow_jax.metrics import MACHINE_PREFIXES, read_rows
from sparrow_jax.train import train

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = 'configs/tiny.py:smoke'

# Everything that fixes a compiled function is as in CONFIG, so that all these runs share compilations.
CHANGES = {
    'steps': 4,
    'rollout.prompts_per_step': 4,  # 8 samples in 4 slots: some wait
    'reward.function': 'reward_functions:lower_case',
    'reward.workers': 1,
    'optimizer.learning_rate': 3e-3,
    'optimizer.warmup_steps': 2,
    'evaluate.every_steps': 2,
    'checkpoint.keep': 3,
}


def flags(changes: dict) -> list[str]:
    """As on the command line."""
    return [f'--config.{name}={value}' for name, value in (CHANGES | changes).items()]


def tiny(**changes) -> RunConfig:
    """CONFIG with CHANGES and these, whose names have '__' for '.'."""
    return resolve(commands.load_config(CONFIG, flags({name.replace('__', '.'): v for name, v in changes.items()})))


def run_to(workdir: pathlib.Path, **changes) -> list[dict]:
    """Trains in this process; the rows of metrics.jsonl."""
    assert train(tiny(**changes), str(workdir)) == 0
    return read_rows(workdir / 'metrics.jsonl')


def start_process(workdir: pathlib.Path, cache: pathlib.Path, **changes) -> subprocess.Popen:
    """The same run as a process of its own; output goes to workdir.out and workdir.err."""
    named = {name.replace('__', '.'): value for name, value in changes.items()}
    command = [sys.executable, '-m', 'sparrow_jax.train', f'--config={CONFIG}', *flags(named), f'--workdir={workdir}']
    environment = os.environ | {
        'PYTHONPATH': str(ROOT / 'tests'),
        'JAX_PLATFORMS': 'cpu',
        'JAX_COMPILATION_CACHE_DIR': str(cache),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    out, err = workdir.with_suffix('.out'), workdir.with_suffix('.err')
    with open(out, 'a') as out_file, open(err, 'a') as err_file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out_file, stderr=err_file)


def without_machine(rows: list[dict]) -> list[dict]:
    """Rows without what depends on the machine's speed."""
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in rows]


def samples(workdir: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / 'samples.jsonl').read_text().splitlines()]


def final_state(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint by name, and the data position."""
    import orbax.checkpoint as ocp

    with Checkpoints(workdir / 'checkpoints', read_only=True) as checkpoints:
        step = checkpoints.latest_step()
        facts = checkpoints.facts(step)
    arrays = ocp.PyTreeCheckpointer().restore(workdir / 'checkpoints' / str(step) / 'arrays')
    return {name: np.asarray(value) for name, value in arrays.items()} | {'facts': np.asarray(json.dumps(facts))}


def assert_same_run(workdir: pathlib.Path, expected: pathlib.Path) -> None:
    """Rows, samples and the newest checkpoint are equal bit for bit."""
    rows, expected_rows = (without_machine(read_rows(w / 'metrics.jsonl')) for w in (workdir, expected))
    assert rows == expected_rows
    assert samples(workdir) == samples(expected)
    state, expected_state = final_state(workdir), final_state(expected)
    assert state.keys() == expected_state.keys()
    for name, array in state.items():
        assert array.tobytes() == expected_state[name].tobytes(), name
