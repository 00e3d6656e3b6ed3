"""The layout of Hugging Face checkpoints: which tensor of which name and sizes is which weight of the decoder.

`weights.py` reads and writes by it; `gguf.py` gives the tensors of its files the same names.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sparrow_jax.models.decoder import layer_weights, model_weights
from sparrow_jax.models.shape import DecoderShape

Key = tuple[str | int, ...]  # place in the parameter tree, e.g. ('layers', 3, 'q')

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
    """A tensor of a checkpoint that has not been read yet: its sizes, the file it is in, and what reads it."""

    sizes: tuple[int, ...]
    file: str
    read: Callable[[], np.ndarray]


class Slot(NamedTuple):
    """Where a checkpoint's tensor belongs: its place in the parameter tree, its sizes there and in the checkpoint.

    Matrices stand as [out, in] in the checkpoint and with the input dimensions first in the decoder (`transposed`);
    the embedding, the head and the norm scales are the same in both.
    """

    key: Key
    sizes: tuple[int, ...]
    hf_sizes: tuple[int, ...]
    transposed: bool

    def from_hf(self, array: np.ndarray) -> np.ndarray:
        """The checkpoint's array in the decoder's sizes."""
        return (array.T if self.transposed else array).reshape(self.sizes)

    def to_hf(self, array: np.ndarray) -> np.ndarray:
        """The inverse of `from_hf`."""
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
