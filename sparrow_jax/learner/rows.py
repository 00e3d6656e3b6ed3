"""Sequences into rows of fixed length: packed with segment ids, or one a row in length buckets.

Responses come from the rollout (worked solutions in supervised training); micro-batches of NumPy arrays go to the
learner's jitted functions. In a row, place t predicts token t + 1: target, mask, actor log-prob, advantage and the
sampler's hidden state of a response token all stand at the place that predicts it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

Array = Any  # NumPy on the host, jax on the device


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt with its response.

    Attributes:
        prompt_ids, response_ids: int [tokens].
        logp_actor: float32 [response]. advantage: of the whole response.
        hidden: [response, D] the sampler's final hidden states, or None.
        learned: whether the losses count it; it is scored either way.
      pages_read: int32 [response] pages that the sampler read for each token, 0 for all of them; or None.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logp_actor: np.ndarray | None = None
    advantage: float = 0.0
    hidden: np.ndarray | None = None
    learned: bool = True
    pages_read: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclasses.dataclass(frozen=True)
class Counts:
    """Response tokens, and responses, that the losses of some rows count."""

    tokens: float
    sequences: float

    def __add__(self, other: 'Counts') -> 'Counts':
        return Counts(self.tokens + other.tokens, self.sequences + other.sequences)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    """One micro-batch of B rows of T places."""

    token_BT: Array  # int32, 0 in padding
    position_BT: Array  # int32 within its sequence
    segment_BT: Array  # int32, 1, 2, ... within the row; 0 in padding
    target_BT: Array  # int32 next token
    mask_BT: Array  # float32, 1 where the target is a response token
    logp_actor_BT: Array  # float32
    advantage_BT: Array  # float32
    first_BT: Array  # bool, the target is the response's first token (drawn by the dense prefill)
    learned_BT: Array  # float32, 0 in sequences that the losses leave out, and in padding
    hidden_BTD: Array  # the sampler's hidden states; D is 0 when none were kept
    pages_read_BT: Any = None  # int32 by sparse layers for the target, 0 = all; None but for the adapter's updates

    @property
    def loss_mask_BT(self) -> Array:
        """1 where the target is a response token that the losses count."""
        return self.mask_BT * self.learned_BT

    @property
    def counts(self) -> Counts:
        kept_BT = self.loss_mask_BT
        return Counts(float(kept_BT.sum()), float((kept_BT * self.first_BT).sum()))


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """How rows are made.

    Attributes:
        row_tokens: T of a packed row, and the longest bucket.
        rows: rows of one micro-batch at that length; shorter buckets hold proportionally more.
        packing: several sequences a row (attention then needs segment ids), or one.
    """

    row_tokens: int
    rows: int
    packing: bool

    def buckets(self) -> tuple[int, ...]:
        """Row lengths in use: one when packing, else the longest and its halves down to 256 tokens."""
        lengths = [self.row_tokens]
        while not self.packing and lengths[-1] >= 512 and lengths[-1] % 256 == 0:
            lengths.append(lengths[-1] // 2)
        return tuple(reversed(lengths))

    def rows_of(self, length: int) -> int:
        return self.rows * (self.row_tokens // length)


def micro_batches(samples: Sequence[Sample], layout: RowLayout) -> list[Rows]:
    """All samples in as few micro-batches as first-fit by falling length gives. The order is a function of the
    lengths alone.

    Raises ValueError for a sample longer than a row, or without a prompt.
    """
    if not all(len(sample.prompt_ids) for sample in samples):
        raise ValueError('a sequence without a prompt: no place predicts its first response token')
    order = sorted(range(len(samples)), key=lambda i: (-samples[i].tokens, i))
    if order and samples[order[0]].tokens > layout.row_tokens:
        raise ValueError(f'a sequence of {samples[order[0]].tokens} tokens does not fit a row of {layout.row_tokens}')
    hidden = next((s.hidden for s in samples if s.hidden is not None), None)
    records_pages = any(s.pages_read is not None for s in samples)
    batches = []
    for length in layout.buckets():
        floor = max((n for n in layout.buckets() if n < length), default=-1)
        inside = [samples[i] for i in order if floor < samples[i].tokens <= length]
        rows = _first_fit(inside, length) if layout.packing else [[s] for s in inside]
        size = layout.rows_of(length)
        batches += [_fill(rows[i : i + size], size, length, hidden, records_pages) for i in range(0, len(rows), size)]
    return batches


def empty_rows(
    layout: RowLayout, length: int, hidden_size: int = 0, hidden_dtype=np.float32, records_pages: bool = False
) -> Rows:
    """A micro-batch of padding, to compile with."""
    return _fill([], layout.rows_of(length), length, np.zeros((0, hidden_size), hidden_dtype), records_pages)


def _first_fit(samples: Sequence[Sample], length: int) -> list[list[Sample]]:
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in samples:
        row = next((i for i, free in enumerate(room) if free >= sample.tokens), None)
        if row is None:
            rows.append([])
            room.append(length)
            row = len(rows) - 1
        rows[row].append(sample)
        room[row] -= sample.tokens
    return rows


def _fill(
    rows: Sequence[Sequence[Sample]], count: int, length: int, hidden: np.ndarray | None, records_pages: bool
) -> Rows:
    integers = lambda: np.zeros((count, length), np.int32)
    floats = lambda: np.zeros((count, length), np.float32)
    size, dtype = (hidden.shape[1], hidden.dtype) if hidden is not None else (0, np.dtype(np.float32))
    out = Rows(
        token_BT=integers(),
        position_BT=integers(),
        segment_BT=integers(),
        target_BT=integers(),
        mask_BT=floats(),
        logp_actor_BT=floats(),
        advantage_BT=floats(),
        first_BT=np.zeros((count, length), bool),
        learned_BT=floats(),
        hidden_BTD=np.zeros((count, length, size), dtype),
        pages_read_BT=integers() if records_pages else None,
    )
    for b, row in enumerate(rows):
        start = 0
        for segment, sample in enumerate(row, start=1):
            ids = np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int32)
            here = slice(start, start + len(ids))
            first = start + len(sample.prompt_ids) - 1
            answer = slice(first, first + len(sample.response_ids))
            out.token_BT[b, here] = ids
            out.position_BT[b, here] = np.arange(len(ids))
            out.segment_BT[b, here] = segment
            out.target_BT[b, start : here.stop - 1] = ids[1:]
            out.mask_BT[b, answer] = 1
            out.first_BT[b, first] = True
            out.learned_BT[b, here] = sample.learned
            out.advantage_BT[b, answer] = sample.advantage
            if sample.logp_actor is not None:
                out.logp_actor_BT[b, answer] = sample.logp_actor
            if sample.hidden is not None:
                out.hidden_BTD[b, answer] = sample.hidden
            if sample.pages_read is not None:
                out.pages_read_BT[b, answer] = sample.pages_read
            start = here.stop
    return out
