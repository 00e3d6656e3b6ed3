"""Selection policies: what is kept of a full page, its landmark, and how the pages' landmarks score against a query.

A policy is named in the configuration (`schedule.policy`). `landmark_update` and the prefill write its landmarks,
`page_select` turns its scores into pages. Reserved pages, budgets and ties are the same under every policy, and are
none of its business: a score may be anything, NaN included, where a page is not full.

To add one: a function that makes the landmark, one that scores, a name, and a line in `_RULES`. Code outside this
package, a configuration file or a notebook, calls `register_policy`.
"""

import dataclasses
import enum
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.implementation import Implementation


class SelectionPolicy(enum.StrEnum):
    """Name as in configurations and logs."""

    BLOCK_MEAN = 'block_mean'
    QUEST = 'quest'
    GROUP_SOFTMAX = 'group_softmax'

    @classmethod
    def _missing_(cls, value: object) -> 'SelectionPolicy | None':
        return _REGISTERED.get(value)

    def landmark_width(self, head_dim: int) -> int:
        """W: how many numbers a landmark holds, for keys of `head_dim` numbers."""
        return _RULES[self].keys_wide * head_dim

    def landmark(self, keys_CA: jax.Array) -> jax.Array:
        """The landmark [..., W] of full pages, from their stored keys [..., C, A]; not yet rounded to the cache."""
        return _RULES[self].landmark(keys_CA)

    def scores(self, q_BKGA: jax.Array, landmark_BKNW: jax.Array, full_BN: jax.Array) -> jax.Array:
        """float32 [B, K, N], higher is better. The arguments in float32; full_BN: which pages have a landmark."""
        return _RULES[self].scores(q_BKGA, landmark_BKNW, full_BN)

    def implementation(self, kernels: Implementation) -> tuple[Implementation, str]:
        """What runs `page_select` and `landmark_update` where attention runs on `kernels`; the reason if that differs.

        Both kinds of code have the same cache and the same lists of pages, so they can be mixed.
        """
        if self is SelectionPolicy.BLOCK_MEAN or kernels is Implementation.REFERENCE:
            return kernels, ''
        return Implementation.REFERENCE, f'schedule.policy={self} has no kernels, JAX definitions choose its pages'


def named_policy(op: str, policy: SelectionPolicy | str, implementation: Implementation) -> SelectionPolicy:
    """The policy that an operation was asked for.

    Raises:
        ValueError: there is none of that name, or the implementation does not have it.
    """
    try:
        policy = SelectionPolicy(policy)
    except ValueError:
        raise ValueError(f'{op}: policy={policy!r}: must be one of {", ".join(policy_names())}') from None
    if policy.implementation(implementation)[0] is not implementation:
        raise ValueError(
            f'{op}: policy={policy.value!r} has no kernels; use implementation={Implementation.REFERENCE.value!r} for '
            f'it, not {implementation.value!r}'
        )
    return policy


# ---------------------------------------------------------------------- landmarks


def page_mean(keys_CA: jax.Array) -> jax.Array:
    """The float32 mean of stored keys over the page's tokens (axis -2).

    Added up in token order whatever the backend would choose, so that every path makes the same landmark.
    """
    total_A = keys_CA[..., 0, :].astype(jnp.float32)
    for token in range(1, keys_CA.shape[-2]):
        total_A = total_A + keys_CA[..., token, :].astype(jnp.float32)
    return total_A / keys_CA.shape[-2]


def page_extremes(keys_CA: jax.Array) -> jax.Array:
    """The smallest and, behind it, the largest number in each place of a page's keys (axis -2): [..., 2 A], exact."""
    return jnp.concatenate([keys_CA.min(axis=-2), keys_CA.max(axis=-2)], axis=-1)


# ---------------------------------------------------------------------- scores


def block_mean(q_BKGA: jax.Array, landmark_BKNA: jax.Array, _full_BN: jax.Array) -> jax.Array:
    """score = (mean over the group's heads of q) . mean key. The rule of Sparrow (arXiv 2606.08446, dynamic block
    top-k).
    """
    return jnp.einsum('bka,bkna->bkn', q_BKGA.mean(axis=2), landmark_BKNA, precision=lax.Precision.HIGHEST)


def quest(q_BKGA: jax.Array, landmark_BKNW: jax.Array, _full_BN: jax.Array) -> jax.Array:
    """score = max over the group's heads h of sum_a max(q[h, a] min[a], q[h, a] max[a]). Quest (arXiv 2406.10774).

    The sum bounds the products of head h with the page's keys. Quest was made for models with a KV head for each query
    head. Where a group shares one list of pages the largest of its heads' bounds is taken, since that is again a bound,
    on the best product of any head with any token of the page; a mean over heads would bound nothing and could hide
    the one head that wants a page.

    As min <= max, the larger of the two products is q times max where q is positive and q times min where it is not:
    one matrix product, [min(q, 0), max(q, 0)] . [min, max].
    """
    signed_BKGW = jnp.concatenate([jnp.minimum(q_BKGA, 0), jnp.maximum(q_BKGA, 0)], axis=-1)
    bound_BKGN = jnp.einsum('bkgw,bknw->bkgn', signed_BKGW, landmark_BKNW, precision=lax.Precision.HIGHEST)
    return bound_BKGN.max(axis=2)


def group_softmax(q_BKGA: jax.Array, landmark_BKNA: jax.Array, full_BN: jax.Array) -> jax.Array:
    """score = log sum over the group's heads h of softmax over full pages n of q[h] . mean key[n] / sqrt(A).

    Each head hands out a weight of one, so that a head with long queries does not outvote the others. It is how Native
    Sparse Attention (arXiv 2502.11089, section on importance scores) shares blocks in a group, with the mean key in the
    place of its learned compression. The logarithm keeps the order and cannot underflow. Reserved pages that are full
    take their part of the weight: what a head spends on the first page it does not want elsewhere.
    """
    dot_BKGN = jnp.einsum('bkga,bkna->bkgn', q_BKGA, landmark_BKNA, precision=lax.Precision.HIGHEST)
    scaled_BKGN = jnp.where(full_BN[:, None, None], dot_BKGN / q_BKGA.shape[-1] ** 0.5, -jnp.inf)
    return jax.nn.logsumexp(jax.nn.log_softmax(scaled_BKGN, axis=-1), axis=2)


@dataclasses.dataclass(frozen=True)
class _Rule:
    keys_wide: int  # width of a landmark, in keys
    landmark: Callable[[jax.Array], jax.Array]
    scores: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


_RULES = {
    SelectionPolicy.BLOCK_MEAN: _Rule(1, page_mean, block_mean),
    SelectionPolicy.QUEST: _Rule(2, page_extremes, quest),
    SelectionPolicy.GROUP_SOFTMAX: _Rule(1, page_mean, group_softmax),
}

_REGISTERED: dict[object, SelectionPolicy] = {}


def policy_names() -> tuple[str, ...]:
    """All policies that can be named now: the package's own, then registered ones."""
    return (*SelectionPolicy, *_REGISTERED.values())


def register_policy(
    name: str,
    scores: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    landmark: Callable[[jax.Array], jax.Array] = page_mean,
    keys_wide: int = 1,
) -> SelectionPolicy:
    """Makes a policy of your own known to this process, for `schedule.policy` and `calibrate.policies`.

    A configuration file may call it, so that every command which reads the file knows the policy. Its pages are chosen
    by JAX definitions. A name that was registered before gets the new rule; what was compiled is dropped then, but a
    sampler that is already made keeps the old one, and so do results in a work directory.

    Args:
        name: a Python identifier, and none of the package's own policies.
        scores: as `SelectionPolicy.scores`: q [B, K, G, A], landmark [B, K, N, W] and full [B, N] (bool) to float
            [B, K, N], higher is better. Traced by JAX.
        landmark: as `SelectionPolicy.landmark`: keys [..., C, A] to [..., W]; by default their mean.
        keys_wide: W / A.

    Raises:
        ValueError: the name, or what the functions return for a small example, does not fit.
    """
    if not name.isidentifier():
        raise ValueError(f'register_policy: name={name!r}: must be a Python identifier, like my_policy')
    if name in SelectionPolicy.__members__.values():
        raise ValueError(f'register_policy: name={name!r}: is one of the package; take another')
    _check_rule(name, _Rule(keys_wide, landmark, scores))
    if name in _REGISTERED:
        jax.clear_caches()  # compiled functions go by the name
    else:
        policy = str.__new__(SelectionPolicy, name)
        policy._name_, policy._value_ = name.upper(), name
        _REGISTERED[name] = policy
    _RULES[_REGISTERED[name]] = _Rule(keys_wide, landmark, scores)
    return _REGISTERED[name]


def _check_rule(name: str, rule: _Rule) -> None:
    """That its functions give what they should, for sizes that differ from each other."""
    B, K, G, N, C, A = 1, 2, 3, 5, 8, 16
    W = rule.keys_wide * A
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    got = jax.eval_shape(rule.landmark, of(B, K, N, C, A)).shape
    if got != (B, K, N, W):
        raise ValueError(
            f'register_policy: name={name!r}: landmark made {got} of keys {(B, K, N, C, A)}; with keys_wide='
            f'{rule.keys_wide} it must be {(B, K, N, W)}'
        )
    got = jax.eval_shape(rule.scores, of(B, K, G, A), of(B, K, N, W), jax.ShapeDtypeStruct((B, N), jnp.bool_)).shape
    if got != (B, K, N):
        raise ValueError(
            f'register_policy: name={name!r}: scores made {got} of q {(B, K, G, A)} and landmarks {(B, K, N, W)}; '
            f'it must be {(B, K, N)}'
        )
