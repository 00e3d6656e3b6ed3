"""One process that fails ends all processes of a run, with its error.

It leaves a sentence in the key-value store of JAX's distributed runtime, where a thread of every other process looks
once a second: their main threads may be waiting for it in a collective, for ever. A process that is killed leaves
nothing; then JAX's heartbeats (`hosts.HEARTBEAT_TIMEOUT_S`), or a broken connection, end the others.

`hosts.start` starts the thread; without it (one process) nothing here does anything. JAX is not imported here: a
mistake in the flags need not wait for it.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

FAILURE_KEY = 'sparrow_jax/failure'
HEARD_KEY = 'sparrow_jax/heard'
STORE_PROCESS = 0  # the one that keeps the store, and so ends last
LOOK_EVERY_S = 1.0
UNWIND_S = 10.0  # that a failing process may take to end by itself: it too may come to wait for the others
HEAR_S = 5.0  # that it stays for the others to hear why
LONGEST_SENTENCE = 4000  # characters


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a process says of its end. code: its exit code."""

    process: int
    sentence: str
    code: int


class Watch:
    """Listens for the failures of other processes, and tells them this one's.

    Args:
        client: of JAX's distributed runtime.
        process, processes: number of this one, and how many there are.
        end: ends this process at once with an exit code, whatever its threads do.
    """

    def __init__(self, client: Any, process: int, processes: int, end: Callable[[int], Any] = os._exit):
        self._client, self._process, self._processes, self._end = client, process, processes, end
        self._over, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._listen, name='failures', daemon=True)
        self._last: threading.Timer | None = None
        self.told = False

    def start(self) -> None:
        self._thread.start()
        # Before JAX, whose own handler was there first, takes the store away.
        atexit.register(self.stop)

    def stop(self) -> None:
        """The others' failures do not matter any more."""
        self._over.set()
        self._thread.join()

    def tell(self, sentence: str, code: int) -> None:
        """Leaves this process's failure for the others; ends it at once if another one has failed before."""
        if self.told:
            return
        if self._ending.is_set():  # by another's failure, of which this one may come
            self._thread.join()
            return
        self.told = True
        failure = Failure(self._process, sentence[:LONGEST_SENTENCE], code)
        try:
            self._client.key_value_set(FAILURE_KEY, json.dumps(dataclasses.asdict(failure)))
        except Exception:  # JAX's own kind of error: it is taken, or the store is gone
            first = self.look()
            if first is not None:
                self._end_with(first)
        self._last = threading.Timer(UNWIND_S, self._give_up, (sentence, code))
        self._last.daemon = True
        self._last.start()

    def leave(self, code: int) -> None:
        """Ends this process once the others have heard why."""
        if self._last is not None:
            self._last.cancel()
        self._wait_for_hearers(self._processes - 1, HEAR_S)
        self._hear()
        sys.stdout.flush()
        sys.stderr.flush()
        self._end(code)

    def look(self) -> Failure | None:
        """The failure of another process."""
        try:
            found = Failure(**json.loads(self._client.key_value_try_get(FAILURE_KEY)))
        except Exception as error:  # JAX's own kind of error, told apart by the first word alone
            gone = str(error).startswith('UNAVAILABLE')
            return Failure(STORE_PROCESS, 'cannot be reached any more; its messages may say why', 1) if gone else None
        return found if found.process != self._process else None

    def _listen(self) -> None:
        while not self._over.wait(LOOK_EVERY_S):
            failure = self.look()
            if failure is not None:
                return self._end_with(failure)

    def _end_with(self, failure: Failure) -> None:
        self._ending.set()
        print(f'error: process {failure.process} of {self._processes}: {failure.sentence}', file=sys.stderr, flush=True)
        self._hear()
        if self._process == STORE_PROCESS:
            self._wait_for_hearers(self._processes, UNWIND_S + HEAR_S)
        self._end(failure.code or 1)

    def _hear(self) -> None:
        with contextlib.suppress(Exception):  # JAX's own kind of error: nobody waits for it any more
            self._client.key_value_set(f'{HEARD_KEY}/{self._process}', '')

    def _wait_for_hearers(self, count: int, most_s: float) -> None:
        last = time.monotonic() + most_s
        while self._hearers() < count and time.monotonic() < last:
            time.sleep(LOOK_EVERY_S / 10)

    def _hearers(self) -> int:
        try:
            return len(self._client.key_value_dir_get(HEARD_KEY))
        except Exception:  # JAX's own kind of error: nobody has heard it yet
            return 0

    def _give_up(self, sentence: str, code: int) -> None:
        print(f'error: {sentence}', file=sys.stderr, flush=True)
        self.leave(code)


_watch: Watch | None = None


def watch(client: Any, process: int, processes: int) -> None:
    """Listens from now on; see `Watch`."""
    global _watch
    _watch = Watch(client, process, processes)
    _watch.start()


def listening() -> bool:
    """Whether there are other processes."""
    return _watch is not None


def tell(sentence: str, code: int) -> None:
    """Tells the other processes why this one ends, and with which exit code; it has `UNWIND_S` from now on."""
    if _watch is not None:
        _watch.tell(sentence, code)


def leave(code: int) -> NoReturn:
    """Ends this process, by SystemExit unless it has told the others of a failure: the ordinary end waits for them."""
    if _watch is not None and _watch.told:
        _watch.leave(code)
    sys.exit(code)
