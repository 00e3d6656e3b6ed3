"""What is believed about the pages that each length bin needs, and how a measured tail of alpha changes it.

A Kalman filter for counts. p05 is on target where a twentieth of the tokens is below it. With u = log(pages in force)
and need = log(pages that hold the target), of tokens below the target a share of

    0.05 exp(x),    x = slope (need - u) + lean

is expected. The share changes smoothly with the budget also where p05 jumps (most tokens at 1, some far below), and its
noise does not depend on how alpha is distributed. It differs within a bin, whose first tokens need fewer pages than its
last ones: what must average to a twentieth is the share itself and not its logarithm, so that the share is what the
filter takes, as a count with Poisson-like noise. Needs of neighbouring bins hang together, so that the first
measurements of a wrong start correct bins that no sequence has reached yet. The slope is learned from measurements at
different budgets. The lean is what the sequences that are being measured have in common: measured for hours, four of
them tell little about all others.

Everything is arithmetic on small arrays, pure. Z: length bins; E = Z + 2: the needs, the logarithm of
the slope, the lean.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

START_SPREAD = 1.5  # standard deviation of log(needed / start) that all bins share: a start is wrong by a factor of 4.5
BIN_SPREAD = 0.4  # of what the needs of neighbouring bins add to it
SLOPE, SLOPE_SPREAD = 3.0, 0.4  # to begin with, and of its logarithm; 2 to 4.5 on SmolLM2-135M
LEAST_SLOPE, MOST_SLOPE = 0.25, 6.0
TOKEN_SPREAD = 7.5  # of n tokens' share / 0.05, times sqrt(n); 4.4 if neighbouring tokens were not alike
SEQUENCE_SPREAD = 0.6  # of it between sequences; both as measured on SmolLM2-135M
CURVATURE = 0.25  # of the line above: share by which a measurement far from the target is off
STEP_SPREAD, STEP_BIN_SPREAD = 0.05, 0.03  # that a step of training adds to the needs of all bins, and of each
LARGEST_MOVE = math.log(2)  # of a need, by one update
_ITERATIONS = 2  # of linearizing; the second sees how the slope bears on a far measurement
_NEWTON_STEPS = 8  # towards the likeliest share


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Belief:
    """All but the needs themselves, which are the controller's budgets."""

    log_slope: jax.Array  # float32
    lean: jax.Array  # float32
    covariance_EE: jax.Array  # float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Measurement:
    """Tails of alpha, at most one of each bin.

    ratio_Z: share below the target / 0.05. in_force_Z: mean log(pages read) of the tokens. variance_Z: of ratio_Z where
    1 is expected, without the lean's; it grows with what is expected. there_Z: bool; what the other bins hold is never
    looked at.
    """

    ratio_Z: jax.Array
    in_force_Z: jax.Array
    variance_Z: jax.Array
    there_Z: jax.Array


def measurement(ratio_Z: jax.Array, in_force_Z: jax.Array, tokens_Z: jax.Array, there_Z: jax.Array) -> Measurement:
    """With the variance that so many tokens leave."""
    return Measurement(ratio_Z, in_force_Z, TOKEN_SPREAD**2 / tokens_Z, there_Z)


def first(bins: int, probes: int) -> Belief:
    """Before anything was measured. probes: sequences that are measured together."""
    walk_ZZ = jnp.minimum(*jnp.ix_(jnp.arange(bins), jnp.arange(bins))).astype(jnp.float32)
    covariance_EE = jnp.zeros((bins + 2, bins + 2), jnp.float32)
    covariance_EE = covariance_EE.at[:bins, :bins].set(START_SPREAD**2 + BIN_SPREAD**2 * walk_ZZ)
    covariance_EE = covariance_EE.at[bins, bins].set(SLOPE_SPREAD**2)
    return _other_sequences(Belief(jnp.float32(math.log(SLOPE)), jnp.float32(0), covariance_EE), probes)


def aged(belief: Belief, probes: int) -> Belief:
    """For the next step: the policy has changed a little, and the measured sequences are others."""
    bins = belief.covariance_EE.shape[0] - 2
    drift_ZZ = STEP_SPREAD**2 + STEP_BIN_SPREAD**2 * jnp.eye(bins, dtype=jnp.float32)
    covariance_EE = belief.covariance_EE.at[:bins, :bins].add(drift_ZZ)
    return _other_sequences(dataclasses.replace(belief, covariance_EE=covariance_EE), probes)


@jax.default_matmul_precision(
    'highest'
)  # products of fewer bits, as accelerators like them, would drown small variances
def updated(belief: Belief, need_Z: jax.Array, seen: Measurement, confidence: float) -> tuple[Belief, jax.Array]:
    """The belief and the needs [Z] after a measurement, the needs not yet in order.

    A bin's measurement that is more standard deviations away than `confidence` widens the belief until it is not: the
    policy may have changed more than was thought.
    """
    Z = need_Z.shape[0]
    old_E = jnp.concatenate([need_Z, belief.log_slope[None], belief.lean[None]])

    def with_bin(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        left_Z, mean_E, covariance_EE = state
        z = jnp.argmax(left_Z)
        ratio, in_force, variance = (x[z] for x in (seen.ratio_Z, seen.in_force_Z, seen.variance_Z))
        mean_E, covariance_EE = _conditioned(mean_E, covariance_EE, z, ratio, in_force, variance, confidence)
        return left_Z.at[z].set(False), mean_E, covariance_EE

    # Few bins have one at a time; a loop over scalars needs no solver, which a device would have to load.
    state = seen.there_Z, old_E, belief.covariance_EE
    _, new_E, covariance_EE = lax.while_loop(lambda state: state[0].any(), with_bin, state)
    new_E = old_E + jnp.clip(new_E - old_E, -LARGEST_MOVE, LARGEST_MOVE)
    return Belief(new_E[Z], new_E[Z + 1], covariance_EE), new_E[:Z]


def _conditioned(
    old_E: jax.Array,
    covariance_EE: jax.Array,
    z: jax.Array,
    ratio: jax.Array,
    in_force: jax.Array,
    variance: jax.Array,
    confidence: float,
) -> tuple[jax.Array, jax.Array]:
    """Mean and covariance given the measurement of bin z."""
    E = old_E.shape[0]
    bin_E, slope_E, lean_E = (jnp.arange(E) == i for i in (z, E - 2, E - 1))

    def linearized(at_E: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x of the bin at these values, and its derivative."""
        slope, away = jnp.exp(at_E[E - 2]), at_E[z] - in_force
        return slope * away + at_E[E - 1], slope * bin_E + slope * away * slope_E + lean_E

    x, row_E = linearized(old_E)
    beyond = (ratio - jnp.exp(x)) ** 2 / confidence**2 - variance * jnp.maximum(ratio, jnp.exp(x))
    wider = jnp.maximum(beyond / jnp.exp(2 * x) - row_E @ covariance_EE @ row_E, 0) / row_E[z] ** 2
    covariance_EE = covariance_EE + wider * jnp.diag(bin_E)
    seen, noise = _of_a_line(ratio, variance, x, row_E @ covariance_EE @ row_E)
    new_E = old_E
    for _ in range(_ITERATIONS):
        x, row_E = linearized(new_E)
        surprise = seen - x - row_E @ (old_E - new_E)
        seen_E = covariance_EE @ row_E
        gain_E = seen_E / (row_E @ seen_E + noise)
        new_E = old_E + jnp.clip(gain_E * surprise, -LARGEST_MOVE, LARGEST_MOVE)
        new_E = new_E.at[E - 2].set(jnp.clip(new_E[E - 2], math.log(LEAST_SLOPE), math.log(MOST_SLOPE)))
    # Joseph's form, which rounding leaves a covariance.
    left_EE = jnp.eye(E) - jnp.outer(gain_E, row_E)
    return new_E, left_EE @ covariance_EE @ left_EE.T + noise * jnp.outer(gain_E, gain_E)


def _of_a_line(
    ratio: jax.Array, variance: jax.Array, expected: jax.Array, spread: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """A measurement of x itself, and its variance, that says of x what the ratio says (Laplace's approximation).

    With x normal around `expected` with the variance `spread`, and the ratio of mean exp(x) with the variance
    `variance` exp(x), the likeliest x solves (x - expected) / spread = (ratio - exp(x)) / variance. Where much is known
    of x, this is linear in the ratio; where nothing is, x is its logarithm. Far from the target the line is none, and
    the variance larger.
    """
    # From the right of the solution Newton's steps stay there.
    x = jnp.maximum(expected, jnp.log(jnp.maximum(ratio, jnp.finfo(jnp.float32).tiny)))
    for _ in range(_NEWTON_STEPS):
        rate = jnp.exp(x)
        x -= ((x - expected) / spread + (rate - ratio) / variance) / (1 / spread + rate / variance)
    rate = jnp.exp(x)
    return x + (ratio - rate) / rate, variance / rate + (CURVATURE * x) ** 2


def ordered(belief: Belief, need_Z: jax.Array, confidence: float) -> jax.Array:
    """Ascending needs: the nearest (isotonic regression, in which the better known ones stay where they are), but none
    more than `confidence` standard deviations below what is believed of its bin: a bin that is known to need more than
    longer ones is no error of measurement, and they take as much.
    """
    Z = need_Z.shape[0]
    variance_Z = jnp.maximum(jnp.diagonal(belief.covariance_EE)[:Z], jnp.finfo(jnp.float32).tiny)
    first_Z1, last_1Z = jnp.arange(Z)[:, None], jnp.arange(Z)[None]
    weight_ZZ = jnp.where(first_Z1 <= last_1Z, 1 / variance_Z, 0)
    # Means over the bins from `first` to `last`; each need is the largest, over first, of the least, over last.
    mean_ZZ = jnp.cumsum(weight_ZZ * need_Z, axis=1) / jnp.cumsum(weight_ZZ, axis=1)
    least_ZZ = lax.cummin(jnp.where(first_Z1 <= last_1Z, mean_ZZ, jnp.inf), axis=1, reverse=True)
    nearest_Z = jnp.diagonal(lax.cummax(jnp.where(first_Z1 <= last_1Z, least_ZZ, -jnp.inf), axis=0))
    return jnp.maximum(nearest_Z, lax.cummax(need_Z - confidence * jnp.sqrt(variance_Z)))


def _other_sequences(belief: Belief, probes: int) -> Belief:
    """The mean share of a few sequences is on average that of all, its logarithm less."""
    variance = SEQUENCE_SPREAD**2 / max(probes, 1)
    covariance_EE = belief.covariance_EE.at[-1, :].set(0).at[:, -1].set(0).at[-1, -1].set(variance)
    lean = jnp.full_like(belief.lean, -variance / 2)
    return dataclasses.replace(belief, lean=lean, covariance_EE=covariance_EE)
