"""The layout of Hugging Face checkpoints: which tensor of which name and sizes is which weight of the decoder.

`weights.py` reads and writes by it; `gguf.py` gives the tensors of its files the same names.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sparrow_jax.models.decoder import layer_weights, model_weights
from sparrow_jax.models.shape import DecoderShape

Key = tuple[str | int, ...]  # place in the parameter tree, e.g. ('layers', 3, 'q')
Index = tuple[slice, ...]  # a part of an array: one slice a dimension, each with start and stop and no step

_MODEL_NAMES = {'embed': 'model.embed_tokens', 'final_norm': 'model.norm', 'head': 'lm_head'}
_LAYER_NAMES = {
    'attention_norm': 'input_layernorm',
    'q': 'self_attn.q_proj',
    'k': 'self_attn.k_proj',
    'v': 'self_attn.v_proj',
    'o': 'self_attn.o_proj',
    'q_norm': 'self_attn.q_norm',
    'k_norm': 'self_attn.k_norm',
    'ffn_norm': 'post_attention_layernorm',
    'gate': 'mlp.gate_proj',
    'up': 'mlp.up_proj',
    'down': 'mlp.down_proj',
}


class Tensor(NamedTuple):
    """A tensor of a checkpoint that has not been read yet: its sizes, its file, and what reads a part of it."""

    sizes: tuple[int, ...]
    file: str
    read: Callable[[Index], np.ndarray]


class Slot(NamedTuple):
    """Where a checkpoint's tensor belongs: its place in the parameter tree, its sizes there and in the checkpoint.

    Matrices stand as [out, in] in the checkpoint and with the input dimensions first in the decoder (`transposed`);
    the embedding, the head and the norm scales are the same in both.
    """

    key: Key
    sizes: tuple[int, ...]
    hf_sizes: tuple[int, ...]
    transposed: bool

    def read(self, tensor: Tensor, index: Index) -> np.ndarray:
        """A part of the weight, `index` being in the decoder's sizes.

        Of the tensor no more is read than that part, as long as each group of merged dimensions (heads and head_dim)
        is cut along its first one only, which is how meshes cut weights.
        """
        if not self.transposed:
            return tensor.read(index)
        inputs = next(n for n in range(len(self.sizes)) if math.prod(self.sizes[:n]) == self.hf_sizes[1])
        columns, in_sizes, in_rest = _merged(self.sizes[:inputs], index[:inputs])
        rows, out_sizes, out_rest = _merged(self.sizes[inputs:], index[inputs:])
        return tensor.read((rows, columns)).T.reshape(in_sizes + out_sizes)[in_rest + out_rest]

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """The whole weight as it stands in the checkpoint: the inverse of `read`."""
        return array.reshape(self.hf_sizes[::-1]).T if self.transposed else array


def hf_name(weight: str, layer: int | None = None) -> str:
    """The Hugging Face name of a weight, by its attribute name in the decoder or in one of its layers."""
    if layer is None:
        return f'{_MODEL_NAMES[weight]}.weight'
    return f'model.layers.{layer}.{_LAYER_NAMES[weight]}.weight'


def hf_slots(shape: DecoderShape) -> dict[str, Slot]:
    """Hugging Face tensor name -> Slot, for every weight of the decoder."""
    slots = {}
    for name, weight in model_weights(shape).items():
        slots[hf_name(name)] = Slot((name,), weight.sizes, weight.sizes, False)
    for layer in range(shape.layers):
        for name, weight in layer_weights(shape).items():
            matrix = weight.fan_in > 0
            hf_sizes = (int(np.prod(weight.sizes)) // weight.fan_in, weight.fan_in) if matrix else weight.sizes
            slots[hf_name(name, layer)] = Slot(('layers', layer, name), weight.sizes, hf_sizes, matrix)
    return slots


def _merged(sizes: tuple[int, ...], index: Index) -> tuple[slice, tuple[int, ...], Index]:
    # Of dimensions that the checkpoint has as one: the range to read, its sizes here, and what of it is wanted. A cut
    # through a later dimension is no range of the merged one (of every head a few rows), so it is made after reading.
    stride = math.prod(sizes[1:])
    start, stop = index[0].start, index[0].stop
    return slice(start * stride, stop * stride), (stop - start, *sizes[1:]), (slice(None), *index[1:])
