"""Which code runs an operation: a Pallas kernel for the platform, or the JAX definition.

The choice is made once, where the shapes are known (`choose`), and handed to every operation: nothing falls back later,
and what could not be used has a reason that can be shown. An operation asked for a kernel that its shapes do not fit
raises.
"""

import enum
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the configuration imports this module, and a mistake in it should cost no import of JAX
    import jax


class Implementation(enum.StrEnum):
    """Name as in configurations and logs.

    The interpreted forms run the same kernel code on any machine, slowly, for tests.
    """

    REFERENCE = 'reference'
    MOSAIC_GPU = 'mosaic_gpu'
    MOSAIC_TPU = 'mosaic_tpu'
    MOSAIC_GPU_INTERPRETED = 'mosaic_gpu_interpreted'
    MOSAIC_TPU_INTERPRETED = 'mosaic_tpu_interpreted'

    @property
    def interpreted(self) -> bool:
        return self in (Implementation.MOSAIC_GPU_INTERPRETED, Implementation.MOSAIC_TPU_INTERPRETED)

    @property
    def platform(self) -> str | None:
        """'gpu', 'tpu', or None for the JAX definition."""
        return None if self is Implementation.REFERENCE else self.value.split('_')[1]


HEAD_DIMS = (64, 128)
DTYPES = ('bfloat16', 'float32')
PROVEN_PLATFORMS = frozenset({'gpu'})  # where every case has passed on hardware: `auto` takes kernels there
FIRST_JAX_WITHOUT_GPU_KERNELS = (0, 12)
_HOPPER = 9.0  # compute capability: Mosaic GPU needs its bulk copies and warpgroup products


def why_unfit(head_dim: int, group: int, dtype: Any) -> str | None:
    """Why no kernel takes such a cache, or None where all do."""
    if head_dim not in HEAD_DIMS:
        return f'the kernels take heads of {" or ".join(map(str, HEAD_DIMS))}, not of {head_dim}'
    if not 1 <= group <= 8:
        return f'the kernels take 1 to 8 query heads a KV head, not {group}'
    if np.dtype(dtype).name not in DTYPES:
        return f'the kernels take a cache in {" or ".join(DTYPES)}, not in {np.dtype(dtype).name}'
    return None


def choose(device: 'jax.Device') -> tuple[Implementation, str]:
    """The implementation for a device (of a cache that fits it, see `why_unfit`), and why it is that one."""
    if device.platform == 'tpu':
        return Implementation.MOSAIC_TPU, f'Pallas kernels for {device.device_kind}'
    if device.platform != 'gpu':
        return Implementation.REFERENCE, f'there are no kernels for {device.platform}'
    if float(device.compute_capability) < _HOPPER:
        return (
            Implementation.REFERENCE,
            f'{device.device_kind} has compute capability {device.compute_capability}; the kernels need {_HOPPER}',
        )
    if reason := _why_not_compiled(Implementation.MOSAIC_GPU):
        return Implementation.REFERENCE, reason
    return Implementation.MOSAIC_GPU, f'Pallas kernels for {device.device_kind}'


def _why_not_compiled(implementation: Implementation) -> str | None:
    """Why the installed JAX cannot compile an implementation. It would not fail, but search for layouts without end."""
    import jax

    if implementation is Implementation.MOSAIC_GPU and jax.__version_info__ >= FIRST_JAX_WITHOUT_GPU_KERNELS:
        return f'the GPU kernels compile with jax 0.10.2 to 0.11, not with {jax.__version__}'
    return None


def kernels_start_early() -> bool:
    """Whether a GPU kernel may begin, as far as it allows that itself, while the one before it still runs."""
    import jax

    return jax.__version_info__ >= (0, 11)


def named(op: str, implementation: Implementation | str) -> Implementation:
    """The implementation that an operation was asked for. Raises ValueError where there is none of that name."""
    try:
        return Implementation(implementation)
    except ValueError:
        raise ValueError(
            f'{op}: implementation={implementation!r}: must be one of {", ".join(Implementation)}'
        ) from None


def check_machine(op: str, implementation: Implementation, array: 'jax.Array') -> None:
    """Raises ValueError where a kernel cannot run on the device that holds the array.

    A traced array is on none yet: what it is compiled for may be another machine.
    """
    from jax.core import Tracer

    if implementation.interpreted or isinstance(array, Tracer):
        return
    for device in array.devices():
        if device.platform != implementation.platform:
            raise ValueError(
                f'{op}: implementation={implementation.value!r} runs on a {implementation.platform}; the arrays are on '
                f'a {device.platform}; use {Implementation.REFERENCE.value!r}'
            )


def check_gpu(op: str, implementation: Implementation) -> None:
    """Raises ValueError where an operation that has a kernel for GPUs alone was asked for another one."""
    if implementation.platform == 'tpu':
        raise ValueError(f'{op}: implementation={implementation.value!r}: there is no such kernel for TPUs')


def check_fit(op: str, head_dim: int, group: int, dtype: Any) -> None:
    """Raises ValueError where `why_unfit` gives a reason."""
    if unfit := why_unfit(head_dim, group, dtype):
        raise ValueError(f'{op}: {unfit}; use implementation="{Implementation.REFERENCE}"')


def kernel_module(op: str, implementation: Implementation) -> Any:
    """`pallas_kernels/<op>/kernel_gpu.py` or `kernel_tpu.py`, imported when first used."""
    implementation = named(op, implementation)
    if reason := _why_not_compiled(implementation):
        raise ValueError(f'{op}: {reason}')
    return importlib.import_module(f'pallas_kernels.{op}.kernel_{implementation.platform}')
