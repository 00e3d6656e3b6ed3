"""What the selection needs of single lanes of a GPU: counts and ranks over a warpgroup, reads and writes by index.

Pallas has no words for these. Each stands here twice: in JAX, which says what is computed and is what the interpreter
runs, and in the instructions of one lane. Arrays have one entry a page and are spread by `by_warp`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, nvvm, vector
from jaxlib.mlir.dialects import math as bits

from pallas_kernels.pallas_gpu import interpreting

WARPS, LANES = 4, 32
WARPGROUP = WARPS * LANES


def by_warp(size: int) -> Any:
    """The layout of an array over a warpgroup in which each warp holds a quarter in a row, and neighbours are lanes.

    Reads and writes of neighbours then fall together, and what comes before an entry is: all of the warps before, the
    rows of its own warp before (one register each), and the lanes before.
    """
    if size == WARPGROUP:
        return plgpu.Layout.TILED(plgpu.Tiling(((size,), (LANES,), (1,))), (-3,), (-2,), -1)
    return plgpu.Layout.TILED(plgpu.Tiling(((size,), (size // WARPS,), (LANES,), (1,))), (-4,), (-2,), -1)


def total(arrays: Sequence[jax.Array], scratch_FW: Any) -> Sequence[jax.Array]:
    """The sum of each array.

    Args:
        arrays: int32.
        scratch_FW: int32 in shared memory, a row of one word a warp for each array. The next call needs another one:
            only the call after that may have this one again, since a slow warp may still read it.
    """
    if interpreting():
        return [array_N.sum() for array_N in arrays]

    def lane(_: Any, *args: Any) -> Any:
        *arrays, words_FW = args
        sums = [_over_warp(_sum(_entries(array))) for array in arrays]
        return [_uniform(sum_, like=arrays[0]) for _, sum_ in _over_warps(sums, words_FW)]

    return _inline(lane, arrays, [scratch_FW], [jax.ShapeDtypeStruct((), jnp.int32)] * len(arrays))


def count_before(flags: Sequence[jax.Array], scratch_FW: Any) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
    """For arrays of 0 and 1: how many entries before each entry are 1, and how many in all; see `total`."""
    if interpreting():
        return [jnp.cumsum(flag_N) - flag_N for flag_N in flags], [flag_N.sum() for flag_N in flags]

    def lane(_: Any, *args: Any) -> Any:
        *arrays, words_FW = args
        lanes_before = nvvm.read_ptx_sreg_lanemask_lt()
        rows, sums = [], []
        for array in arrays:
            before_warp, ranks = _constant(0), []
            for flag in _entries(array):
                ones = nvvm.vote_sync(_constant(-1), _equal(flag, 1), nvvm.VoteSyncKind.ballot)
                ranks.append(_add(before_warp, bits.ctpop(arith.andi(ones, lanes_before))))
                before_warp = _add(before_warp, bits.ctpop(ones))
            rows.append(ranks)
            sums.append(before_warp)
        over = _over_warps(sums, words_FW)
        before = [
            _array([_add(base, rank) for rank in ranks], like=array)
            for array, ranks, (base, _) in zip(arrays, rows, over, strict=True)
        ]
        return [*before, *(_uniform(total, like=arrays[0]) for _, total in over)]

    scalars = [jax.ShapeDtypeStruct((), jnp.int32)] * len(flags)
    results = _inline(lane, flags, [scratch_FW], [*flags, *scalars])
    return results[: len(flags)], results[len(flags) :]


def take(source_S: Any, index_N: jax.Array) -> jax.Array:
    """source_S[index_N]; indices lie within the source."""
    if interpreting():
        return source_S[...][index_N]

    def lane(_: Any, indices: Any, source: Any) -> Any:
        return _array([memref.load(source, [_index(index)]) for index in _entries(indices)], like=indices)

    return _inline(lane, [index_N], [source_S], [index_N])[0]


def put(target_M: Any, index_N: jax.Array, value_N: jax.Array) -> None:
    """target_M[index_N] = value_N where the index lies within the target; no two indices are the same."""
    if interpreting():
        target_M[...] = target_M[...].at[index_N].set(value_N, mode='drop')
        return

    def lane(_: Any, indices: Any, values: Any, target: Any) -> Any:
        size = _constant(ir.MemRefType(target.type).shape[0])
        for index, value in zip(_entries(indices), _entries(values), strict=True):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, index, size)):
                memref.store(value, target, [_index(index)])
        return []

    _inline(lane, [index_N, value_N], [target_M], [])


def _inline(lane: Callable[..., Any], arrays: Sequence[jax.Array], refs: Sequence[Any], results: Sequence[Any]) -> Any:
    """Calls `lane` with the arrays' registers and the references; results have the shape and dtype of `results`."""

    def typed(result: Any) -> Any:
        layout = by_warp(*result.shape) if result.shape else plgpu.Layout.WG_SPLAT(())
        return plgpu.ShapeDtypeStruct(result.shape, result.dtype, layout=layout)

    layouts = [by_warp(*array.shape) for array in arrays]
    return plgpu.inline_mgpu(
        arg_types=(*layouts, *(plgpu.RefType() for _ in refs)),
        return_type=[typed(result) for result in results],
    )(lane)(*arrays, *refs)


def _over_warps(sums: Sequence[ir.Value], words_FW: ir.Value) -> list[tuple[ir.Value, ir.Value]]:
    """For each warp's sums: those of the warps before it added up, and those of all."""
    thread = arith.remui(mgpu.thread_idx(), _constant(WARPGROUP))
    warp, lane = arith.divui(thread, _constant(LANES)), arith.remui(thread, _constant(LANES))
    with mgpu.when(_equal(lane, 0)):
        for row, sum_ in enumerate(sums):
            memref.store(sum_, words_FW, [_index(_constant(row)), _index(warp)])
    mgpu.warpgroup_barrier()
    results = []
    for row in range(len(sums)):
        before = total = _constant(0)
        for other in range(WARPS):
            word = memref.load(words_FW, [_index(_constant(row)), _index(_constant(other))])
            is_before = arith.cmpi(arith.CmpIPredicate.ugt, warp, _constant(other))
            before = _add(before, arith.select(is_before, word, _constant(0)))
            total = _add(total, word)
        results.append((before, total))
    return results


def _over_warp(value: ir.Value) -> ir.Value:
    return nvvm.redux_sync(value, nvvm.ReductionKind.ADD, _constant(-1))


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _constant(value: int) -> ir.Value:
    return mgpu.c(value, _i32())


def _index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def _equal(value: ir.Value, number: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, value, _constant(number))


def _add(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.addi(a, b)


def _sum(values: Sequence[ir.Value]) -> ir.Value:
    total = values[0]
    for value in values[1:]:
        total = _add(total, value)
    return total


def _entries(array: mgpu.FragmentedArray) -> list[ir.Value]:
    """This lane's entries, in ascending order."""
    return [vector.extract(register, [], [0]) for register in array.registers.flat]


def _array(entries: Sequence[ir.Value], like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    registers = np.empty(like.registers.size, object)
    registers[:] = [vector.broadcast(ir.VectorType.get((1,), _i32()), entry) for entry in entries]
    return mgpu.FragmentedArray(
        _registers=registers.reshape(like.registers.shape), _layout=like.layout, _is_signed=like.is_signed
    )


def _uniform(value: ir.Value, like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    """A number that all lanes agree on."""
    return mgpu.FragmentedArray.splat(value, (), is_signed=like.is_signed)
