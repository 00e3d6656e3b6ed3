"""The controller: budgets that follow the measured tail of alpha, inside the jitted sampling loop.

A few probe sequences are scored by the dense policy while they are being sampled. Their alphas are counted per bin of
cached length (`count`); enough of them are a measurement, from which follows what budgets are needed (`move`,
`sparsity.belief`). All of it is arithmetic on small arrays: no host, no compilation, the same on every shard.

Arrays over bins have the suffix Z, cells of the histogram X, probe slots P.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparrow_jax.sparsity import belief as beliefs
from sparrow_jax.sparsity.belief import Belief
from sparrow_jax.sparsity.mismatch import TAIL
from sparrow_jax.sparsity.tail import CELLS, LEAST_GAP, gap_edges

_BIN_STATE = ('budget_Z', 'moves_Z', 'p05_Z')


@dataclasses.dataclass(frozen=True)
class Control:
    """What the controller holds on to.

    Attributes:
        target: alpha that the 5th percentile of every bin is held at, exact scale.
        bin_width_tokens: cached tokens of a bin.
        min_count: tokens of a bin that make a measurement.
        urgent_count: as few do where the bin is under the target with confidence.
        tolerance: below the target, within which a bin at its largest budget is not said to miss it.
        confidence: standard errors, with sequences as clusters, that count as certain.
        least_budget: pages.
        reserved_pages: read on top of every budget; what is believed is about both together.
    """

    target: float
    bin_width_tokens: int
    min_count: int
    urgent_count: int
    tolerance: float = 0.01
    confidence: float = 2.0
    least_budget: int = 1
    reserved_pages: int = 0

    def most_budgets(self, bins: int, page_tokens: int, pages_per_sequence: int, limit_pages: int = 0) -> np.ndarray:
        """int32 [bins]: pages of the longest sequence of each bin, or the limit where there is one (not 0)."""
        longest = (np.arange(1, bins + 1, dtype=np.int64) * self.bin_width_tokens + page_tokens - 1) // page_tokens
        most_Z = np.minimum(longest, min(pages_per_sequence, limit_pages or pages_per_sequence))
        return np.maximum(most_Z, self.least_budget).astype(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counts:
    """Measured tokens that no budget has answered yet; a bin whose budget has is empty.

    `open_*` belong to sequences that are still being sampled; `pairs_Z3` are sums over finished sequences of n n, n k
    and k k, n being a sequence's tokens in the bin and k those below the target.
    """

    histogram_ZX: jax.Array  # int32 tokens, cells ascending in 1 - alpha
    log_pages_Z: jax.Array  # float32 sum over them of log(pages read under the budget in force)
    open_tokens_PZ: jax.Array  # int32
    open_below_PZ: jax.Array  # int32
    sequences_Z: jax.Array  # int32
    tokens_Z: jax.Array  # int32
    below_Z: jax.Array  # int32
    pairs_Z3: jax.Array  # float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Controller:
    """State of a run's controller; a checkpoint holds it."""

    budget_Z: jax.Array  # float32 pages, ascending: what is believed to hold the target
    moves_Z: jax.Array  # int32 times that each bin's budget in pages was changed
    p05_Z: jax.Array  # float32 as last measured, at whatever budget; -1: not even `urgent_count` tokens so far
    belief: Belief
    counts: Counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Tail:
    """What is known of each bin's tail.

    p05_Z by the rule "lower", to the lower edge of its cell; NaN without tokens. below_Z: tokens below the target.
    under_Z: they are more than a twentieth, with confidence; False for fewer than two sequences.
    """

    tokens_Z: jax.Array
    p05_Z: jax.Array
    below_Z: jax.Array
    under_Z: jax.Array


def start(budget_pages: np.ndarray | jax.Array, probes: int) -> Controller:
    """A controller that begins with these budgets [bins], pages. probes: P, of all shards."""
    budget_Z = lax.cummax(jnp.asarray(budget_pages, jnp.float32))
    bins = budget_Z.shape[0]
    return Controller(
        budget_Z,
        jnp.zeros(bins, jnp.int32),
        jnp.full(bins, -1, jnp.float32),
        beliefs.first(bins, probes),
        _empty(bins, probes),
    )


def renew(controller: Controller) -> Controller:
    """For the rollouts of the next policy: what is known is a little less certain. Counting goes on."""
    probes = controller.counts.open_tokens_PZ.shape[0]
    return dataclasses.replace(controller, belief=beliefs.aged(controller.belief, probes))


def widen(controller: Controller, most_Z: np.ndarray) -> Controller:
    """Every budget doubled, to at most `most_Z` pages; all bins are measured anew, and what was known is forgotten."""
    budget_Z = jnp.minimum(2 * controller.budget_Z, jnp.asarray(most_Z, jnp.float32))
    counts = _emptied(controller.counts, jnp.ones(budget_Z.shape, bool))
    belief = beliefs.first(budget_Z.shape[0], counts.open_tokens_PZ.shape[0])
    return dataclasses.replace(controller, budget_Z=budget_Z, belief=belief, counts=counts)


def close(controller: Controller, ended_P: jax.Array) -> Controller:
    """Ends the clusters of these probes: what their slots measure next belongs to another sequence."""
    old, ended_P1 = controller.counts, ended_P[:, None]
    closed = _clusters(old.open_tokens_PZ * ended_P1, old.open_below_PZ * ended_P1)
    names = ('sequences_Z', 'tokens_Z', 'below_Z', 'pairs_Z3')
    counts = dataclasses.replace(
        old,
        open_tokens_PZ=jnp.where(ended_P1, 0, old.open_tokens_PZ),
        open_below_PZ=jnp.where(ended_P1, 0, old.open_below_PZ),
        **{name: getattr(old, name) + more for name, more in zip(names, closed, strict=True)},
    )
    return dataclasses.replace(controller, counts=counts)


def to_facts(controller: Controller) -> dict[str, Any]:
    """As JSON, exactly. No sequence may be open."""
    return {name: np.asarray(array).tolist() for name, array in _kept(controller).items()}


def from_facts(facts: Mapping[str, Any], like: Controller) -> Controller:
    """What `to_facts` wrote, for the bins and probes of `like`.

    Raises ValueError where the bins are others, or where the facts are those of another version.
    """

    def read(name: str) -> jax.Array:
        if name not in facts:
            raise ValueError(f'{name} is missing')
        value = np.asarray(facts[name], kept[name].dtype)
        if value.shape != kept[name].shape:
            raise ValueError(f'{name} has the shape {value.shape}, not {kept[name].shape}')
        return jnp.asarray(value)

    kept = _kept(like)
    belief = Belief(**{f.name: read(f.name) for f in dataclasses.fields(Belief)})
    counts = dataclasses.replace(like.counts, **{f.name: read(f.name) for f in _closed_fields()})
    return Controller(**{name: read(name) for name in _BIN_STATE}, belief=belief, counts=counts)


def whole_pages(budget_Z: jax.Array | np.ndarray) -> jax.Array:
    """int32 [bins]: of the controller's budgets the nearest whole ones."""
    return jnp.floor(jnp.asarray(budget_Z, jnp.float32) + 0.5).astype(jnp.int32)


def budgets(controller: Controller) -> jax.Array:
    """int32 [bins], the form in which the sampler takes them."""
    return whole_pages(controller.budget_Z)


def count(
    controller: Controller,
    control: Control,
    alpha_PT: jax.Array,
    length_PT: jax.Array,
    measured_PT: jax.Array,
    ended_P: jax.Array,
) -> Controller:
    """Adds a chunk of measured tokens.

    Args:
        alpha_PT: float32 acceptance of the probes' new tokens.
        length_PT: int32 cached tokens when each was sampled.
        measured_PT: bool; what other entries hold is never looked at.
        ended_P: bool; sequences that end with this chunk, so that the slot's next tokens are another's.
    """
    old = controller.counts
    bins, (P, T) = old.tokens_Z.shape[0], alpha_PT.shape
    alpha_PT = jnp.where(measured_PT, alpha_PT, 1.0)
    bin_PT = jnp.minimum(length_PT // control.bin_width_tokens, bins - 1)
    bin_PT = jnp.where(measured_PT, bin_PT, bins)  # out of range: dropped
    histogram_ZX = old.histogram_ZX.at[bin_PT, cell(alpha_PT)].add(1, mode='drop')
    log_read_Z = jnp.log(_read(budgets(controller), control))
    new_Z = (histogram_ZX - old.histogram_ZX).sum(axis=1)
    probe_PT = jnp.broadcast_to(jnp.arange(P)[:, None], (P, T))
    tokens_PZ = old.open_tokens_PZ.at[probe_PT, bin_PT].add(1, mode='drop')
    below_PT = (alpha_PT < control.target).astype(jnp.int32)
    below_PZ = old.open_below_PZ.at[probe_PT, bin_PT].add(below_PT, mode='drop')
    counts = dataclasses.replace(
        old,
        histogram_ZX=histogram_ZX,
        log_pages_Z=old.log_pages_Z + new_Z * log_read_Z,
        open_tokens_PZ=tokens_PZ,
        open_below_PZ=below_PZ,
    )
    return close(dataclasses.replace(controller, counts=counts), ended_P)


def tail(counts: Counts, control: Control) -> Tail:
    """What the counts say, with the standard error of the share below the target taken over whole sequences: tokens of
    one sequence hang together.
    """
    tokens_Z = counts.histogram_ZX.sum(axis=1)
    # Rank floor(0.05 (n - 1)) from the lowest alpha up, that is from the highest cell down.
    rank_Z = jnp.floor(TAIL * jnp.maximum(tokens_Z - 1, 0)).astype(jnp.int32)
    reach_ZX = jnp.cumsum(counts.histogram_ZX[:, ::-1], axis=1)
    place_Z = CELLS - 1 - jnp.argmax(reach_ZX > rank_Z[:, None], axis=1)
    p05_Z = jnp.where(tokens_Z > 0, 1 - jnp.asarray(gap_edges(), jnp.float32)[place_Z + 1], jnp.nan)

    open_ = _clusters(counts.open_tokens_PZ, counts.open_below_PZ)
    finished = counts.sequences_Z, counts.tokens_Z, counts.below_Z, counts.pairs_Z3
    sequences_Z, all_Z, below_Z, pairs_Z3 = (a + b for a, b in zip(finished, open_, strict=True))
    n_Z = jnp.maximum(all_Z, 1).astype(jnp.float32)
    share_Z = below_Z / n_Z
    nn_Z, nk_Z, kk_Z = jnp.moveaxis(pairs_Z3, -1, 0)
    spread_Z = jnp.maximum(kk_Z - 2 * share_Z * nk_Z + share_Z**2 * nn_Z, 0) / n_Z**2
    several_Z = sequences_Z > 1
    error_Z = jnp.sqrt(spread_Z * sequences_Z / jnp.maximum(sequences_Z - 1, 1))
    return Tail(
        tokens_Z,
        p05_Z,
        below_Z,
        under_Z=several_Z & (share_Z - control.confidence * error_Z > TAIL),
    )


def move(controller: Controller, control: Control, most_Z: jax.Array) -> Controller:
    """Moves the budgets by what has been measured.

    A bin is measured once `min_count` tokens are there; as soon as `urgent_count` are if it is under its target with
    confidence. Its tokens are then done with. Budgets ascend: longer sequences need more.

    Args:
        most_Z: int32 pages that the longest sequence of each bin has; a budget of that many is dense.
    """
    seen = tail(controller.counts, control)
    urgent_Z = (seen.tokens_Z >= control.urgent_count) & seen.under_Z
    measured_Z = (seen.tokens_Z >= control.min_count) | urgent_Z
    n_Z = jnp.maximum(seen.tokens_Z, 1).astype(jnp.float32)
    ratio_Z = seen.below_Z / (TAIL * n_Z)
    # A bin that no budget brings to its target would push its neighbours, time after time.
    now_Z = budgets(controller)
    stuck_Z = ((now_Z >= most_Z) & (ratio_Z > 1)) | ((now_Z <= control.least_budget) & (ratio_Z < 1))
    told_Z = measured_Z & ~stuck_Z
    measurement = beliefs.measurement(ratio_Z, controller.counts.log_pages_Z / n_Z, n_Z, told_Z)
    least, most, need_Z = (jnp.log(_read(x, control)) for x in (control.least_budget, most_Z, controller.budget_Z))
    belief, need_Z = beliefs.updated(controller.belief, need_Z, measurement, control.confidence)
    # Limits ascend as well. They come first: what they forbid must not raise the bins behind.
    need_Z = beliefs.ordered(belief, jnp.clip(need_Z, least, most), control.confidence)
    moved_Z = jnp.clip(jnp.exp(need_Z) - control.reserved_pages, control.least_budget, most_Z)
    budget_Z = jnp.where(told_Z.any(), moved_Z, controller.budget_Z)
    shown_Z = measured_Z | ((controller.p05_Z < 0) & (seen.tokens_Z >= control.urgent_count))
    p05_Z = jnp.where(shown_Z, seen.p05_Z, controller.p05_Z)
    moved = dataclasses.replace(controller, budget_Z=budget_Z, p05_Z=p05_Z, belief=belief)
    changed_Z = budgets(moved) != now_Z
    return dataclasses.replace(
        moved, moves_Z=controller.moves_Z + changed_Z, counts=_emptied(controller.counts, measured_Z)
    )


def cell(alpha: jax.Array) -> jax.Array:
    """The histogram's cell of each alpha: uniform in log(1 - alpha), the lowest alpha in the last."""
    gap = jnp.clip(1 - alpha, LEAST_GAP, 1)
    place = jnp.floor((jnp.log(gap) / -math.log(LEAST_GAP) + 1) * CELLS)
    return jnp.clip(place, 0, CELLS - 1).astype(jnp.int32)


def _read(budget: int | jax.Array, control: Control) -> jax.Array:
    """Float32 pages read under a budget; at least half a page, for the logarithm."""
    return jnp.maximum(jnp.asarray(budget, jnp.float32) + control.reserved_pages, 0.5)


def _clusters(tokens_PZ: jax.Array, below_PZ: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sequences, tokens, tokens below the target, and the three sums of products, each over the probes."""
    n_PZ, k_PZ = tokens_PZ.astype(jnp.float32), below_PZ.astype(jnp.float32)
    pairs_PZ3 = jnp.stack([n_PZ * n_PZ, n_PZ * k_PZ, k_PZ * k_PZ], axis=-1)
    return (tokens_PZ > 0).sum(axis=0), tokens_PZ.sum(axis=0), below_PZ.sum(axis=0), pairs_PZ3.sum(axis=0)


def _kept(controller: Controller) -> dict[str, jax.Array]:
    """What a checkpoint holds."""
    closed = {f.name: getattr(controller.counts, f.name) for f in _closed_fields()}
    belief = {f.name: getattr(controller.belief, f.name) for f in dataclasses.fields(Belief)}
    return {name: getattr(controller, name) for name in _BIN_STATE} | belief | closed


def _closed_fields() -> list[dataclasses.Field]:
    """Of finished sequences."""
    return [field for field in dataclasses.fields(Counts) if '_PZ' not in field.name]


def _emptied(counts: Counts, chosen_Z: jax.Array) -> Counts:
    """Without what the chosen bins hold."""

    def keep(name: str) -> jax.Array:
        old, axis = getattr(counts, name), int('_PZ' in name)
        chosen = jnp.expand_dims(chosen_Z, [a for a in range(old.ndim) if a != axis])
        return jnp.where(chosen, jnp.zeros_like(old), old)

    return Counts(**{field.name: keep(field.name) for field in dataclasses.fields(Counts)})


def _empty(bins: int, probes: int) -> Counts:
    integers = jnp.zeros(bins, jnp.int32)
    open_PZ = jnp.zeros((probes, bins), jnp.int32)
    pairs_Z3 = jnp.zeros((bins, 3), jnp.float32)
    histogram_ZX, log_pages_Z = jnp.zeros((bins, CELLS), jnp.int32), jnp.zeros(bins, jnp.float32)
    return Counts(histogram_ZX, log_pages_Z, open_PZ, open_PZ, integers, integers, integers, pairs_Z3)
