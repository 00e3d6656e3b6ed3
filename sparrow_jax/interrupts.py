"""Ctrl-C and termination: at once while a step can be thrown away, later while state is being written.

Over several processes, each hears its signals at another moment, or never: between two steps they agree.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self


class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, held back inside `deferred`. A context manager, for the main
    thread.

    A second signal while the first is held back is raised at once: the person means it. State is then half changed, and
    `forced` says so.

    Args:
        on_held: called in the signal handler when a first signal is held back.
        agreed: of a run of several processes: whether any of them has heard a signal, given whether this one has; all
            call it together. Signals are then held back everywhere, until the next `between_steps`.
    """

    def __init__(
        self, on_held: Callable[[], None] = lambda: None, agreed: Callable[[bool], bool] | None = None
    ) -> None:
        self._on_held = on_held
        self.forced = False
        self._agreed = agreed
        self._held = False
        self._pending = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Signals that arrive inside are raised at its end."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending and self._agreed is None:
            self._pending = False
            raise KeyboardInterrupt

    def between_steps(self) -> None:
        """Raises, in every process, what any of them holds back."""
        if self._agreed is not None and self._agreed(self._pending):
            self._pending = False
            raise KeyboardInterrupt

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        held = self._held or self._agreed is not None
        # A cluster's signals may come to each process more than once: only Ctrl-C is a person's.
        repeated = self._pending and (self._agreed is None or number == signal.SIGINT)
        if held and not repeated:
            self._pending = True
            self._on_held()
            return
        self.forced = held
        raise KeyboardInterrupt
