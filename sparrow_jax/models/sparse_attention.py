"""Teacher-forced sparse attention over whole rows: what the sparse sampler computes token by token, for given tokens.

Dense layers and prompts read everything, as in the sampler. Keys and values of response tokens are those of sparse
hidden states, since each layer sees what the sparse layers before it made.
"""

from collections.abc import Collection

import jax
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.implementation import Implementation
from pallas_kernels.page_select.policies import SelectionPolicy
from pallas_kernels.sparse_prefill import sparse_prefill
from sparrow_jax.models.decoder import Attend
from sparrow_jax.parallel import mesh as meshes


def sparse_causal_attend(
    dense: Attend,
    dense_layers: Collection[int],
    length_B: jax.Array,
    budget_BT: jax.Array,
    mesh: Mesh,
    *,
    page_tokens: int,
    reserved_first: int,
    reserved_last: int,
    policy: SelectionPolicy = SelectionPolicy.BLOCK_MEAN,
    kernels: Implementation = Implementation.REFERENCE,
) -> Attend:
    """An `attend` for `Decoder.hidden` in which every token reads the pages that it would read when sampled.

    Args:
        dense: attends in the dense layers, see `attention.causal_attend`.
        dense_layers: their numbers.
        length_B: int32 tokens of each row, which holds one sequence from its start.
        budget_BT: int32 pages beside the reserved ones that each token may read; `schedules.EVERY_PAGE` for a prompt's.
        mesh: of the arrays. Rows lie on its data shards, heads on its tensor shards, whose number divides the KV heads.
        page_tokens: C.
        reserved_first, reserved_last: pages that are always read.
        policy: how the others are chosen.
        kernels: run the attention; and choose the pages, where the policy has kernels for it.
    """
    heads, rows = PartitionSpec(meshes.BATCH_AXES, None, 'tensor'), PartitionSpec(meshes.BATCH_AXES)
    selection, _ = policy.implementation(kernels)

    # Every axis of the mesh by hand: XLA cannot split a kernel.
    def of_shard(q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT):
        return sparse_prefill(
            q_BTHA,
            k_BTKA,
            v_BTKA,
            length_B,
            budget_BT,
            page_tokens=page_tokens,
            reserved_first=reserved_first,
            reserved_last=reserved_last,
            policy=policy,
            implementation=kernels,
            selection=selection,
        )

    on_mesh = jax.shard_map(
        of_shard, mesh=mesh, in_specs=(heads, heads, heads, rows, rows), out_specs=heads, check_vma=False
    )

    def attend(layer: int, q_BTHA: jax.Array, k_BTKA: jax.Array, v_BTKA: jax.Array) -> jax.Array:
        if layer in dense_layers:
            return dense(layer, q_BTHA, k_BTKA, v_BTKA)
        return on_mesh(q_BTHA, k_BTKA, v_BTKA, length_B, budget_BT)

    return attend
