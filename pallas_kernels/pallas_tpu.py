"""What the TPU kernels share: the vector unit's shape, the number of cores and the interpreter's settings."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu

LANES = 128
SUBLANES = 8  # rows of 32-bit numbers in a register, and of any dtype in a tile of memory


def interpreter(interpret: bool) -> Any:
    """The argument `interpret` of `pallas_call`.

    The strictest form: copies happen as late as they may, memory starts as NaN, and races are looked for.
    """
    if not interpret:
        return False
    return pltpu.InterpretParams(dma_execution_mode='on_wait', uninitialized_memory='nan', detect_races=True)


def device_cores(interpret: bool) -> int:
    """Cores that a grid's first dimension can be dealt out to: 2 where the two of a chip are one device."""
    return 1 if interpret else pltpu.get_tpu_info().num_cores
