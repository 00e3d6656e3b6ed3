"""TPU slices that are only named: their devices, for ahead-of-time compiles on a machine without an accelerator.

The compiler is libtpu's own. Nothing can run on these devices, and no array can lie on them.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from pathlib import Path

import jax
from jax.experimental import topologies

from sparrow_jax.chips import CHIPS
from sparrow_jax.config import ConfigError

_DIMENSIONS = {'v5e': 2, 'v6e': 2, 'v5p': 3, 'tpu7x': 3}  # of the grid of chips
_EXAMPLES = 'v5e:4x4, v6e:8x8, v5p:2x2x4 or tpu7x:2x2x2'
_LIBRARY = 'TPU_LIBRARY_PATH'


@dataclasses.dataclass(frozen=True)
class Slice:
    """A named slice.

    Attributes:
        chip: a name of `chips.CHIPS`.
        grid: chips along each dimension. A tpu7x chip is two devices.
    """

    chip: str
    grid: tuple[int, ...]

    def __str__(self) -> str:
        return f'{self.chip}:{"x".join(map(str, self.grid))}'

    @property
    def chips(self) -> int:
        return math.prod(self.grid)


def parse_slice(text: str) -> Slice:
    """A slice from its name, such as 'v5p:2x2x4'.

    Raises:
        ConfigError: no such chip, or a grid that such chips do not come in; the known ones are listed.
    """
    chip, _, grid = text.partition(':')
    if chip in CHIPS and CHIPS[chip].platform == 'gpu':
        raise ConfigError(
            f'--topology={text}: programs for several GPUs cannot be compiled without a GPU here: that takes the CUDA '
            f'plugin and autotuning on the device; name a TPU slice, such as {_EXAMPLES}'
        )
    if chip not in _DIMENSIONS:
        raise ConfigError(f'--topology={text}: the chips are {", ".join(_DIMENSIONS)}; write e.g. {_EXAMPLES}')
    count = _DIMENSIONS[chip]
    if not re.fullmatch(r'[1-9]\d{0,3}' + r'x[1-9]\d{0,3}' * (count - 1), grid, re.ASCII):
        raise ConfigError(
            f'--topology={text}: a grid of {chip} has {count} dimensions, written {"x".join("ABC"[:count])}; '
            f'the chips are {", ".join(_DIMENSIONS)}, e.g. {_EXAMPLES}'
        )
    return Slice(chip, tuple(map(int, grid.split('x'))))


def slice_devices(named: Slice) -> list[jax.Device]:
    """The devices of a slice, in the compiler's order.

    Raises:
        ConfigError: libtpu is not installed, or knows no such slice.
    """
    # Said before libtpu is loaded: it would ask the cloud's metadata server where it is, and lock the (absent) chips.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    # `make test` puts it there and not among the packages: installed, JAX would look for TPUs in every process.
    library = Path(sys.prefix, 'libtpu', 'libtpu', 'libtpu.so')
    if library.exists():
        os.environ.setdefault(_LIBRARY, str(library))
    elif _LIBRARY not in os.environ and importlib.util.find_spec('libtpu') is None:
        raise ConfigError(
            f'--topology={named}: the compiler is missing; run `make test` once, install libtpu, or set {_LIBRARY} to '
            'its libtpu.so'
        )
    try:
        with _silent_stderr():
            return topologies.get_topology_desc(platform='tpu', topology_name=str(named)).devices
    except jax.errors.JaxRuntimeError as error:
        raise ConfigError(
            f'--topology={named}: libtpu knows no such slice ({error}); write e.g. {_EXAMPLES}'
        ) from error


@contextlib.contextmanager
def _silent_stderr():
    """libtpu prints a stack of its own when it is loaded without a TPU, past all loggers."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
