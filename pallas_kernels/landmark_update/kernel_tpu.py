"""landmark_update on TPU: the tiles of memory at hand are read, changed on chip and written back, nothing else.

Memory is copied in tiles of 8 rows, so a token takes its tile along: read, change, write, many sequences in flight. A
token that fills its page also reads the page, whose mean goes into a tile of landmarks in the same way.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.landmark_update.tuning import TPU, Blocks
from pallas_kernels.page_select.policies import page_mean
from pallas_kernels.pallas_tpu import SUBLANES, device_cores, interpreter


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """What is fixed when the kernel is traced.

    Attributes:
        sequences, share: B, and how many of them a core takes.
        page_tokens, head_dim: C and A.
        buffers: sequences in flight.
        whole_tiles: whether N is a multiple of 8. A tile cut off by the array's end cannot be copied: the means are
            then put in their places after the kernel.
    """

    sequences: int
    share: int
    page_tokens: int
    head_dim: int
    buffers: int
    whole_tiles: bool


class _Refs(NamedTuple):
    """Arguments of the kernel: scalars, inputs, results (the pool and the landmarks being their inputs, too), scratch.

    Where tiles are cut off, `landmark_BKNA` holds the means of the core's sequences instead: [share, K, A].

    Per sequence in flight there is the token's tile, the page and the landmarks' tile, for all KV heads. Each of the
    three has a semaphore for what is read: semaphores count bytes, so that one for all could say that the page is there
    when the two others are. What is written is waited for together.
    """

    physical_B: Any
    position_B: Any
    write_B: Any
    pages_in: Any
    landmark_in: Any
    k_BKA: Any
    v_BKA: Any
    pages_KPCE: Any
    landmark_BKNA: Any
    tiles: Any
    full: Any
    marks: Any
    read: Any
    written: Any


def landmark_update(
    pages_KPCE,
    landmark_BKNA,
    k_BKA,
    v_BKA,
    table_BN,
    position_B,
    write_B,
    *,
    interpret: bool,
    blocks: Blocks = TPU,
    cores: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`pallas_kernels.landmark_update.landmark_update` with checked arguments.

    TPU v5e and newer; on chip about twice `Blocks.buffer_bytes` and the tokens. The same bits as the definition.

    Args:
        blocks, cores: for tests; sizes of the chip at hand by default.
    """
    K, P, C, E = pages_KPCE.shape
    B, _, N, A = landmark_BKNA.shape
    cores = cores or device_cores(interpret)
    page_bytes = K * C * E * pages_KPCE.dtype.itemsize
    share = pl.cdiv(B, cores)
    buffers = max(min(blocks.buffer_bytes // page_bytes, blocks.most_buffers, share), 1)
    sizes = _Sizes(B, share, C, A, buffers, whole_tiles=N % SUBLANES == 0)
    # Layers of a step share these, so they are left to the compiler, which makes them once.
    physical_B = jnp.take_along_axis(table_BN, position_B[:, None] // C, axis=1, mode='clip')[:, 0]
    scalars = jnp.clip(physical_B, 0, P - 1), position_B, write_B.astype(jnp.int32)

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    on_chip = pl.BlockSpec(k_BKA.shape, lambda *_: (0, 0, 0))
    landmark_shape = jax.ShapeDtypeStruct(landmark_BKNA.shape, landmark_BKNA.dtype)
    landmark_spec = anywhere
    aliases = {3: 0, 4: 1}  # counted with the scalars
    if not sizes.whole_tiles:
        landmark_shape = jax.ShapeDtypeStruct((cores * share, K, A), landmark_BKNA.dtype)
        landmark_spec = pl.BlockSpec((share, K, A), lambda core, *_: (core, 0, 0))
        del aliases[4]
    pages_KPCE, landmarks = pl.pallas_call(
        functools.partial(_kernel, sizes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores,),
            in_specs=[anywhere, anywhere, on_chip, on_chip],
            out_specs=[anywhere, landmark_spec],
            scratch_shapes=[
                pltpu.VMEM((buffers, K, SUBLANES, E), pages_KPCE.dtype),
                pltpu.VMEM((buffers, K, C, E), pages_KPCE.dtype),
                pltpu.VMEM((buffers, K, SUBLANES, A), landmark_BKNA.dtype),
                pltpu.SemaphoreType.DMA((buffers, 3)),
                pltpu.SemaphoreType.DMA((buffers,)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(pages_KPCE.shape, pages_KPCE.dtype), landmark_shape],
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel',)),
        interpret=interpreter(interpret),
        name='landmark_update',
    )(*scalars, pages_KPCE, landmark_BKNA, k_BKA, v_BKA)
    if sizes.whole_tiles:
        return pages_KPCE, landmarks
    filled_B = jnp.where(write_B & (position_B % C == C - 1), position_B // C, N)
    return pages_KPCE, landmark_BKNA.at[jnp.arange(B), :, filled_B].set(landmarks[:B], mode='drop')


def _kernel(sizes: _Sizes, *arguments):
    refs = _Refs(*arguments)
    first = pl.program_id(0) * sizes.share
    stop = jnp.minimum(first + sizes.share, sizes.sequences)
    # A buffer is taken again when half of the others were written from since: no write is waited for at once.
    lag = sizes.buffers // 2
    sequence = functools.partial(_Sequence, sizes, refs, first)

    @pl.loop(first, jnp.minimum(first + sizes.buffers, stop))
    def _(b):
        sequence(b).read()

    @pl.loop(first, stop)
    def _(b):
        sequence(b).change()
        done = b - lag

        @pl.when((done >= first) & (done + sizes.buffers < stop))
        def _():
            sequence(done).settle()
            sequence(done + sizes.buffers).read()

    @pl.loop(jnp.maximum(stop - sizes.buffers, first), stop)
    def _(b):
        sequence(b).settle()


class _Sequence:
    """One sequence's token, from its tile's reading to its writing."""

    def __init__(self, sizes: _Sizes, refs: _Refs, first, b):
        self.sizes, self.refs, self.first, self.b = sizes, refs, first, b
        self.buffer = lax.rem(b - first, sizes.buffers)
        self.writes = refs.write_B[b] != 0
        self.page, self.offset = refs.position_B[b] // sizes.page_tokens, refs.position_B[b] % sizes.page_tokens
        self.fills = self.writes & (self.offset == sizes.page_tokens - 1)
        page_KCE = refs.pages_KPCE.at[:, refs.physical_B[b]]
        read = [refs.read.at[self.buffer, i] for i in range(3)]
        self.token_tile = page_KCE.at[:, _aligned(self.offset)], refs.tiles.at[self.buffer], read[0]
        self.full_page = page_KCE, refs.full.at[self.buffer], read[1]
        if sizes.whole_tiles:
            self.mark_tile = refs.landmark_BKNA.at[b, :, _aligned(self.page)], refs.marks.at[self.buffer], read[2]

    def _incoming(self, memory, chip, read):
        return pltpu.make_async_copy(memory, chip, read)

    def _outgoing(self, memory, chip, _):
        return pltpu.make_async_copy(chip, memory, self.refs.written.at[self.buffer])

    def read(self) -> None:
        """Starts the copies of what will be changed."""

        @pl.when(self.writes)
        def _():
            self._incoming(*self.token_tile).start()

        @pl.when(self.fills)
        def _():
            self._incoming(*self.full_page).start()
            if self.sizes.whole_tiles:
                self._incoming(*self.mark_tile).start()

    def change(self) -> None:
        """Puts the token, and the landmark of a full page, in their places, and starts writing."""

        @pl.when(self.writes)
        def _():
            refs, dtype = self.refs, self.refs.tiles.dtype
            token_KE = jnp.concatenate([refs.k_BKA[self.b].astype(dtype), refs.v_BKA[self.b].astype(dtype)], axis=-1)
            self._incoming(*self.token_tile).wait()
            pl.when(self.fills)(self._change_landmark)
            tile_ref = self.token_tile[1]
            tile_ref[...] = _with_row(tile_ref[...], self.offset % SUBLANES, token_KE)
            self._outgoing(*self.token_tile).start()

    def _change_landmark(self) -> None:
        self._incoming(*self.full_page).wait()
        sizes, refs = self.sizes, self.refs
        keys_KCA = self.full_page[1][:, :, : sizes.head_dim]
        keys_KCA = _with_row(keys_KCA, sizes.page_tokens - 1, refs.k_BKA[self.b].astype(keys_KCA.dtype))
        mean_KA = page_mean(keys_KCA).astype(refs.marks.dtype)
        if not sizes.whole_tiles:
            refs.landmark_BKNA[self.b - self.first] = mean_KA
            return
        self._incoming(*self.mark_tile).wait()
        mark_ref = self.mark_tile[1]
        mark_ref[...] = _with_row(mark_ref[...], self.page % SUBLANES, mean_KA)
        self._outgoing(*self.mark_tile).start()

    def settle(self) -> None:
        """Waits until everything is written."""

        @pl.when(self.writes)
        def _():
            self._outgoing(*self.token_tile).wait()

        if self.sizes.whole_tiles:

            @pl.when(self.fills)
            def _():
                self._outgoing(*self.mark_tile).wait()


def _aligned(row):
    """The tile that holds a row."""
    return pl.ds(pl.multiple_of(row // SUBLANES * SUBLANES, SUBLANES), SUBLANES)


def _with_row(rows_KRX: jax.Array, row, new_KX: jax.Array) -> jax.Array:
    """The rows of every head with one of them exchanged."""
    place_KRX = lax.broadcasted_iota(jnp.int32, rows_KRX.shape, 1)
    return jnp.where(place_KRX == row, new_KX[:, None], rows_KRX)
