"""Two processes on this machine see each other's devices; where none is found, one sentence says so."""

import dataclasses
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from sparrow_jax import commands
from sparrow_jax.config import ConfigError, ParallelConfig, resolve
from sparrow_jax.parallel import hosts

ROOT = pathlib.Path(__file__).parents[2]
SEE_ALL = """
import sys
import jax, numpy as np
from sparrow_jax.config import ParallelConfig
from sparrow_jax.parallel import hosts, transfer
from sparrow_jax.parallel.mesh import batch_sharding, make_mesh
by_address = ('address', sys.argv[2], 2, int(sys.argv[3]))
parallel = ParallelConfig(-1, 1, 1, *(by_address if sys.argv[1] == 'address' else ['auto']))
hosts.start(parallel)
process = jax.process_index()
gathered = transfer.of_all(np.asarray([process + 0.1]))
rows = transfer.place({'a': np.asarray([[3, 4], [5, 6]])}, batch_sharding(make_mesh(parallel)))
doubled = transfer.read(jax.jit(lambda x: jax.tree.map(lambda a: 2 * a, x))(rows) | {'b': 1})
print(jax.process_count(), jax.device_count(), jax.local_device_count(), gathered.ravel().tolist(), end=' ')
print(rows['a'].addressable_shards[0].data.shape, doubled['a'].tolist(), end=' ')
print(transfer.least([7, None][process]), transfer.least(7 - process), transfer.any_of_all(process == 1))
"""
WITHOUT_CLUSTER = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(('SLURM', 'TPU', 'KUBERNETES', 'XLA_FLAGS'))
}


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return listener.getsockname()[1]


def slurm_step(process, port):
    """What SLURM sets for one of two processes, and the script of launch/slurm.py for one GPU a node."""
    return {
        'SLURM_JOB_ID': '1',
        'SLURM_STEP_NODELIST': 'localhost',
        'SLURM_NTASKS': '2',
        'SLURM_PROCID': str(process),
        'SLURM_LOCALID': '0',
        'JAX_LOCAL_DEVICE_IDS': '0',
        'JAX_COORDINATOR_PORT': str(port),
    }


@pytest.mark.parametrize('distributed', ['address', 'auto'])
def test_two_processes_see_each_other_s_devices(distributed):
    port = free_port()
    found = slurm_step if distributed == 'auto' else lambda *_: {}
    processes = [
        subprocess.Popen(
            [sys.executable, '-c', SEE_ALL, distributed, f'127.0.0.1:{port}', str(process)],
            env=WITHOUT_CLUSTER | found(process, port) | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert out.splitlines()[-1] == '2 2 1 [0.1, 1.1] (1, 2) [[6, 8], [10, 12]] None 6 True'
    finally:
        for process in processes:
            process.kill()


def test_a_field_that_differs_between_processes_is_named(monkeypatch):
    config = commands.load_config('configs/tiny.py')
    config.parallel.update(distributed='address', coordinator='h:1', processes=2, process=1)
    run = resolve(config)
    monkeypatch.setattr(hosts.transfer, 'same_in_all', lambda text: 'temperature' not in text)
    with pytest.raises(ConfigError, match=r'^evaluate, rollout: not the same in all processes; start'):
        hosts.check_same(run)
    said = []
    monkeypatch.setattr(hosts.transfer, 'same_in_all', lambda text: said.append(text) or True)
    hosts.check_same(run)
    other = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, process=0))
    before, said[:] = list(said), []
    hosts.check_same(other)
    assert said == before  # their numbers aside


def test_off_starts_nothing(monkeypatch):
    monkeypatch.setattr(hosts.jax.distributed, 'initialize', lambda *_, **__: pytest.fail('started'))
    hosts.start(ParallelConfig(-1, 1, 1))


@pytest.mark.parametrize(
    ('raised', 'words'),
    [
        (ValueError('coordinator_address should be defined.'), "parallel.distributed='auto': no TPU slice, SLURM step"),
        (RuntimeError('DEADLINE_EXCEEDED: late\nmore'), 'the processes did not meet (DEADLINE_EXCEEDED: late); see'),
    ],
)
def test_processes_that_do_not_find_each_other_are_one_sentence(raised, words, monkeypatch):
    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(hosts.jax.distributed, 'initialize', fail)
    with pytest.raises(ConfigError) as error:
        hosts.start(ParallelConfig(-1, 1, 1, 'auto'))
    assert words in str(error.value)
    assert '\n' not in str(error.value)
