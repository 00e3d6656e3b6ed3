"""The choice of page_select on TPU, from keys to places, for keys that fill vector registers: no kernel of its own.

Rows lie along sublanes, pages along lanes. A number that belongs to a row is the same in all 128 lanes ([rows, 128]).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pallas_tpu import LANES, SUBLANES

NEVER, ALWAYS = -(1 << 31), (1 << 31) - 1  # keys of pages that do not exist and of reserved ones


def thresholds(keys_ref, count_RL: jax.Array, *, width: int, digit_bits: int) -> jax.Array:
    """The key of each row's count-th best page of the first `width`: the largest that as many keys reach."""
    digits = 1 << digit_bits
    wanted_RL = count_RL.astype(jnp.float32)  # sums over lanes are made in float32; these are exact

    def find_digit(step, threshold_RL):
        shift = 32 - digit_bits * (step + 1)
        candidates = [threshold_RL + (jnp.int32(digit) << shift) for digit in range(1, digits)]
        reached = [jnp.zeros(threshold_RL.shape, jnp.float32) for _ in candidates]
        for start in range(0, width, LANES):
            key_RL = keys_ref[:, start : start + LANES]
            reached = [
                n_RL + jnp.where(key_RL >= candidate_RL, 1.0, 0.0)
                for n_RL, candidate_RL in zip(reached, candidates, strict=True)
            ]
        for n_RL in reached:
            enough = jnp.sum(n_RL, axis=1, keepdims=True) >= wanted_RL
            threshold_RL = threshold_RL + jnp.where(enough, jnp.int32(1) << shift, 0)
        return threshold_RL

    return lax.fori_loop(0, 32 // digit_bits, find_digit, jnp.full(count_RL.shape, NEVER, jnp.int32))


def distances(key_RN, threshold_RL, count_RL) -> jax.Array:
    """How far left each chosen page has to move for the chosen ones to stand together; 0 for the others."""
    chunks = [key_RN[:, start : start + LANES] for start in range(0, key_RN.shape[1], LANES)]
    above = [key_RL > threshold_RL for key_RL in chunks]
    equal = [key_RL == threshold_RL for key_RL in chunks]
    flags = jnp.concatenate([flag.astype(jnp.float32) for flag in above + equal], axis=0).astype(jnp.bfloat16)
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    triangle = jnp.where(row <= column, 1.0, 0.0).astype(jnp.bfloat16)
    to_here = jnp.dot(flags, triangle, preferred_element_type=jnp.float32)
    in_chunk = jnp.dot(flags, jnp.ones_like(triangle), preferred_element_type=jnp.float32)

    def blocks(x):
        split = [x[start : start + SUBLANES] for start in range(0, x.shape[0], SUBLANES)]
        return split[: len(chunks)], split[len(chunks) :]

    (above_to_here, equal_to_here), (above_in, equal_in) = blocks(to_here), blocks(in_chunk)
    ties_RL = count_RL.astype(jnp.float32) - sum(above_in)  # pages to take of those at the threshold, lowest first
    above_before = equal_before = jnp.zeros(count_RL.shape, jnp.float32)
    lane_RL = lax.broadcasted_iota(jnp.int32, count_RL.shape, 1)
    moves = []
    for c in range(len(chunks)):
        equal_RL = equal_before + equal_to_here[c]
        place_RL = above_before + above_to_here[c] + jnp.minimum(equal_RL, ties_RL) - 1
        chosen = above[c] | (equal[c] & (equal_RL <= ties_RL))
        moves.append(jnp.where(chosen, c * LANES + lane_RL - place_RL.astype(jnp.int32), 0))
        above_before, equal_before = above_before + above_in[c], equal_before + equal_in[c]
    return jnp.concatenate(moves, axis=1)


def move_left(away_RN: jax.Array) -> jax.Array:
    """Moves every number left by itself; what stands at place j afterwards, plus j, is where it came from.

    The distances of chosen pages grow to the right, by at most 1 a page less than the pages do; so, from the lowest
    bit up, none of them gets in another's way, and what is not chosen, with distance 0, never moves.
    """
    width = away_RN.shape[1]
    for bit in range((width - 1).bit_length()):
        step = 1 << bit
        leaving_RN = jnp.where((away_RN & step) != 0, away_RN, 0)
        away_RN = (away_RN ^ leaving_RN) | pltpu.roll(leaving_RN, width - step, 1)
    return away_RN


def look_up(table_RN: jax.Array, places_RM: jax.Array) -> jax.Array:
    """table[r, places[r, m]] for places within the table; both have whole registers. Registers look up within one."""
    columns = []
    for start in range(0, places_RM.shape[1], LANES):
        place_RL = places_RM[:, start : start + LANES]
        block_RL, lane_RL = place_RL // LANES, place_RL & (LANES - 1)
        found_RL = jnp.zeros(lane_RL.shape, table_RN.dtype)
        for block in range(table_RN.shape[1] // LANES):
            entries_RL = table_RN[:, block * LANES : (block + 1) * LANES]
            entries_RL = jnp.take_along_axis(entries_RL, lane_RL, axis=1, mode='promise_in_bounds')
            found_RL = jnp.where(block_RL == block, entries_RL, found_RL)
        columns.append(found_RL)
    return jnp.concatenate(columns, axis=1)
