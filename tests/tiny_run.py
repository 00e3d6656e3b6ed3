"""The smallest run that goes through every part, for tests of whole runs: in this process, or in one that is killed."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import orbax.checkpoint as ocp

from sparrow_jax import commands
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.config import RunConfig, resolve
from sparrow_jax.metrics import MACHINE_PREFIXES, read_rows
from sparrow_jax.train import train

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = 'configs/tiny.py:smoke'

# Whatever is compiled in is as in CONFIG, so that all these runs share compilations.
CHANGES = {
    'steps': 12,
    'rollout.prompts_per_step': 4,  # 8 samples for 4 slots: some wait
    'schedule.kind': 'fixed',  # tests of the controller change it
    'reward.function': 'reward_functions:lower_case',
    'reward.workers': 1,
    'optimizer.learning_rate': 3e-3,
    'optimizer.warmup_steps': 2,
    'optimizer.decay_steps': 0,
    'evaluate.every_steps': 2,
    'checkpoint.keep': 3,
}


def exit_code(main: Callable[..., int], arguments: Sequence[object], **options: object) -> int:
    """Of a command that is called with these arguments on its command line; options: of `commands.run`."""
    try:
        commands.run(main, **options, argv=[main.__name__, *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code
    raise AssertionError('the command came back without an exit code')


class TinyRuns:
    """Runs of CONFIG with CHANGES and further ones, given as field to value.

    Args:
        folder: for work directories.
        data_cache, compile_cache: shared by all runs.
    """

    def __init__(self, folder: pathlib.Path, data_cache: str, compile_cache: pathlib.Path):
        self.folder, self.data_cache, self.compile_cache = folder, data_cache, compile_cache

    def flags(self, changes: dict) -> list[str]:
        """The command line, without --workdir."""
        fields = CHANGES | {'data.cache_dir': self.data_cache} | changes
        return [f'--config={CONFIG}', *(f'--config.{name}={value}' for name, value in fields.items())]

    def config(self, changes: dict) -> RunConfig:
        return resolve(commands.load_config(CONFIG, self.flags(changes)[1:]))

    def train(self, name: str, changes: dict | None = None, expected_code: int = 0) -> pathlib.Path:
        """Trains in this process; the work directory."""
        workdir = self.folder / name
        assert train(self.config(changes or {}), str(workdir)) == expected_code
        return workdir

    def start(self, name: str, changes: dict | None = None) -> 'RunProcess':
        """The same in a process of its own."""
        workdir = self.folder / name
        command = [sys.executable, '-m', 'sparrow_jax.train', *self.flags(changes or {}), f'--workdir={workdir}']
        environment = os.environ | {
            'PYTHONPATH': str(ROOT / 'tests'),  # of the reward function
            'JAX_PLATFORMS': 'cpu',
            'JAX_COMPILATION_CACHE_DIR': str(self.compile_cache),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        }
        return RunProcess(workdir, command, environment)


class RunProcess:
    """A training process, to be watched and ended; a context manager that leaves none behind."""

    def __init__(self, workdir: pathlib.Path, command: list[str], environment: dict[str, str]):
        self.workdir = workdir
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def __enter__(self) -> 'RunProcess':
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def wait_for_step(self, step: int, limit_s: float = 240) -> None:
        """Returns when the row of a step is written."""
        self._wait(lambda: any(row['step'] >= step for row in rows_of(self.workdir)), f'step {step}', limit_s)

    def wait_for_save(self, after_step: int, limit_s: float = 240) -> None:
        """Returns when a checkpoint of a step after this one is being written."""
        unfinished = lambda: [
            path
            for path in (self.workdir / 'checkpoints').glob('*.orbax-checkpoint-tmp*')
            if int(path.name.split('.')[0]) > after_step
        ]
        self._wait(unfinished, f'a checkpoint after step {after_step}', limit_s)

    def end(self, signal_number: int) -> tuple[int, str, str]:
        """Sends the signal; exit code, output and error output once the process has ended."""
        self._process.send_signal(signal_number)
        out, err = self._process.communicate(timeout=120)
        return self._process.returncode, out, err

    def _wait(self, seen, what: str, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while not seen():
            if self._process.poll() is not None:
                out, err = self._process.communicate()
                raise AssertionError(f'ended with {self._process.returncode} before {what}:\n{out}\n{err}')
            assert time.monotonic() < end, f'no {what} within {limit_s} s'
            time.sleep(0.002)


def rows_of(workdir: pathlib.Path) -> list[dict]:
    return read_rows(workdir / 'metrics.jsonl')


def same_everywhere(rows: list[dict]) -> list[dict]:
    """Rows without what depends on the machine's speed."""
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in rows]


def newest_checkpoint(workdir: pathlib.Path) -> tuple[int, dict[str, np.ndarray], dict]:
    """Step, all arrays by name, and facts."""
    with Checkpoints(workdir / 'checkpoints', read_only=True) as checkpoints:
        step = checkpoints.latest_step()
        facts = checkpoints.facts(step)
    folder, reader = workdir / 'checkpoints' / str(step) / 'arrays', ocp.PyTreeCheckpointer()
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in reader.metadata(folder).item_metadata.tree}
    return step, reader.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy)), facts


def assert_same_run(workdir: pathlib.Path, expected: pathlib.Path) -> None:
    """Rows, answers, weights, optimizer state and data position are equal bit for bit."""
    assert same_everywhere(rows_of(workdir)) == same_everywhere(rows_of(expected))
    for name in ('samples.jsonl', 'alpha_histogram.jsonl'):
        assert read_rows(workdir / name) == read_rows(expected / name)
    step, arrays, facts = newest_checkpoint(workdir)
    expected_step, expected_arrays, expected_facts = newest_checkpoint(expected)
    assert (step, facts) == (expected_step, expected_facts)
    assert arrays.keys() == expected_arrays.keys()
    for name, array in arrays.items():
        assert array.tobytes() == expected_arrays[name].tobytes(), name


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    """Every file below the folder, the lock file aside (it names the last holder)."""
    files = (path for path in sorted(folder.rglob('*')) if path.is_file() and path.name != '.lock')
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
