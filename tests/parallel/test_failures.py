"""A failure is told to the other processes, who end with it; with a store in this process, and over two real ones."""

import pathlib
import subprocess
import sys
import threading
import time

import pytest
from test_hosts import WITHOUT_CLUSTER, free_port

from sparrow_jax.parallel import failures
from sparrow_jax.parallel.failures import Failure, Watch

ROOT = pathlib.Path(__file__).parents[2]
MAIN = """
import os, signal, sys
import numpy as np
from sparrow_jax import commands
from sparrow_jax.config import ConfigError, ParallelConfig
from sparrow_jax.parallel import hosts, transfer

def main(workdir):
    how, fails, process = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    hosts.start(ParallelConfig(-1, 1, 1, 'address', sys.argv[1], 2, process))
    transfer.of_all(np.zeros(3))
    if process == fails:
        if how == 'mistake':
            raise ConfigError('steps=0: must be positive')
        if how == 'fault':
            raise ValueError('a fault')
        os.kill(os.getpid(), getattr(signal, how))
    transfer.of_all(np.zeros(3))

commands.run(main, config_required=False, workdir_required=False, uses_devices=False, argv=['prog'])
"""


class Store:
    """The key-value store of JAX's runtime, for several clients in this process."""

    def __init__(self):
        self.kept, self.gone = {}, False

    def key_value_set(self, key, value):
        self._check()
        if key in self.kept:
            raise RuntimeError('ALREADY_EXISTS: key')
        self.kept[key] = value

    def key_value_try_get(self, key):
        self._check()
        if key not in self.kept:
            raise RuntimeError('NOT_FOUND: key')
        return self.kept[key]

    def key_value_dir_get(self, key):
        self._check()
        return [(name, value) for name, value in self.kept.items() if name.startswith(f'{key}/')]

    def _check(self):
        if self.gone:
            raise RuntimeError('UNAVAILABLE: connection reset')


@pytest.fixture
def quick(monkeypatch):
    for name in ('LOOK_EVERY_S', 'UNWIND_S', 'HEAR_S'):
        monkeypatch.setattr(failures, name, getattr(failures, name) / 20)


@pytest.fixture
def three(quick, monkeypatch):
    """Three listening processes, their exit codes by number once they have ended."""
    del quick
    monkeypatch.setattr(failures.atexit, 'register', lambda *_: None)
    store, codes = Store(), {}
    watches = [Watch(store, i, 3, end=lambda code, i=i: codes.setdefault(i, code)) for i in range(3)]
    for watch in watches:
        watch.start()
    yield store, watches, codes
    for watch in watches:
        watch.stop()


def wait_for(codes, count):
    end = time.monotonic() + 10
    while len(codes) < count and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize('failing', [0, 2])
def test_all_end_with_the_sentence_and_the_code_of_the_one_that_fails(failing, three, capsys):
    _, watches, codes = three
    watches[failing].tell('steps=0: bad', 2)
    watches[failing].leave(2)
    wait_for(codes, 3)
    assert codes == {0: 2, 1: 2, 2: 2}
    assert capsys.readouterr().err == f'error: process {failing} of 3: steps=0: bad\n' * 2


def test_the_process_that_keeps_the_store_ends_last(three):
    _, watches, codes = three
    watches[2].tell('bad', 2)
    wait_for(codes, 1)
    assert list(codes) == [1]  # process 0 knows, and waits for the one that is still unwinding
    watches[2].leave(2)
    wait_for(codes, 3)
    assert list(codes) == [1, 2, 0]


def test_a_process_that_cannot_unwind_is_ended(three, capsys):
    _, watches, codes = three
    watches[1].tell('bad', 0)
    wait_for(codes, 3)
    assert codes == {0: 1, 1: 0, 2: 1}  # whoever ends by another's failure has failed too
    assert 'error: bad\n' in capsys.readouterr().err


def test_the_first_failure_counts(quick, capsys):
    del quick
    store, codes = Store(), []
    first, other = (Watch(store, process, 2, end=codes.append) for process in (1, 0))
    first.tell('first', 2)
    first.leave(2)
    other.tell('connection closed by peer', 1)
    assert codes == [2, 2]
    assert 'error: process 1 of 2: first' in capsys.readouterr().err


def test_a_store_that_is_gone_is_its_process_s_failure():
    store = Store()
    watch = Watch(store, 1, 2)
    assert watch.look() is None
    store.gone = True
    assert watch.look() == Failure(0, 'cannot be reached any more; its messages may say why', 1)


def test_one_process_tells_nobody_and_leaves_the_ordinary_way():
    failures.tell('bad', 2)
    with pytest.raises(SystemExit) as exit_:
        failures.leave(2)
    assert exit_.value.code == 2
    assert not [thread for thread in threading.enumerate() if thread.name == 'failures']


@pytest.mark.slow
@pytest.mark.parametrize(
    ('how', 'fails', 'own', 'other'),
    [
        ('mistake', 1, 'error: steps=0: must be positive', 'error: process 1 of 2: steps=0: must be positive'),
        ('fault', 0, 'ValueError: a fault', 'error: process 0 of 2: ValueError: a fault'),
        ('SIGKILL', 1, '', ''),
        ('SIGTERM', 0, '', ''),  # before anybody listens for it
    ],
)
def test_one_of_two_processes_fails_while_the_other_waits_for_it(how, fails, own, other):
    arguments = [sys.executable, '-c', MAIN, f'127.0.0.1:{free_port()}', how, str(fails)]
    environment = WITHOUT_CLUSTER | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
    began = time.monotonic()
    processes = [
        subprocess.Popen([*arguments, str(process)], env=environment, stderr=subprocess.PIPE, text=True)
        for process in range(2)
    ]
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode != 0 for process in processes)
    assert own in errors[fails]
    assert other in errors[1 - fails]
    if how in ('mistake', 'fault'):
        assert [process.returncode for process in processes] == [2 if how == 'mistake' else 1] * 2
    assert time.monotonic() - began < 60 + 30  # the start aside
