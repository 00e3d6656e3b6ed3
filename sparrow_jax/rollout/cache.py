"""The paged KV cache and the state of the slots, as pytrees that the jitted functions donate and return.

Layout per layer: one pool `pages_KPCE` (a token's key and value side by side) and `landmark_BKNW`, what the selection
policy keeps of each filled page (its mean key, by default) per slot in logical order, so that scoring reads contiguous
memory. One page table serves all layers.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.rollout.head_shards import HeadShards

# Arrays of `Slots` that a decode step reads: a row a slot, small.
STATE = ('table_BN', 'length_B', 'token_B', 'count_B', 'limit_B', 'active_B', 'stopped_B', 'key_B2')
# Its arrays over probes; all others are over slots.
PROBE_FIELDS = ('probe_table_PN', 'probe_length_P', 'probe_hidden_PTD')


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """Keys and values of all slots. Lists hold one array a layer: a stacked one would be copied before each kernel."""

    pages: list[jax.Array]  # [K, P, C, E]
    landmarks: list[jax.Array]  # [B, K, N, W], W as the policy has it


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Slots:
    """What each slot is doing; arrays over slots B. T is the longest response, D is 0 if hidden states are not kept."""

    table_BN: jax.Array  # int32 physical pages
    length_B: jax.Array  # int32 cached tokens
    token_B: jax.Array  # int32 newest token, not cached yet
    count_B: jax.Array  # int32 response tokens so far, the newest included
    limit_B: jax.Array  # int32 most response tokens
    active_B: jax.Array  # bool
    stopped_B: jax.Array  # bool: ended by an end token
    key_B2: jax.Array  # uint32 key data of the sample
    tokens_BT: jax.Array  # int32 response
    logp_BT: jax.Array  # float32 actor log-prob of each response token, at the sampling temperature
    pages_read_BT: jax.Array  # int32 pages that a sparse layer read for the token; 0 for the first, which prefill draws
    hidden_BTD: jax.Array  # final hidden state that each response token was drawn from
    # Of the first slots, the probes; they have a second, dense cache. No rows where nothing is probed.
    probe_table_PN: jax.Array  # int32 physical pages of the dense cache
    probe_length_P: jax.Array  # int32 tokens in it
    probe_hidden_PTD: jax.Array  # final hidden state of each step of the newest segment


def make_cache(
    shape: DecoderShape,
    *,
    heads: HeadShards,
    slots: int,
    pool_pages: int,
    pages_per_sequence: int,
    page_tokens: int,
    policy: SelectionPolicy,
    dtype,
) -> Cache:
    """An empty cache. Free memory is zero here, but nothing relies on it."""
    K, A = heads.cache_heads, shape.head_dim
    layers = range(shape.layers)
    return Cache(
        pages=[jnp.zeros((K, pool_pages, page_tokens, 2 * A), dtype) for _ in layers],
        landmarks=[jnp.zeros((slots, K, pages_per_sequence, policy.landmark_width(A)), dtype) for _ in layers],
    )


def make_slots(
    *,
    slots: int,
    pages_per_sequence: int,
    max_response_tokens: int,
    kept_hidden_size: int,
    probes: int,
    segment_steps: int,
    hidden_size: int,
    dtype,
) -> Slots:
    """All slots idle. kept_hidden_size: D, or 0 to keep no hidden states of all tokens. hidden_size: D."""
    integers = jnp.zeros(slots, jnp.int32)
    B, T = slots, max_response_tokens
    return Slots(
        table_BN=jnp.zeros((B, pages_per_sequence), jnp.int32),
        length_B=integers,
        token_B=integers,
        count_B=integers,
        limit_B=integers,
        active_B=jnp.zeros(B, bool),
        stopped_B=jnp.zeros(B, bool),
        key_B2=jnp.zeros((B, 2), jnp.uint32),
        tokens_BT=jnp.zeros((B, T), jnp.int32),
        logp_BT=jnp.zeros((B, T), jnp.float32),
        pages_read_BT=jnp.zeros((B, T), jnp.int32),
        hidden_BTD=jnp.zeros((B, T, kept_hidden_size), dtype),
        probe_table_PN=jnp.zeros((probes, pages_per_sequence), jnp.int32),
        probe_length_P=jnp.zeros(probes, jnp.int32),
        probe_hidden_PTD=jnp.zeros((probes, segment_steps, hidden_size), dtype),
    )
