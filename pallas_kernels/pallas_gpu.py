"""The way from a kernel body to a call on a GPU, the same for every version of JAX that is supported.

Versions differ in where the interpreter's settings are found, in what it knows, and in which kernels may write to
their operands; whatever else they differ in belongs here too.
"""

import contextvars
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

try:
    _INTERPRETER = plgpu.InterpretGPUParams()  # type: ignore[attr-defined]
except AttributeError:  # before 0.11
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    # A bulk copy may start within an array and end beyond it; that interpreter would call it an error.
    _INTERPRETER = InterpretGPUParams(out_of_bounds_reads='uninitialized')

_interpreting = contextvars.ContextVar('_interpreting', default=False)
_index = inspect.signature(plgpu.load).parameters.get('idx')
_LOADS_TAKE_INDICES = _index is not None and _index.default is inspect.Parameter.empty  # before 0.11

# Layouts are inferred for a warpgroup as a whole; the default, one lane's view, knows fewer of them.
_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)

MULTIPROCESSORS = 132  # of an H100 or H200
_HALF_OF_MEMORY = 114 << 10  # bytes, of a multiprocessor's shared memory
_MOST_OF_A_BLOCK = 226 << 10  # bytes of shared memory for arrays; one KiB more is left to barriers

_SINCE_0_11 = tuple(int(part) for part in jax.__version__.split('.')[:2]) >= (0, 11)
_PLAIN_ROWS = _SINCE_0_11  # layouts are found for an array written transposed into shared memory of plain rows
_INTERPRETS_TRANSPOSES = _SINCE_0_11  # the interpreter multiplies transposed references


def row_memory(rows: int, columns: int, dtype: jax.typing.DTypeLike) -> Any:
    """Shared memory that is read and written transposed by the warpgroup and row by row by copies."""
    if _PLAIN_ROWS:
        return plgpu.SMEM((rows, columns), dtype)
    transforms = (plgpu.TilingTransform((1, 128 // jax.numpy.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any = (),
    grid: Sequence[int],
    grid_names: Sequence[str],
    scratch_types: Sequence[Any] | Mapping[str, Any] = (),
    num_threads: int | None = None,
    thread_name: str | None = None,
    alone: bool = False,
    compiler_params: plgpu.CompilerParams = _PARAMS,
    name: str,
    interpret: bool,
) -> Callable[..., Any]:
    """`plgpu.kernel`, whose operands may also be references (`mutable`), written in place.

    Args:
        body: called with a reference to each operand, output and scratch, in this order; scratch by name when
            `scratch_types` is a mapping.
        out_type: tree of `jax.ShapeDtypeStruct`.
        grid, grid_names: thread blocks, and the names by which `lax.axis_index` tells them apart.
        scratch_types: `plgpu.SMEM`, `plgpu.Barrier` and the like.
        num_threads, thread_name: warpgroups of a block, where there is more than one.
        alone: a multiprocessor takes one block only, because the block asks for more than half of the shared memory.
            For kernels that begin early, with few blocks: they would crowd where the kernel before leaves room.
        name: of the kernel in profiles.
        interpret: on the CPU, by JAX's interpreter of GPU kernels.

    Returns:
        A function of the operands; its result has the structure of `out_type`.
    """
    mesh = plgpu.Mesh(
        grid=tuple(grid),
        grid_names=tuple(grid_names),
        num_threads=num_threads,
        thread_name=thread_name,
        kernel_name=name,
    )
    positional, named = ((), scratch_types) if isinstance(scratch_types, Mapping) else (scratch_types, {})
    unused = max(_HALF_OF_MEMORY - _shared_bytes([*positional, *named.values()]), 0) if alone else 0
    run_scoped = functools.partial(pl.run_scoped, collective_axes=thread_name or ())

    def scoped(*refs: Any) -> None:
        run = lambda *_: run_scoped(functools.partial(body, *refs), *positional, **named)
        before = _interpreting.set(interpret)
        try:
            run_scoped(run, plgpu.SMEM((unused,), jax.numpy.int8)) if unused and not interpret else run()
        finally:
            _interpreting.reset(before)

    return pl.kernel(
        scoped,
        out_type,
        mesh=mesh,
        compiler_params=compiler_params,
        interpret=_INTERPRETER if interpret else False,
        name=name,
    )


def fits(scratch_types: Iterable[Any]) -> bool:
    """Whether a thread block can have all of this in shared memory."""
    return _shared_bytes(scratch_types) <= _MOST_OF_A_BLOCK


def _shared_bytes(scratch_types: Iterable[Any]) -> int:
    arrays = (ref for ref in scratch_types if not isinstance(ref, plgpu.Barrier))
    return sum(math.prod(ref.shape) * jax.numpy.dtype(ref.dtype).itemsize for ref in arrays)


def mutable(array: jax.Array) -> Any:
    """A reference to the array for a kernel to write in place; `jax.freeze` gives the array back.

    Nothing is copied where the array is donated or not needed any more.
    """
    return jax.new_ref(array, memory_space=plgpu.GMEM)


def interpreting() -> bool:
    """Whether the kernel body that is being traced is for the interpreter: it knows neither layouts nor lanes."""
    return _interpreting.get()


def let_next_start() -> None:
    """Lets the thread blocks of the next kernel take what room there is beside this one's, as soon as all of these have
    come here or ended: what that kernel does before `wait_for_previous` then costs no time.

    It belongs after `wait_for_previous`, and after the reads that should not queue behind those of the next kernel. A
    kernel that reads little may call it before: what the next one reads beforehand must then not be written by the
    kernel before this one either.
    """
    if not interpreting():
        _instruction('griddepcontrol.launch_dependents;')


def wait_for_previous() -> None:
    """Waits until all kernels before this one have ended and what they wrote can be read.

    A kernel that calls this may start while the one right before it runs. It must come here, in every thread block,
    before it reads what that one writes and before it writes anything.
    """
    if not interpreting():
        plgpu.griddepcontrol_wait()  # tells the compiler that the kernel may start early
        _instruction('griddepcontrol.wait;')  # again: reads may be moved before that one


def _instruction(text: str) -> None:
    """An instruction that no read or write is moved across."""

    @plgpu.inline_mgpu()
    def issue(_: Any) -> None:
        llvm.inline_asm(ir.Type.parse('!llvm.void'), [], text, '~{memory}', has_side_effects=True)

    issue()


def in_every_warp(size: int) -> Any:
    """The layout of a vector that every warp holds whole: for vectors of fewer numbers than a warpgroup has threads."""
    return plgpu.Layout.TILED(plgpu.Tiling(((size,), (size // 32,))), (plgpu.Replicated(4),), (-2,), -1)


def layout_cast(array: jax.Array, layout: Any) -> jax.Array:
    """`plgpu.layout_cast`; the array itself for the interpreter."""
    return array if interpreting() else plgpu.layout_cast(array, layout)


def load(ref: Any, *, layout: Any, optimized: bool = True) -> jax.Array:
    """What a reference points at, in the given layout: `plgpu.load`, where reading by index is not enough."""
    if interpreting():
        return ref[...]
    if _LOADS_TAKE_INDICES:
        return plgpu.load(ref, ..., layout=layout, optimized=optimized)
    return plgpu.load(ref, layout=layout, optimized=optimized)  # type: ignore[call-arg]


def load_transposed(ref: Any, *, layout: Any) -> jax.Array:
    """The transpose of a matrix in memory."""
    if interpreting():
        return ref[...].T
    return load(ref.T, layout=layout, optimized=False)


def store_transposed(ref: Any, array: jax.Array) -> None:
    """Writes the transpose of a matrix into memory."""
    if interpreting():
        ref[...] = array.T
    else:
        ref.T[...] = layout_cast(array, plgpu.Layout.WGMMA_TRANSPOSED)


class Operand(NamedTuple):
    """A factor of a matrix product: a bfloat16 matrix in shared memory, or its transpose."""

    ref: Any
    transposed: bool = False


def product(shape: tuple[int, int], factors: Sequence[tuple[Operand, Operand]]) -> jax.Array:
    """Sum of the products of pairs of matrices, in float32, by the warpgroup at hand."""
    if interpreting() and not _INTERPRETS_TRANSPOSES:
        parts = [jax.numpy.matmul(_value(left), _value(right), precision='highest') for left, right in factors]
        return functools.reduce(jax.numpy.add, parts)

    def multiply(sum_ref: Any) -> jax.Array:
        for left, right in factors:
            plgpu.wgmma(sum_ref, _given(left), _given(right))
        return sum_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jax.numpy.float32))


def add_products(sums: Sequence[jax.Array], factors: Sequence[tuple[Operand | jax.Array, Operand]]) -> list[jax.Array]:
    """Each float32 sum and the product of its pair of matrices, all of them under way at once.

    A left factor may also be a bfloat16 array, in registers.
    """
    if interpreting():
        return [
            sum_MN + jax.numpy.matmul(_value(left), _value(right), precision='highest')
            for sum_MN, (left, right) in zip(sums, factors, strict=True)
        ]

    def multiply(sum_refs: Sequence[Any]) -> None:
        for sum_ref, (left, right) in zip(sum_refs, factors, strict=True):
            plgpu.wgmma(sum_ref, _given(left), _given(right))

    return pl.run_state(multiply)([plgpu.ACC.init(sum_MN) for sum_MN in sums])


def _given(factor: Operand | jax.Array) -> Any:
    if not isinstance(factor, Operand):
        return factor
    return factor.ref.T if factor.transposed else factor.ref


def _value(factor: Operand | jax.Array) -> jax.Array:
    array = factor.ref[...] if isinstance(factor, Operand) else factor
    transposed = isinstance(factor, Operand) and factor.transposed
    return (array.T if transposed else array).astype(jax.numpy.float32)


def iota(shape: tuple[int, ...], dimension: int, *, layout: Any) -> jax.Array:
    """int32 indices along a dimension, in the given layout."""
    if interpreting():
        return jax.lax.broadcasted_iota(jax.numpy.int32, shape, dimension)
    return plgpu.broadcasted_iota(jax.numpy.int32, shape, dimension, layout=layout)
