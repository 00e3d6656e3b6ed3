"""Alphas of given sequences, from whole rows: dense and teacher-forced sparse forward passes, compared token by token.

Whatever the other policy's hidden states come from (a sparse pass, or the sampler itself), they are compared with those
of one dense pass, which is made once and kept on the host.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels.implementation import Implementation
from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.assembly import Parts
from sparrow_jax.calibrate.contexts import Contexts
from sparrow_jax.config import ConfigError
from sparrow_jax.learner.heads import token_acceptance
from sparrow_jax.learner.rows import RowLayout
from sparrow_jax.models.attention import best_implementation, causal_attend
from sparrow_jax.models.sparse_attention import sparse_causal_attend
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.parallel.transfer import place, read
from sparrow_jax.rollout.functions import choose_kernels
from sparrow_jax.sparsity.calibration import Tokens
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule, budget_for_length

OnRows = Callable[[int, int], None]  # rows done, of how many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that are passed together, one sequence each; NumPy on the host."""

    token_BT: Any  # int32, 0 in padding
    length_B: Any  # int32 tokens of the sequence; 0 for a row of padding
    prompt_B: Any  # int32 of them its prompt
    index_B: Any  # int32 which sequence


class Passes:
    """Compiled passes over a model's rows.

    Budgets are values: a policy, a page size and a length of rows compile, a budget does not.

    Args:
        parts: of the run; its schedule says which layers and pages are always read.
        params: the model.

    Raises:
        ConfigError: tensor shards that do not divide the KV heads, or kernels that do not fit.

    Attributes:
        kernels, why_kernels: what runs the sparse attention, and the reason for it.
    """

    def __init__(self, parts: Parts, params: nnx.State):
        run, mesh, shape = parts.run, parts.mesh, parts.shape
        self.kernels, self.why_kernels = choose_passes_kernels(parts)
        self.parts, self.params, self.mesh = parts, params, mesh
        shards = meshes.batch_shards(mesh)
        rows = -(-run.learner.rows_per_microbatch // shards) * shards
        self.layout = RowLayout(run.row_tokens, rows, packing=False)
        self.hidden_size, self.hidden_dtype = shape.d_model, jnp.dtype(run.model.compute_dtype)
        head = run.rollout.temperature, run.learner.head_chunk_tokens
        graph, attention = parts.sampler_graph, best_implementation(run.model.compute_dtype)
        self._jit = functools.partial(jax.jit, out_shardings=meshes.batch_sharding(mesh))
        self._dense = self._jit(functools.partial(_dense, graph, attention))
        self._compare = self._jit(functools.partial(_compare, graph, head))
        self._measure = functools.partial(_measure, graph, attention, head, mesh, self.kernels)
        self._sparse: dict[Schedule, Any] = {}  # of all but the budgets

    def dense(self, contexts: Contexts, on_rows: OnRows) -> list[np.ndarray]:
        """The dense policy's final hidden states, of each batch [B, T, D]; what the methods below compare with."""
        return [
            read(self._dense(self.params, self._place(batch.token_BT)))
            for batch, _ in _counted(self.batches(contexts), on_rows)
        ]

    def sparse(self, contexts: Contexts, dense: Sequence[np.ndarray], schedule: Schedule, on_rows: OnRows) -> Tokens:
        """Alphas of a teacher-forced sparse pass under a schedule; `dense` is consumed batch by batch."""
        key = dataclasses.replace(schedule, budget_pages=(len(schedule.budget_pages),))
        if key not in self._sparse:
            self._sparse[key] = self._jit(functools.partial(self._measure, key))
        budget_Z = np.asarray(schedule.budget_pages, np.int32)
        found = []
        for batch, i in _counted(self.batches(contexts), on_rows):
            placed, dense_BTD = self._place((batch, dense[i]))
            found.append((batch, read(self._sparse[key](self.params, placed, dense_BTD, budget_Z))))
        return _tokens(contexts, found)

    def sampled(
        self, contexts: Contexts, dense: Sequence[np.ndarray], hidden: Sequence[np.ndarray], on_rows: OnRows
    ) -> Tokens:
        """Alphas of the sampler itself, from the final hidden states [response, D] that it kept of each sequence."""
        found = []
        for batch, i in _counted(self.batches(contexts), on_rows):
            other_BTD = np.zeros(dense[i].shape, self.hidden_dtype)
            for b, index in _rows(batch):
                start = len(contexts.prompts[index]) - 1  # the place that predicts the first response token
                other_BTD[b, start : start + len(hidden[index])] = hidden[index]
            found.append((batch, read(self._compare(self.params, *self._place((dense[i], other_BTD))))))
        return _tokens(contexts, found)

    def batches(self, contexts: Contexts) -> list[Batch]:
        """The sequences by falling length, one a row, in rows of a few lengths."""
        sizes = [len(p) + len(r) for p, r in zip(contexts.prompts, contexts.responses, strict=True)]
        order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        batches = []
        shortest = 0
        for length in self.layout.buckets():
            inside = [i for i in order if shortest < sizes[i] <= length]
            shortest, rows = length, self.layout.rows_of(length)
            batches += [_batch(contexts, inside[i : i + rows], rows, length) for i in range(0, len(inside), rows)]
        return batches

    def _place(self, tree: Any) -> Any:
        return place(tree, meshes.batch_sharding(self.mesh))


def choose_passes_kernels(parts: Parts) -> tuple[Implementation, str]:
    """What runs the sparse attention of the passes, and the reason for it.

    Raises ConfigError where the mesh cannot share the heads, or kernels that are asked for do not fit.
    """
    run, mesh, shape = parts.run, parts.mesh, parts.shape
    tensor = mesh.shape['tensor']
    if shape.kv_heads % tensor:
        raise ConfigError(
            f'parallel.tensor={tensor}: does not divide the {shape.kv_heads} KV heads, which a teacher-forced pass '
            'splits over it; set parallel.fsdp in its place'
        )
    return choose_kernels(run.rollout.kernels, shape, mesh, jnp.dtype(run.model.compute_dtype))


def _dense(graphdef, attention: str, params, token_BT) -> jax.Array:
    return _decoder_hidden(nnx.merge(graphdef, params), token_BT, causal_attend(None, attention))


def _compare(graphdef, head: tuple[float, int], params, dense_BTD, other_BTD) -> tuple[jax.Array, jax.Array]:
    return token_acceptance(nnx.merge(graphdef, params).logits, dense_BTD, other_BTD, *head)


def _measure(
    graphdef,
    attention: str,
    head: tuple[float, int],
    mesh,
    kernels: Implementation,
    schedule: Schedule,
    params,
    batch: Batch,
    dense_BTD,
    budget_Z,
) -> tuple[jax.Array, jax.Array]:
    """Alphas between a sparse pass and the dense one. Of the schedule all but the budgets is used; these are values."""
    decoder = nnx.merge(graphdef, params)
    position_T = jnp.arange(batch.token_BT.shape[1], dtype=jnp.int32)
    budget_T = budget_for_length(budget_Z, position_T + 1, schedule.bin_width_tokens)
    attend = sparse_causal_attend(
        causal_attend(None, attention),
        schedule.dense_layers,
        batch.length_B,
        jnp.where(position_T < batch.prompt_B[:, None], EVERY_PAGE, budget_T),
        mesh,
        page_tokens=schedule.page_tokens,
        reserved_first=schedule.reserved_first,
        reserved_last=schedule.reserved_last,
        policy=SelectionPolicy(schedule.policy),
        kernels=kernels,
    )
    sparse_BTD = _decoder_hidden(decoder, batch.token_BT, attend)
    return token_acceptance(decoder.logits, dense_BTD, sparse_BTD, *head)


def _decoder_hidden(decoder, token_BT, attend) -> jax.Array:
    return decoder.hidden(token_BT, jnp.broadcast_to(jnp.arange(token_BT.shape[1]), token_BT.shape), attend)


def _batch(contexts: Contexts, indices: Sequence[int], rows: int, length: int) -> Batch:
    token_BT, numbers_3B = np.zeros((rows, length), np.int32), np.zeros((3, rows), np.int32)
    for b, index in enumerate(indices):
        prompt, response = contexts.prompts[index], contexts.responses[index]
        ids = np.concatenate([prompt, response])
        token_BT[b, : len(ids)] = ids
        numbers_3B[:, b] = len(ids), len(prompt), index
    return Batch(token_BT, *numbers_3B)


def _rows(batch: Batch) -> Iterator[tuple[int, int]]:
    """(row, sequence) of all rows that are no padding."""
    return ((b, int(batch.index_B[b])) for b in np.nonzero(batch.length_B)[0].tolist())


def _tokens(contexts: Contexts, found: Sequence[tuple[Batch, tuple[np.ndarray, np.ndarray]]]) -> Tokens:
    """The measured tokens: those of each response but the first, which the dense prefill draws."""
    of_sequence: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for batch, (alpha_BT, top20_BT) in found:
        for b, index in _rows(batch):
            places = slice(int(batch.prompt_B[b]), int(batch.length_B[b]) - 1)
            of_sequence[index] = alpha_BT[b, places], top20_BT[b, places]
    order = range(len(contexts))
    counts = [len(of_sequence[i][0]) for i in order]
    return Tokens(
        alpha=np.concatenate([of_sequence[i][0] for i in order]),
        top20=np.concatenate([of_sequence[i][1] for i in order]),
        length=contexts.measured_lengths().astype(np.int32),
        sequence=np.repeat(np.arange(len(contexts), dtype=np.int32), counts),
    )


def _counted(batches: Sequence[Batch], on_rows: OnRows) -> Iterator[tuple[Batch, int]]:
    """Each batch with its number; tells how many rows are done."""
    total = sum(int((batch.length_B > 0).sum()) for batch in batches)
    done = 0
    for i, batch in enumerate(batches):
        yield batch, i
        done += int((batch.length_B > 0).sum())
        on_rows(done, total)
