"""Where heads go on tensor shards, by hand; whole engines over such shards are in `test_engine_sharding`."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from sampler_setup import SHAPE

from sparrow_jax.rollout.head_shards import HeadShards


def heads(query, kv, tensor):
    return HeadShards.of(dataclasses.replace(SHAPE, query_heads=query, kv_heads=kv), tensor)


@pytest.mark.parametrize(
    ('query', 'kv', 'tensor', 'shards', 'of_shard', 'cache_heads'),
    [
        (32, 8, 1, 1, 8, 8),
        (32, 8, 4, 4, 2, 8),
        (32, 8, 8, 8, 1, 8),
        (32, 8, 16, 16, 1, 16),  # each KV head on two shards, with two of its four query heads on each
        (4, 2, 4, 4, 1, 4),
        (40, 8, 16, 1, 8, 8),  # five query heads cannot be halved: whole on every shard
        (32, 8, 3, 1, 8, 8),
    ],
)
def test_a_shard_holds_as_few_heads_as_there_are(query, kv, tensor, shards, of_shard, cache_heads):
    found = heads(query, kv, tensor)
    assert (found.shards, found.of_shard, found.cache_heads) == (shards, of_shard, cache_heads)


def test_a_kv_head_on_two_shards_is_written_twice_and_sees_its_whole_group_when_choosing():
    found = heads(query=8, kv=2, tensor=4)
    k_BKA = jnp.arange(2, dtype=jnp.float32)[None, :, None]
    np.testing.assert_array_equal(found.repeated(k_BKA, axis=1).ravel(), [0, 0, 1, 1])
    q_BHA = jnp.arange(8, dtype=jnp.float32)[None, :, None]
    np.testing.assert_array_equal(found.whole_groups(q_BHA).ravel(), [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7])


def test_nothing_is_repeated_where_heads_are_not_shared():
    found, x_BKA = heads(query=8, kv=4, tensor=4), jnp.zeros((1, 4, 2))
    assert found.repeated(x_BKA, axis=1) is x_BKA
    assert found.whole_groups(x_BKA) is x_BKA
