"""Accelerators as the cost model knows them: memory, the speed at which a decode step reads it, time lost per layer.

What was measured says so in `source`; the rest is from data sheets and from the nearest chip that was measured.
"""

import dataclasses
import os

from pallas_kernels.bench import CEILING

# Of a decode step, beyond reading its bytes: Qwen3-1.7B, 16 sequences, 32K tokens cached, 64 pages read by 26 of 28
# layers took 3.24 ms, 2.61 at best; Qwen3-8B, 16 sequences, 30K tokens, all layers dense, 20.51 ms, 20.38 at best.
H200_SPARSE_LAYER_OVERHEAD_S, H200_DENSE_LAYER_OVERHEAD_S = 24e-6, 4e-6
H200_DATASHEET, H100_DATASHEET = 4.8e12, 3.35e12  # bytes a second
V5E_DATASHEET, V5P_DATASHEET, V6E_DATASHEET, TPU7X_DATASHEET = 0.819e12, 2.765e12, 1.638e12, 3.7e12
_GIB = 1 << 30
TPU_SHARE = 0.86  # of the data sheet's bandwidth, that dense ragged paged attention reaches (arXiv 2604.15464)
GPU_MEMORY_SHARE = 0.75  # that JAX takes unless told otherwise
_SHARE_SETTINGS = ('XLA_CLIENT_MEM_FRACTION', 'XLA_PYTHON_CLIENT_MEM_FRACTION')


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
        platform: 'gpu' or 'tpu'.
        memory_bytes: that it has.
        read_bytes_per_s: that attention over the paged cache reaches at best.
        dense_layer_overhead_s, sparse_layer_overhead_s: seconds of a decode step that a layer takes beyond that.
        source: where the numbers come from.
    """

    platform: str
    memory_bytes: int
    read_bytes_per_s: float
    dense_layer_overhead_s: float
    sparse_layer_overhead_s: float
    source: str

    @property
    def available_bytes(self) -> int:
        """What JAX would take of it here."""
        share = next((os.environ[name] for name in _SHARE_SETTINGS if name in os.environ), GPU_MEMORY_SHARE)
        return int(self.memory_bytes * float(share)) if self.platform == 'gpu' else self.memory_bytes

    def step_seconds(self, read_bytes: int, dense_layers: int, sparse_layers: int) -> float:
        """Of a decode step that reads so many bytes."""
        overhead = dense_layers * self.dense_layer_overhead_s + sparse_layers * self.sparse_layer_overhead_s
        return read_bytes / self.read_bytes_per_s + overhead


_TPU_SOURCE = (
    "memory as libtpu's compiler has it; data sheet and published share of its bandwidth; an H200's time per layer, "
    'none was measured on a TPU'
)
# A tpu7x chip is two devices: its line is one of them.
CHIPS = {
    'h200': Chip(
        'gpu',
        139 * _GIB,
        CEILING,
        H200_DENSE_LAYER_OVERHEAD_S,
        H200_SPARSE_LAYER_OVERHEAD_S,
        'bandwidth and time lost per layer measured',
    ),
    'h100': Chip(
        'gpu',
        79 * _GIB,
        CEILING / H200_DATASHEET * H100_DATASHEET,
        H200_DENSE_LAYER_OVERHEAD_S,
        H200_SPARSE_LAYER_OVERHEAD_S,
        "data sheet of the SXM form, at the share of its bandwidth that an H200 reaches; an H200's time per layer",
    ),
    'v5e': Chip(
        'tpu',
        int(15.75 * _GIB),
        TPU_SHARE * V5E_DATASHEET,
        H200_DENSE_LAYER_OVERHEAD_S,
        H200_SPARSE_LAYER_OVERHEAD_S,
        _TPU_SOURCE,
    ),
    'v5p': Chip(
        'tpu',
        int(95.74 * _GIB),
        TPU_SHARE * V5P_DATASHEET,
        H200_DENSE_LAYER_OVERHEAD_S,
        H200_SPARSE_LAYER_OVERHEAD_S,
        _TPU_SOURCE,
    ),
    'v6e': Chip(
        'tpu',
        int(31.25 * _GIB),
        TPU_SHARE * V6E_DATASHEET,
        H200_DENSE_LAYER_OVERHEAD_S,
        H200_SPARSE_LAYER_OVERHEAD_S,
        _TPU_SOURCE,
    ),
    'tpu7x': Chip(
        'tpu',
        int(94.75 * _GIB),
        TPU_SHARE * TPU7X_DATASHEET,
        H200_DENSE_LAYER_OVERHEAD_S,
        H200_SPARSE_LAYER_OVERHEAD_S,
        _TPU_SOURCE,
    ),
}
