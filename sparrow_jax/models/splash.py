"""Dense causal attention of long packed rows on TPU: JAX's own splash attention, placed on the mesh.

The kernels skip what lies behind the diagonal and keep one number a query between forward and backward pass, so that
memory grows with the length of a row and not with its square.
"""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import Mesh, PartitionSpec

from sparrow_jax.parallel import mesh as meshes

LANES = 128  # heads and rows are multiples of it
_BLOCKS = (512, 256, LANES)  # tokens of a tile of scores: the largest that divides the row


def why_no_splash(head_dim: int, kv_heads: int, tensor: int, row_tokens: int) -> str | None:
    """Why splash attention does not take such rows, or None where it does."""
    if head_dim % LANES or row_tokens % LANES:
        return f'heads of {head_dim} in rows of {row_tokens} tokens: both must be multiples of {LANES}'
    if kv_heads % tensor:
        return f'{kv_heads} KV heads do not split over parallel.tensor={tensor}'
    return None


def splash_attention(
    q_BTHA: jax.Array,
    k_BTKA: jax.Array,
    v_BTKA: jax.Array,
    segment_BT: jax.Array,
    mesh: Mesh,
    *,
    interpret: bool = False,
) -> jax.Array:
    """softmax(q . k / sqrt(A)) v over tokens s <= t of the same segment.

    Args:
        q_BTHA, k_BTKA, v_BTKA: as `why_no_splash` allows; H a multiple of K; q unscaled. Rows are split over the mesh's
            data shards, heads over its tensor shards.
        segment_BT: int32; padding has a number of its own.
        mesh: of the arrays.
        interpret: run the kernels' code on any machine, slowly, for tests.

    Returns:
        o_BTHA in q's dtype. Differentiable in q, k, v.
    """
    heads = PartitionSpec(meshes.BATCH_AXES, None, 'tensor')

    # Every axis of the mesh by hand: XLA cannot split a kernel.
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(heads, heads, heads, PartitionSpec(meshes.BATCH_AXES)),
        out_specs=heads,
        check_vma=False,
    )
    def of_shard(q_BTHA, k_BTKA, v_BTKA, segment_BT):
        _, T, H, A = q_BTHA.shape
        kernel = _kernel(H, T, interpret)
        heads_first = [x.swapaxes(1, 2) for x in (q_BTHA * A**-0.5, k_BTKA, v_BTKA)]
        o_BHTA = jax.vmap(kernel)(*heads_first, splash.SegmentIds(segment_BT, segment_BT))
        return o_BHTA.swapaxes(1, 2)

    return of_shard(q_BTHA, k_BTKA, v_BTKA, segment_BT)


@functools.cache
def _kernel(heads: int, tokens: int, interpret: bool) -> Callable[..., jax.Array]:
    """Of one row, [H, T, A]; made once, and not for every layer: it lists the blocks of the mask on the host."""
    size = next(size for size in _BLOCKS if tokens % size == 0)
    blocks = splash.BlockSizes(
        block_q=size, block_kv=size, block_q_dkv=size, block_kv_dkv=size, block_q_dq=size, block_kv_dq=size
    )
    mask = splash.MultiHeadMask([splash.CausalMask((tokens, tokens))] * heads)
    with jax.ensure_compile_time_eval():  # it may be asked for inside a function that is being traced
        kernel = splash.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=blocks, interpret=interpret)
    return jax.tree.map(np.asarray, kernel)
