"""Which model it is: a short hash of a checkpoint, cheap enough to be made at the start of every run.

A calibration carries it, and `sparsity.schedules` refuses one of another model.
"""

import dataclasses
import hashlib
import json

import numpy as np

from sparrow_jax.config import ModelConfig
from sparrow_jax.models.layout import Index
from sparrow_jax.models.source import WEIGHTS, locate
from sparrow_jax.models.weights import open_tensors

_SAMPLED_ROWS, _SAMPLED_COLUMNS = 3, 32  # of every tensor; rows spread over it


def model_hash(model: ModelConfig, seed: int) -> str:
    """SHA-256, hexadecimal, of the start weights that a configuration names.

    Of a checkpoint: names, sizes and a fixed sample of the numbers of all tensors, as float32. How the tensors are
    spread over files, and whether they are stored in more bits than they need, makes no difference. Random weights are
    told apart by their shape, dtype and seed.

    Args:
      model: the section of the configuration.
      seed: of the run, which random weights are made from.

    Raises:
      ConfigError: as `weights.load_params` raises of files.
    """
    if model.random_weights:
        facts = {'random': dataclasses.asdict(model.shape), 'dtype': model.param_dtype, 'seed': seed}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    digest = hashlib.sha256()
    for name, tensor in sorted(open_tensors(locate(model.path, WEIGHTS)).items()):
        digest.update(f'{name} {tensor.sizes}'.encode())
        for part in _parts(tensor.sizes):
            digest.update(np.ascontiguousarray(tensor.read(part), np.float32).tobytes())
    return digest.hexdigest()


def _parts(sizes: tuple[int, ...]) -> list[Index]:
    if len(sizes) == 1:
        return [(slice(0, min(sizes[0], _SAMPLED_COLUMNS)),)]
    rows = sorted({round(i * (sizes[0] - 1) / (_SAMPLED_ROWS - 1)) for i in range(_SAMPLED_ROWS)})
    return [(slice(row, row + 1), slice(0, min(sizes[1], _SAMPLED_COLUMNS))) for row in rows]
