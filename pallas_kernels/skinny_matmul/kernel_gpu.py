"""Few rows times large weights on Hopper: streaming the weights is all that takes time.

A thread block takes a tile of output columns and a part of the rows of the weights that make it (a split). Bulk copies
bring the tile's weights, and the activations beside them, through shared memory several steps ahead. The product has
the columns on its long side and the few rows on the short one,

    y^T [columns, rows] = w^T [columns, D] x^T [D, rows]

so that eight rows, not 64, are the least that the tensor cores work on.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pallas_gpu import (
    Operand,
    add_products,
    kernel,
    layout_cast,
    let_next_start,
    row_memory,
    store_transposed,
    wait_for_previous,
)
from pallas_kernels.skinny_matmul import ROW_MULTIPLE
from pallas_kernels.skinny_matmul.tuning import HopperBlocks, hopper_blocks

_SWIZZLED = 64  # bfloat16 numbers of 128 bytes, the widest unit in which copies shuffle rows


# Under jit, so that the layers of a model share one lowering.
@functools.partial(jax.jit, static_argnames=('gated', 'weights_at_rest', 'interpret', 'blocks'), inline=True)
def skinny_matmul(
    x_BD: jax.Array,
    weights: Sequence[jax.Array],
    *,
    gated: bool,
    weights_at_rest: bool,
    interpret: bool,
    blocks: HopperBlocks | None = None,
) -> jax.Array:
    """See `pallas_kernels.skinny_matmul`; `blocks` are those of `tuning` unless given, and divide all sides."""
    B, D = x_BD.shape
    columns = [weight.shape[1] for weight in weights]
    rows = -(-B // ROW_MULTIPLE) * ROW_MULTIPLE
    blocks = blocks or hopper_blocks(rows, D, columns, gated)
    x_RD = jnp.pad(x_BD, ((0, rows - B), (0, 0))) if rows > B else x_BD
    tile, depth, stages, splits = blocks.columns, blocks.depth, blocks.stages, 1 if gated else blocks.splits
    together = 2 if gated else 1  # matrices that one block multiplies by
    tiles = [n // tile for n in (columns[:1] if gated else columns)]
    steps = D // depth
    split_steps = -(-steps // splits)  # the last splits may have fewer, or none
    width = columns[0] if gated else sum(columns)
    out_dtype = x_BD.dtype if gated else jnp.dtype(jnp.float32)

    def body(x_ref: Any, *refs: Any) -> None:
        weight_refs, (out_ref, x_SRd, w_SdF, y_RF, full) = refs[: len(weights)], refs[len(weights) :]
        tile_index, split = lax.axis_index('tile'), lax.axis_index('split')
        first = split * split_steps
        count = jnp.minimum(first + split_steps, steps) - first

        def part_of(step: Any) -> Any:
            return pl.ds((first + step) * depth, depth)

        def copy_weights(step: Any, stage: Any) -> None:
            part = part_of(step)
            if gated:
                for matrix, ref in enumerate(weight_refs):
                    here = ref.at[part, pl.ds(tile_index * tile, tile)]
                    plgpu.copy_gmem_to_smem(here, w_SdF.at[stage * together + matrix], full.at[stage])
                return
            start = 0
            for ref, number in zip(weight_refs, tiles, strict=True):
                here = ref.at[part, pl.ds((tile_index - start) * tile, tile)]
                copy = functools.partial(plgpu.copy_gmem_to_smem, here, w_SdF.at[stage], full.at[stage])
                if len(tiles) == 1:
                    copy()
                else:
                    pl.when((tile_index >= start) & (tile_index < start + number))(copy)
                start += number

        def copy_rows(step: Any, stage: Any) -> None:
            plgpu.copy_gmem_to_smem(x_ref.at[:, part_of(step)], x_SRd.at[stage], full.at[stage])

        def for_first_steps(act: Any) -> None:
            for step in range(min(stages, split_steps)):
                pl.when(step < count)(functools.partial(act, jnp.int32(step), jnp.int32(step)))

        if weights_at_rest:
            for_first_steps(copy_weights)
            wait_for_previous()
        else:
            wait_for_previous()
            for_first_steps(copy_weights)
        for_first_steps(copy_rows)
        pl.when(count <= stages)(let_next_start)

        def multiply(step: Any, sums: list[jax.Array]) -> list[jax.Array]:
            stage = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(full.at[stage])
            x = Operand(x_SRd.at[stage], transposed=True)
            factors = [(Operand(w_SdF.at[stage * together + matrix], transposed=True), x) for matrix in range(together)]
            sums = add_products(sums, factors)

            # A copy waits for the whole warpgroup, so that everybody has read the stage by then.
            @pl.when(step + stages < count)
            def _() -> None:
                copy_weights(step + stages, stage)
                copy_rows(step + stages, stage)

            # What the next kernel reads beforehand then fills the gap that this one leaves while it ends.
            pl.when(step + stages == count - 1)(let_next_start)
            return sums

        zeros = layout_cast(jnp.zeros((tile, rows), jnp.float32), plgpu.Layout.WGMMA)
        sums = lax.fori_loop(0, count, multiply, [zeros] * together)
        y_FR = sums[0] * lax.logistic(sums[0]) * sums[1] if gated else sums[0]
        store_transposed(y_RF, y_FR.astype(out_dtype))
        plgpu.commit_smem()
        here = pl.ds(tile_index * tile, tile)
        plgpu.copy_smem_to_gmem(y_RF, out_ref.at[:, here] if gated else out_ref.at[split, :, here])
        plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((8, _SWIZZLED)), plgpu.SwizzleTransform(128))
    out_SRF = kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width) if gated else (splits, rows, width), out_dtype),
        grid=(sum(tiles), splits),
        grid_names=('tile', 'split'),
        alone=blocks.alone,
        scratch_types=(
            plgpu.SMEM((stages, rows, depth), x_BD.dtype, transforms=swizzled),
            plgpu.SMEM((stages * together, depth, tile), x_BD.dtype, transforms=swizzled),
            row_memory(rows, tile, out_dtype),
            plgpu.Barrier(num_arrivals=1 + together, num_barriers=stages),
        ),
        name=f'skinny_matmul_{rows}x{D}x{width}',
        interpret=interpret,
    )(x_RD, *weights)
    return out_SRF[..., :B, :] if rows > B else out_SRF
