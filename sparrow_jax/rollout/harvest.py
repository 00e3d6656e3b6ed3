"""Finished sequences on their way from the device into responses.

A row is cut out on the device before its slot is given to another sequence, and read while the next segment runs.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from sparrow_jax.rollout.cache import Slots
from sparrow_jax.rollout.pool import Row

WAITING_BYTES = 1 << 30  # of rows cut out and not read yet; hidden states of long responses are large


@dataclasses.dataclass(frozen=True)
class Response:
    """One sampled response of T tokens, the end token included.

    Attributes:
        tokens: int32 [T].
        logp: float32 [T], actor log-prob of each token at the sampling temperature.
        pages_read: int32 [T], pages that a sparse layer read when the token was drawn; 0 for the first, which the dense
            prefill draws.
        hidden: [T, D] final hidden state each token was drawn from, or None.
        finish_reason: 'stop' (an end token, also as the last token that fits) or 'length'.
    """

    tokens: np.ndarray
    logp: np.ndarray
    pages_read: np.ndarray
    hidden: np.ndarray | None
    finish_reason: str


@dataclasses.dataclass(frozen=True)
class _Cut:
    """A finished row: the index of its request, its arrays on the device, how many tokens of them count."""

    index: int
    arrays: dict[str, jax.Array]
    count: int
    stopped: bool


class Harvest:
    """The responses of one call of the engine.

    Args:
        cut: `cut_row`, compiled.

    Attributes:
        tokens: of all finished responses, those that are still to be read included.
    """

    def __init__(self, cut: Callable[[Slots, int], dict[str, jax.Array]]):
        self._cut = cut
        self._waiting: list[_Cut] = []
        self._responses: dict[int, Response] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._responses) + len(self._waiting)

    def take(self, slots: Slots, row: Row, count: int, stopped: bool) -> None:
        """Cuts out a finished row; its slot may be given away from then on."""
        taken = _Cut(row.index, self._cut(slots, row.slot), count, stopped)
        self._waiting.append(taken)
        self.tokens += count
        if len(self._waiting) * sum(array.nbytes for array in taken.arrays.values()) > WAITING_BYTES:
            self.read()

    def read(self) -> None:
        """Brings what was cut out to the host."""
        for cut in self._waiting:
            rows = {name: array[: cut.count].copy() for name, array in jax.device_get(cut.arrays).items()}
            self._responses[cut.index] = Response(
                tokens=rows['tokens_BT'],
                logp=rows['logp_BT'],
                pages_read=rows['pages_read_BT'],
                hidden=rows.get('hidden_BTD'),
                finish_reason='stop' if cut.stopped else 'length',
            )
        self._waiting.clear()

    def responses(self, indices: Sequence[int]) -> list[Response]:
        """Those of the requests with these indices."""
        self.read()
        return [self._responses[i] for i in indices]


def cut_row(slots: Slots, slot: jax.Array) -> dict[str, jax.Array]:
    """What becomes a response, of one slot: [T] and [T, D]."""
    names = ['tokens_BT', 'logp_BT', 'pages_read_BT', *(['hidden_BTD'] if slots.hidden_BTD.shape[2] else [])]
    return {name: jax.lax.dynamic_index_in_dim(getattr(slots, name), slot, keepdims=False) for name in names}
