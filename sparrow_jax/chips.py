"""Accelerators as the cost model knows them: memory, the speed at which a decode step reads it, time lost per layer,
speed of matrix products.

What was measured says so in `source`; the rest is from data sheets and from the nearest chip that was measured.
"""

import dataclasses
import os

from pallas_kernels.bench import CEILING

# Of a decode step, beyond reading its bytes: Qwen3-1.7B, 16 sequences, 32K tokens cached, 64 pages read by 26 of 28
# layers took 3.24 ms, 2.61 at best; Qwen3-8B, 16 sequences, 30K tokens, all layers dense, 20.51 ms, 20.38 at best.
H200_SPARSE_LAYER_OVERHEAD_S, H200_DENSE_LAYER_OVERHEAD_S = 24e-6, 4e-6
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
        flops_per_s: of bfloat16 products, dense, as the data sheet has it.
        dense_layer_overhead_s, sparse_layer_overhead_s: seconds of a decode step that a layer takes beyond reading.
        source: where the numbers come from.
    """

    platform: str
    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: float
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


_TPU_SPEED = "data sheet and published share of its bandwidth; an H200's time per layer, none was measured on a TPU"
_TPU_SOURCE = f"memory as libtpu's compiler has it; {_TPU_SPEED}"
_GPU_SOURCE = (
    'data sheet of the SXM form, at the share of its bandwidth that an H200 reaches; '
    "an H200's time per layer, none was measured"
)
_H200_BYTES_PER_S = 4.8e12  # data sheet
GPU_SHARE = CEILING / _H200_BYTES_PER_S
# A device of JAX: memory in GiB, data sheet's bytes a second and bfloat16 operations a second. Sources: NVIDIA's data
# sheets of A100 80GB, H100, H200 and HGX B200; Google Cloud's pages on TPU v4, v5e, v5p, v6e and tpu7x (a chip of which
# is two devices).
_DATASHEETS = {
    'h200': ('gpu', 139, _H200_BYTES_PER_S, 989e12, 'bandwidth and time lost per layer measured'),
    'h100': ('gpu', 79, 3.35e12, 989e12, _GPU_SOURCE),
    'a100': ('gpu', 79, 2.039e12, 312e12, f'{_GPU_SOURCE}; the kernels need a Hopper or newer, so it will be slower'),
    'b200': ('gpu', 167, 8.0e12, 2250e12, _GPU_SOURCE),
    'v4': ('tpu', 32, 1.228e12, 275e12, f'memory of the data sheet; {_TPU_SPEED}'),
    'v5e': ('tpu', 15.75, 0.819e12, 197e12, _TPU_SOURCE),
    'v5p': ('tpu', 95.74, 2.765e12, 459e12, _TPU_SOURCE),
    'v6e': ('tpu', 31.25, 1.638e12, 918e12, _TPU_SOURCE),
    'tpu7x': ('tpu', 94.75, 3.7e12, 2307e12 / 2, _TPU_SOURCE),
}
CHIPS = {
    name: Chip(
        platform=platform,
        memory_bytes=int(gib * _GIB),
        read_bytes_per_s=bandwidth * (GPU_SHARE if platform == 'gpu' else TPU_SHARE),
        flops_per_s=flops,
        dense_layer_overhead_s=H200_DENSE_LAYER_OVERHEAD_S,
        sparse_layer_overhead_s=H200_SPARSE_LAYER_OVERHEAD_S,
        source=source,
    )
    for name, (platform, gib, bandwidth, flops, source) in _DATASHEETS.items()
}
