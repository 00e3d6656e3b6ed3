"""Training over several processes of this machine: what one process computes, and how it ends."""

import os
import pathlib
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from test_hosts import ROOT, WITHOUT_CLUSTER, free_port

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
from tiny_run import newest_checkpoint, rows_of, same_everywhere

from sparrow_jax.metrics import read_rows

pytestmark = [pytest.mark.verify, pytest.mark.timeout(3600)]
LIMIT_S = 1200  # of a run of a few steps, most of which compiles


class Runs:
    """Runs of the smoke configuration, one compilation cache for all."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    @contextmanager
    def start(self, name: str, mesh: tuple[int, int, int], processes: int = 1, **changes):
        """The started processes, with as many simulated devices each as the mesh asks for; none is left at the end."""
        devices = mesh[0] * mesh[1] * mesh[2] // processes
        fields = {
            'steps': 2,
            'evaluate.every_steps': 2,
            'data.cache_dir': self.folder / 'data',
            'reward.function': 'reward_functions:lower_case',
            'reward.workers': 1,
            'optimizer.learning_rate': 3e-3,
            'optimizer.warmup_steps': 0,
            'optimizer.decay_steps': 0,
            **{f'parallel.{axis}': size for axis, size in zip(('data', 'fsdp', 'tensor'), mesh, strict=True)},
            **{name.replace('__', '.'): value for name, value in changes.items()},
        }
        if processes > 1:
            address = {'distributed': 'address', 'coordinator': f'127.0.0.1:{free_port()}', 'processes': processes}
            fields |= {f'parallel.{name}': value for name, value in address.items()}
        command = [sys.executable, '-m', 'sparrow_jax.train', '--config=configs/tiny.py:smoke']
        command += [f'--workdir={self.folder / name}', *(f'--config.{key}={value}' for key, value in fields.items())]
        environment = WITHOUT_CLUSTER | {
            'JAX_PLATFORMS': 'cpu',
            'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
            'PYTHONPATH': os.pathsep.join([str(ROOT), str(ROOT / 'tests')]),  # of the reward function
            'SPARROW_JAX_COMPILE_CACHE': str(self.folder / 'compiled'),
        }
        started = []
        try:
            for process in range(processes):
                number = [f'--config.parallel.process={process}'] if processes > 1 else []
                with open(self.folder / f'{name}.{process}.txt', 'w') as log:
                    started.append(
                        subprocess.Popen([*command, *number], cwd=ROOT, env=environment, stdout=log, stderr=log)
                    )
            yield started
        finally:
            for process in started:
                process.kill()
                process.wait()

    def train(self, name: str, mesh: tuple[int, int, int], processes: int = 1, **changes) -> pathlib.Path:
        with self.start(name, mesh, processes, **changes) as started:
            codes = [process.wait(LIMIT_S) for process in started]
        assert codes == [0] * processes, self.said(name, 0)
        return self.folder / name

    def said(self, name: str, process: int) -> str:
        return (self.folder / f'{name}.{process}.txt').read_text()

    def wait_for_step(self, name: str, step: int, started: list[subprocess.Popen]) -> None:
        end = time.monotonic() + LIMIT_S
        while not any(row['step'] >= step for row in rows_of(self.folder / name)):
            assert all(process.poll() is None for process in started), self.said(name, 0)
            assert time.monotonic() < end
            time.sleep(0.05)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp('processes'))


def assert_near(rows: list[dict], expected: list[dict]) -> None:
    """The metrics of another sharding: sums in another order."""
    assert len(rows) == len(expected) > 0
    for row, other in zip(same_everywhere(rows), same_everywhere(expected), strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize(('processes', 'mesh'), [(2, (2, 1, 1)), (2, (1, 2, 1)), (2, (1, 1, 2)), (4, (2, 1, 2))])
def test_processes_train_as_one_with_as_many_devices(processes, mesh, runs):
    sizes = 'x'.join(map(str, mesh))
    many, one = runs.train(f'many {sizes}', mesh, processes), runs.train(f'one {sizes}', mesh)
    assert same_everywhere(rows_of(many)) == same_everywhere(rows_of(one)) != []
    assert read_rows(many / 'samples.jsonl') == read_rows(one / 'samples.jsonl') != []
    assert 'compiled after warm-up: jit(_' not in runs.said(f'many {sizes}', 0)


def test_the_controller_and_parked_sequences_do_not_care_for_processes(runs):
    changes = {
        'schedule__kind': 'adaptive',
        'schedule__start': 'fixed',
        'rollout__slots': 6,
        'rollout__prompts_per_step': 4,
        'rollout__pool_pages': 33,
    }
    many, one = (runs.train(f'adaptive {n}', (1, 2, 1), n, **changes) for n in (2, 1))
    assert same_everywhere(rows_of(many)) == same_everywhere(rows_of(one)) != []
    assert sum(row.get('rollout/parked', 0) for row in rows_of(many)) > 0
    assert newest_checkpoint(many)[2] == newest_checkpoint(one)[2]


@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 1, 4)])  # the second has more shards than the model has KV heads
def test_several_devices_train_as_one(mesh, runs):
    one, many = runs.train('one device', (1, 1, 1)), runs.train(f'devices {mesh[0]}', mesh)
    assert [row['completion'] for row in read_rows(many / 'samples.jsonl')] == [
        row['completion'] for row in read_rows(one / 'samples.jsonl')
    ]
    assert_near(rows_of(many), rows_of(one))


@pytest.mark.parametrize('kind', ['fixed', 'adaptive'])
def test_terminated_over_two_processes_and_resumed_over_other_ones(kind, runs):
    schedule = {'schedule__kind': kind, 'schedule__start': 'fixed'}
    rare = {'checkpoint__every_steps': 100, 'evaluate__every_steps': -1, **schedule}
    name = f'terminated {kind}'
    with runs.start(name, (2, 1, 1), 2, steps=100, **rare) as started:
        runs.wait_for_step(name, 2, started)
        started[1].send_signal(signal.SIGTERM)
        time.sleep(0.5)
        started[0].send_signal(signal.SIGINT)
        assert [process.wait(60) for process in started] == [130, 130], runs.said(name, 0)
    saved = len(rows_of(runs.folder / name))
    assert newest_checkpoint(runs.folder / name)[0] == saved >= 2
    runs.train(name, (1, 1, 4), steps=saved + 1, **rare)  # one process
    runs.train(name, (2, 1, 2), 4, steps=saved + 2, **rare)
    whole = runs.train(f'whole {kind}', (2, 1, 1), steps=saved + 2, **rare)
    rows = rows_of(runs.folder / name)
    assert [row['step'] for row in rows] == list(range(1, saved + 3))
    if kind == 'fixed':  # else the number of data shards decides what is measured
        assert_near(rows, rows_of(whole))


@pytest.mark.parametrize('killed', [0, 1])
def test_killed_in_training_ends_all_within_a_minute(killed, runs):
    name = f'killed {killed}'
    with runs.start(name, (2, 1, 1), 2, steps=100) as started:
        runs.wait_for_step(name, 1, started)
        started[killed].kill()
        began = time.monotonic()
        assert started[1 - killed].wait(60) != 0
        assert time.monotonic() - began < 60
    assert runs.said(name, 1 - killed)
