"""Reading of GGUF files: metadata, tensors by their Hugging Face names, quantizations undone.

Used by `weights.py` for the model and by `tasks/tokenizer.py` for the vocabulary that the same file holds. Llama and
Qwen3 layouts.
"""

import functools
import pathlib
import re
from typing import Any

import gguf
import numpy as np

from sparrow_jax.config import ConfigError
from sparrow_jax.models.layout import Index, Tensor, hf_name
from sparrow_jax.models.shape import FAMILIES, DecoderShape, RopeScaling

_MODEL_NAMES = {'token_embd': 'embed', 'output_norm': 'final_norm', 'output': 'head'}
_LAYER_NAMES = {
    'attn_norm': 'attention_norm',
    'attn_q': 'q',
    'attn_k': 'k',
    'attn_v': 'v',
    'attn_output': 'o',
    'attn_q_norm': 'q_norm',
    'attn_k_norm': 'k_norm',
    'ffn_norm': 'ffn_norm',
    'ffn_gate': 'gate',
    'ffn_up': 'up',
    'ffn_down': 'down',
}


class Metadata:
    """The key-value part of a GGUF file. Arrays are decoded only when asked for."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = path
        file = pathlib.Path(path)
        if not file.is_file():
            raise ConfigError(f'{path}: no such GGUF file')
        self.reader = _open(file.resolve(), file.stat().st_mtime_ns)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default` where the file lacks it."""
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """The value of `key`; ConfigError where the file lacks it."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f'{self.path}: the GGUF field {key} is missing')
        return value


def read_shape(path: str | pathlib.Path) -> DecoderShape:
    """The shape that the metadata states. Raises ConfigError for another architecture or an unknown RoPE scaling."""
    meta = Metadata(path)
    family = meta.need('general.architecture')
    if family not in FAMILIES:
        raise ConfigError(f'{path}: architecture {family!r} is not supported; it must be one of {", ".join(FAMILIES)}')
    heads, d_model = meta.need(f'{family}.attention.head_count'), meta.need(f'{family}.embedding_length')
    head_dim = meta.get(f'{family}.attention.key_length', d_model // heads)
    rotated = meta.get(f'{family}.rope.dimension_count', head_dim)
    if rotated != head_dim:
        raise ConfigError(f'{path}: rotary embedding of {rotated} of {head_dim} head dimensions is not supported')
    tensors = {tensor.name: tensor for tensor in meta.reader.tensors}
    if 'token_embd.weight' not in tensors:
        raise ConfigError(f'{path}: the tensor token_embd.weight is missing')
    max_positions = meta.need(f'{family}.context_length')
    return DecoderShape(
        family=family,
        vocab_size=int(tensors['token_embd.weight'].shape[1]),
        d_model=d_model,
        layers=meta.need(f'{family}.block_count'),
        query_heads=heads,
        kv_heads=meta.get(f'{family}.attention.head_count_kv', heads),
        head_dim=head_dim,
        d_ff=meta.need(f'{family}.feed_forward_length'),
        rope_theta=float(meta.get(f'{family}.rope.freq_base', 10_000.0)),
        # Stored as float32: 1e-5 comes back as 9.99999974e-06.
        norm_eps=float(f'{meta.need(f"{family}.attention.layer_norm_rms_epsilon"):.6g}'),
        tie_embeddings='output.weight' not in tensors,
        max_positions=max_positions,
        rope_scaling=_rope_scaling(meta, family, max_positions),
    )


def open_tensors(path: str | pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of the file by its Hugging Face name, in Hugging Face layout; float32 when read.

    Raises:
      ConfigError: a tensor that belongs to no weight of the supported models.
    """
    meta = Metadata(path)
    family = meta.need('general.architecture')
    heads = {'q': meta.need(f'{family}.attention.head_count')}
    heads['k'] = meta.get(f'{family}.attention.head_count_kv', heads['q'])
    tensors = {}
    for tensor in meta.reader.tensors:
        if tensor.name == 'rope_freqs.weight':
            raise ConfigError(
                f'{path}: holds rope_freqs.weight, RoPE scaling factors of the llama3 kind, which can be read from a '
                'folder with config.json only; use the Hugging Face folder of this model'
            )
        found = _split(tensor.name)
        if found is None:
            raise ConfigError(f'{path}: the tensor {tensor.name} belongs to no weight of a {family} model')
        # GGUF lists the fastest dimension first.
        sizes = tuple(int(size) for size in reversed(tensor.shape))
        permuted = heads.get(found[0], 0) if family == 'llama' else 0
        tensors[hf_name(*found)] = Tensor(sizes, str(path), functools.partial(_read, tensor, sizes, permuted))
    return tensors


def _read(tensor: Any, sizes: tuple[int, ...], heads: int, index: Index) -> np.ndarray:
    if len(sizes) == 1:
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(sizes)[index]
    # Numbers come in blocks along a row, and the permutation below stays within a head: read is whatever of both the
    # index touches, and cut to it afterwards.
    per_head = sizes[0] // heads if heads else 1
    block, _ = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    rows, columns = (
        slice(cut.start // step * step, -(-cut.stop // step) * step)
        for cut, step in zip(index, (per_head, block), strict=True)
    )
    block_items = tensor.data.shape[1] * block // sizes[1]  # bytes, or numbers where the file holds plain ones
    items = slice(columns.start // block * block_items, columns.stop // block * block_items)
    array = gguf.quants.dequantize(np.ascontiguousarray(tensor.data[rows, items]), tensor.tensor_type)
    if heads:
        # The Llama layout of GGUF rotates neighbouring rows of a head (0, 1), (2, 3), ...; here row i pairs with i +
        # A/2.
        array = array.reshape(-1, per_head // 2, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    row, column = (
        slice(cut.start - read.start, cut.stop - read.start) for cut, read in zip(index, (rows, columns), strict=True)
    )
    return array[row, column]


def _split(name: str) -> tuple[str, int | None] | None:
    match = re.fullmatch(r'(?:blk\.(\d+)\.)?([a-z_]+)\.weight', name)
    if not match:
        return None
    layer, part = match.groups()
    names = _MODEL_NAMES if layer is None else _LAYER_NAMES
    return (names[part], None if layer is None else int(layer)) if part in names else None


def _rope_scaling(meta: Metadata, family: str, max_positions: int) -> RopeScaling | None:
    kind = meta.get(f'{family}.rope.scaling.type', 'none')
    if kind == 'none':
        return None
    if kind not in ('linear', 'yarn'):
        raise ConfigError(
            f'{meta.path}: rope scaling {kind!r} is not supported in GGUF files; it must be linear or yarn'
        )
    original = meta.get(f'{family}.rope.scaling.original_context_length', max_positions) if kind == 'yarn' else 0
    return RopeScaling(kind, float(meta.need(f'{family}.rope.scaling.factor')), original_max_positions=original)


@functools.lru_cache(maxsize=1)
def _open(path: pathlib.Path, modified_ns: int) -> gguf.GGUFReader:
    # Parsing the header with its vocabulary takes seconds, and shape, weights and tokenizer all read the same file.
    del modified_ns  # part of the cache's key: a rewritten file is read again
    try:
        return gguf.GGUFReader(path)
    except (ValueError, OSError, LookupError, MemoryError) as error:  # LookupError: its header is cut off
        raise ConfigError(f'{path}: cannot be read as a GGUF file ({error}); the download may be incomplete') from error
