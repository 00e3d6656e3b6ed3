"""The heads of the cache on tensor shards: each shard attends with heads of its own.

XLA splits the products with weights by itself. A kernel it would run whole on every shard, so that attention is handed
to the shards here, with the part of the cache that each of them holds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from sparrow_jax.models.shape import DecoderShape

WHOLE = PartitionSpec()
FIRST, SECOND, THIRD = (PartitionSpec(*[None] * axis, 'tensor') for axis in range(3))  # the axis of heads


@dataclasses.dataclass(frozen=True)
class HeadShards:
    """How the KV heads lie on the shards of `tensor`.

    Attributes:
        shards: over which they are split; 1 where they are whole on every shard.
        kv_heads: of the model.
        copies: shards that hold the same KV head, each for a part of its query heads.
    """

    shards: int
    kv_heads: int
    copies: int = 1

    @classmethod
    def of(cls, shape: DecoderShape, tensor: int) -> 'HeadShards':
        """Of a decoder over so many tensor shards."""
        K, group = shape.kv_heads, shape.query_heads // shape.kv_heads
        if K % tensor == 0:
            return cls(tensor, K)
        copies = tensor // K
        return cls(tensor, K, copies) if tensor % K == 0 and group % copies == 0 else cls(1, K)

    @property
    def cache_heads(self) -> int:
        """K of the cache: a head that several shards hold counts several times."""
        return self.kv_heads * self.copies

    @property
    def of_shard(self) -> int:
        """KV heads that a shard holds."""
        return self.cache_heads // self.shards

    def repeated(self, x: jax.Array, axis: int) -> jax.Array:
        """Keys or values of the model's KV heads, for those of the cache."""
        return x if self.copies == 1 else jnp.repeat(x, self.copies, axis=axis)

    def whole_groups(self, q_BHA: jax.Array) -> jax.Array:
        """For each KV head of the cache all queries of its group: pages are chosen for a group as a whole."""
        if self.copies == 1:
            return q_BHA
        B, H, A = q_BHA.shape
        group = H // self.kv_heads
        return self.repeated(q_BHA.reshape(B, self.kv_heads, group, A), axis=1).reshape(B, H * self.copies, A)

    def each(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`function` on every shard, of the heads that it holds.

        Args:
            in_specs, out_specs: for each argument and result one of WHOLE, FIRST, SECOND and THIRD.
        """
        if self.shards == 1:
            return function
        return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names={'tensor'}, check_vma=False)
