"""Reading and writing of checkpoints: Hugging Face folders and GGUF files to and from the decoder's parameters.

`read_shape` and `load_params` take a folder (config.json and any number of *.safetensors) or a .gguf file; `save_hf`
writes a folder that transformers opens. Tensors pass through the host one at a time, so no second full copy of the
model is ever held.
"""

import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # registers bfloat16 with NumPy, which safetensors asks for by name
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx

from sparrow_jax.config import ConfigError
from sparrow_jax.json_files import read_object
from sparrow_jax.models import gguf
from sparrow_jax.models.layout import Key, Tensor, hf_slots
from sparrow_jax.models.shape import DecoderShape

_DTYPES = {'float32': np.dtype(np.float32), 'float16': np.dtype(np.float16), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
_SAFETENSORS_DTYPES = ('F32', 'F16', 'BF16')


def read_shape(path: str | pathlib.Path) -> DecoderShape:
    """The shape of a checkpoint, from its config.json or GGUF metadata; no weight is read.

    Raises:
      ConfigError: nothing at `path`, or a model that the decoder does not know.
    """
    path = _existing(path)
    if path.is_file():
        return gguf.read_shape(path)
    return DecoderShape.from_hf_config(_read_json(path / 'config.json'), where=str(path / 'config.json'))


def load_params(path: str | pathlib.Path, abstract_params: nnx.State, param_dtype: Any = None) -> nnx.State:
    """Reads a checkpoint into the decoder's parameter tree.

    Args:
      path: a folder with config.json and *.safetensors (bfloat16, float16 or float32; if there is an index, the files
        that it lists), or a .gguf file (any of its quantizations; they become plain numbers).
      abstract_params: from `abstract_decoder`; gives structure and dtypes. Leaves that carry a sharding are placed by
        it, each process keeping its own part; the others go to the default device.
      param_dtype: overrides the dtype of the matrices; norm scales stay float32.

    Returns:
      abstract_params with arrays.

    Raises:
      ConfigError: a tensor is missing, left over, of another shape than the model's or stored twice; names tensor and
        file.
    """
    path = _existing(path)
    shape = read_shape(path)
    tensors = gguf.open_tensors(path) if path.is_file() else _open_safetensors(path)
    slots = hf_slots(shape)
    _drop_known_extras(tensors, shape)
    for name, slot in slots.items():
        if name not in tensors:
            raise ConfigError(f'{path}: the tensor {name} is missing')
        if tensors[name].sizes != slot.hf_sizes:
            found, file = list(tensors[name].sizes), tensors[name].file
            raise ConfigError(
                f'{file}: the tensor {name} has shape {found}, but the configuration says {list(slot.hf_sizes)}'
            )
    for name in tensors:
        if name not in slots:
            raise ConfigError(f'{tensors[name].file}: the tensor {name} belongs to no weight of a {shape.family} model')

    names = {slot.key: name for name, slot in slots.items()}

    def load(place: tuple[Any, ...], abstract: Any) -> jax.Array:
        name = names[_key(place)]
        slot = slots[name]
        if abstract.shape != slot.sizes:
            raise ConfigError(
                f'{path}: {name} has shape {slot.sizes} here, but the decoder was made for {abstract.shape}'
            )
        dtype = abstract.dtype if param_dtype is None or len(slot.sizes) == 1 else param_dtype
        array = slot.from_hf(tensors[name].read()).astype(dtype)
        sharding = getattr(abstract, 'sharding', None)
        if sharding is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return jax.tree_util.tree_map_with_path(load, abstract_params)


def save_hf(
    folder: str | pathlib.Path,
    shape: DecoderShape,
    params: nnx.State,
    dtype: str = 'bfloat16',
    *,
    end_ids: Sequence[int] = (),
    pad_id: int | None = None,
    max_shard_bytes: int = 4_000_000_000,
) -> None:
    """Writes a folder that transformers (and whatever reads its layout) opens.

    Args:
      folder: made if absent. config.json is written last: a folder without one is an interrupted write.
      shape: of the model.
      params: the decoder's parameters, arrays that this process can address whole.
      dtype: 'bfloat16', 'float16' or 'float32', of every tensor in the files.
      end_ids: ids that end a response, for generation_config.json; empty leaves them out.
      pad_id: likewise.
      max_shard_bytes: a file grows no larger, unless a single tensor is; more than one file brings an index.

    Raises:
      ConfigError: an unknown dtype.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f'dtype={dtype!r} of the written checkpoint: must be one of {", ".join(_DTYPES)}')
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {_key(place): array for place, array in jax.tree_util.tree_leaves_with_path(params)}
    slots = hf_slots(shape)
    sizes = {name: int(np.prod(slot.sizes)) * _DTYPES[dtype].itemsize for name, slot in slots.items()}
    shards = list(_shards(sizes, max_shard_bytes))
    files = {}
    for i, names in enumerate(shards):
        one = len(shards) == 1
        file = 'model.safetensors' if one else f'model-{i + 1:05d}-of-{len(shards):05d}.safetensors'
        tensors = {}
        for name in names:
            array = np.asarray(jax.device_get(arrays[slots[name].key])).astype(_DTYPES[dtype])
            tensors[name] = np.ascontiguousarray(slots[name].to_hf(array))
            files[name] = file
        safetensors.numpy.save_file(tensors, folder / file, metadata={'format': 'pt'})
    if len(shards) > 1:
        index = {'metadata': {'total_size': sum(sizes.values())}, 'weight_map': files}
        _write_json(folder / 'model.safetensors.index.json', index)
    ids: dict[str, Any] = {'eos_token_id': list(end_ids)} if end_ids else {}
    if pad_id is not None:
        ids['pad_token_id'] = pad_id
    _write_json(folder / 'generation_config.json', ids)
    _write_json(folder / 'config.json', shape.to_hf_config() | {'torch_dtype': dtype} | ids)


def _existing(path: str | pathlib.Path) -> pathlib.Path:
    path = pathlib.Path(path)
    if not path.exists():
        raise ConfigError(
            f'{path}: no such checkpoint; give a folder with config.json and *.safetensors, or a .gguf file'
        )
    if path.is_file() and path.suffix != '.gguf':
        raise ConfigError(f'{path}: a checkpoint is a folder or a .gguf file; give the folder that holds this file')
    return path


def _open_safetensors(folder: pathlib.Path) -> dict[str, Tensor]:
    index = folder / 'model.safetensors.index.json'
    if index.exists():
        listed = _read_json(index).get('weight_map')
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ConfigError(f'{index}: weight_map must say which file holds each tensor')
        files = sorted({folder / name for name in listed.values()})
    else:
        files = sorted(folder.glob('*.safetensors'))
    if not files:
        raise ConfigError(f'{folder}: holds no *.safetensors file')
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            raise ConfigError(f'{file}: missing, though {index.name} lists it; the download is incomplete')
        try:
            handle = safetensors.safe_open(file, framework='np')
        except safetensors.SafetensorError as error:
            raise ConfigError(f'{file}: cannot be read ({error}); the download may be incomplete') from error
        for name in handle.keys():  # noqa: SIM118  (no mapping: it has keys() alone)
            header = handle.get_slice(name)
            if header.get_dtype() not in _SAFETENSORS_DTYPES:
                stored, known = header.get_dtype(), ', '.join(_SAFETENSORS_DTYPES)
                raise ConfigError(f'{file}: the tensor {name} is stored as {stored}; only {known} can be read')
            if name in tensors:
                raise ConfigError(f'{file}: the tensor {name} is also in {tensors[name].file}')
            read = lambda handle=handle, name=name: handle.get_tensor(name)
            tensors[name] = Tensor(tuple(header.get_shape()), str(file), read)
    return tensors


def _drop_known_extras(tensors: dict[str, Tensor], shape: DecoderShape) -> None:
    for name in [name for name in tensors if name.endswith('.rotary_emb.inv_freq')]:
        del tensors[name]  # a buffer that old Llama checkpoints saved; it follows from the configuration
    if shape.tie_embeddings and 'lm_head.weight' in tensors and 'model.embed_tokens.weight' in tensors:
        # Some tied checkpoints store the head all the same. Dropping a different one would change the model in silence.
        head = tensors.pop('lm_head.weight')
        if not np.array_equal(head.read(), tensors['model.embed_tokens.weight'].read()):
            raise ConfigError(
                f'{head.file}: lm_head.weight differs from model.embed_tokens.weight, but config.json says '
                'tie_word_embeddings=true; set it to false there to use the separate head'
            )


def _shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    shard: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if shard and filled + size > limit:
            yield shard
            shard, filled = [], 0
        shard.append(name)
        filled += size
    yield shard


def _key(place: tuple[Any, ...]) -> Key:
    # A parameter's path ends in the attribute of its nnx.Param box; the tree's own keys come before.
    return tuple(entry.key for entry in place if isinstance(entry, jax.tree_util.DictKey))


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    if not file.exists():
        raise ConfigError(f'{file}: missing; a checkpoint folder needs it')
    return read_object(file)


def _write_json(file: pathlib.Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + '\n')
