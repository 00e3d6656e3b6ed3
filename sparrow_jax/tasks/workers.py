"""Helper processes: started clean, watched, and gone when the process that started them is gone.

`verifiers` judges answers in them and `generated` makes problems in them. Each runs one function of this package over a
two-way connection. They are new interpreters, not forks: the parent holds accelerators and threads, and neither
survives a fork. They are not `multiprocessing` children either: those import the parent's main module again, and with
it jax.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import Any

from sparrow_jax.config import ConfigError

_BOOT = """
import json, sys
fd, target, path, arguments = json.loads(sys.argv[1])
sys.path[:] = path
from sparrow_jax.tasks import workers
workers.serve(fd, target, arguments)
"""

# Reads process groups from its parent ('12' watched, '-12' no longer); the end of that pipe is the parent's end,
# however it died.
_WARDEN = """
import os, signal, sys
watched = set()
for line in sys.stdin:
    group = int(line)
    watched.add(group) if group > 0 else watched.discard(-group)
for group in watched:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""

# One seed for the order of sets: some reasoning-gym tasks and sympy's printers depend on it. No accelerator: the parent
# holds it.
_ENVIRONMENT = {'PYTHONHASHSEED': '0', 'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a helper process sends instead of a result: the error's text, and whether the user can mend it."""

    text: str
    mendable: bool

    def error(self) -> Exception:
        return ConfigError(self.text) if self.mendable else RuntimeError(self.text)


class Worker:
    """One helper process and its connection."""

    def __init__(self, process: subprocess.Popen, connection: Connection):
        self.process = process
        self.connection = connection

    @property
    def pid(self) -> int:
        return self.process.pid


class WorkerGroup:
    """Starts and ends helper processes; a context manager at whose end none is left.

    Each worker leads a process group, so that whatever it started itself ends with it. A small warden process ends them
    all if this process dies without doing so, even while a worker is stuck in a call that never returns.
    """

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._warden = subprocess.Popen(
            [sys.executable, '-I', '-S', '-c', _WARDEN],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> 'WorkerGroup':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, target: str, arguments: Mapping[str, Any]) -> Worker:
        """Starts `target` ('module:function', called as function(connection, **arguments)) in a new process.

        `arguments` must fit into JSON. Modules are found as in this process. The worker's standard output goes to
        standard error: ours may be somebody's data.
        """
        ours, theirs = Pipe()
        try:
            start = json.dumps([theirs.fileno(), target, sys.path, dict(arguments)])
            process = subprocess.Popen(
                [sys.executable, '-c', _BOOT, start],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        finally:
            theirs.close()
        worker = Worker(process, ours)
        self._workers.append(worker)
        self._tell_warden(process.pid)
        return worker

    def kill(self, worker: Worker) -> int:
        """Ends a worker and everything it started; returns its exit code (negative: the signal)."""
        with contextlib.suppress(ProcessLookupError):  # it died, and left no child behind
            os.killpg(worker.pid, signal.SIGKILL)
        code = worker.process.wait()
        worker.connection.close()
        self._workers.remove(worker)
        with contextlib.suppress(BrokenPipeError):  # without a warden there is none to tell
            self._tell_warden(-worker.pid)
        return code

    def close(self) -> None:
        """Ends every worker; may be called twice."""
        if self._warden.poll() is None or self._workers:
            for worker in tuple(self._workers):
                self.kill(worker)
            assert self._warden.stdin is not None
            self._warden.stdin.close()
            self._warden.wait()

    def _tell_warden(self, group: int) -> None:
        assert self._warden.stdin is not None
        self._warden.stdin.write(f'{group}\n')


def serve(fd: int, target: str, arguments: Mapping[str, Any]) -> None:
    """Runs in the new process: calls `target` with the connection on descriptor `fd`; sends a Failure if it raises."""
    os.set_inheritable(fd, False)  # a child of ours must not keep the connection open
    connection = Connection(fd)
    module, name = target.split(':')
    try:
        getattr(importlib.import_module(module), name)(connection, **arguments)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent needs no more
    except ConfigError as error:
        connection.send(Failure(str(error), mendable=True))
    except BaseException:
        connection.send(Failure(traceback.format_exc(), mendable=False))
