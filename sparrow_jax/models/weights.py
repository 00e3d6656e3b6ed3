"""Reading and writing of checkpoints: Hugging Face folders and GGUF files to and from the decoder's parameters.

`read_shape` and `load_params` take what `source.locate` knows: a folder (config.json and any number of *.safetensors),
a .gguf file, or a name of either. `save_hf` writes a folder that transformers opens. A process reads only the slices
that its own devices hold, one at a time, so that host memory never has to hold the model.
"""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from sparrow_jax.models.layout import Index, Key, Tensor, hf_slots
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.models.source import WEIGHTS, locate, weight_files

_DTYPES = {'float32': np.dtype(np.float32), 'float16': np.dtype(np.float16), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
_SAFETENSORS_DTYPES = ('F32', 'F16', 'BF16')
_COMPARED_BYTES = 64_000_000  # of each of two tensors that are read to see whether they are equal


def read_shape(path: str | pathlib.Path) -> DecoderShape:
    """The shape of a checkpoint, from its config.json or GGUF metadata; no weight is read.

    Raises:
      ConfigError: nothing at `path`, or a model that the decoder does not know.
    """
    path = locate(path, 'config.json')
    if path.is_file():
        return gguf.read_shape(path)
    return DecoderShape.from_hf_config(_read_json(path / 'config.json'), where=str(path / 'config.json'))


def open_tensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its Hugging Face name; nothing is read but the headers.

    Args:
      path: from `source.locate`.

    Raises:
      ConfigError: a file that cannot be read, or a tensor that no supported model has.
    """
    return gguf.open_tensors(path) if path.is_file() else _open_safetensors(path)


def load_params(path: str | pathlib.Path, abstract_params: nnx.State, param_dtype: Any = None) -> nnx.State:
    """Reads a checkpoint into the decoder's parameter tree, of each tensor only what this process's devices hold.

    A slice is read, converted and copied to the devices that hold it before the next one is read. Host memory in use at
    any time is one slice as stored and as converted, beside what the devices hold where they use the host's own memory.

    Args:
      path: as `source.locate` takes it: a folder with config.json and *.safetensors (bfloat16, float16 or float32; if
        there is an index, the files that it lists), or a .gguf file (any of its quantizations; they become plain
        numbers).
      abstract_params: from `abstract_decoder`; gives structure and dtypes. Leaves that carry a sharding are placed by
        it, each process reading its own part; the others are read whole and go to the default device.
      param_dtype: overrides the dtype of the matrices; norm scales stay float32.

    Returns:
      abstract_params with arrays.

    Raises:
      ConfigError: a tensor is missing, left over, of another shape than the model's or stored twice; names tensor and
        file. Found in the headers, before any weight is read.
    """
    path = locate(path, WEIGHTS)
    shape = read_shape(path)
    tensors = open_tensors(path)
    slots = hf_slots(shape)
    repeated_head = _drop_known_extras(tensors, shape)
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
    leaves, structure = jax.tree_util.tree_flatten_with_path(abstract_params)
    wanted = [(names[_key(place)], abstract) for place, abstract in leaves]
    for name, abstract in wanted:
        if abstract.shape != slots[name].sizes:
            raise ConfigError(
                f'{path}: {name} has shape {slots[name].sizes} here, but the decoder was made for {abstract.shape}'
            )
    if repeated_head is not None:
        _check_same_head(repeated_head, tensors['model.embed_tokens.weight'])

    def read(name: str, dtype: Any, index: Index) -> np.ndarray:
        return slots[name].read(tensors[name], index).astype(dtype, copy=False)

    arrays: list[Any] = [None] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: tensors[wanted[i][0]].file):  # a file is done before the next
        name, abstract = wanted[i]
        dtype = abstract.dtype if param_dtype is None or len(abstract.shape) == 1 else param_dtype
        sharding = getattr(abstract, 'sharding', None)
        arrays[i] = _placed(functools.partial(read, name, dtype), abstract.shape, sharding)
    return jax.tree_util.tree_unflatten(structure, arrays)


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
    for file in set(files.values()):  # which the library has made readable to their owner alone
        shutil.copymode(folder / 'config.json', folder / file)


def _placed(
    read: Callable[[Index], np.ndarray], sizes: tuple[int, ...], sharding: jax.sharding.Sharding | None
) -> jax.Array:
    if sharding is None:
        return jnp.asarray(read(_bounded((slice(None),) * len(sizes), sizes)))
    # Not jax.make_array_from_callback: it reads a slice anew for every device that holds it, and all slices of this
    # process before it places the first.
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(sizes).items():
        bounds = tuple((cut.start, cut.stop) for cut in _bounded(index, sizes))
        holders.setdefault(bounds, []).append(device)
    shards: list[jax.Array] = []
    for bounds, devices in holders.items():
        part = read(tuple(slice(*cut) for cut in bounds))
        # Waited for: copies to an accelerator run behind, and each keeps its slice in host memory until it is done.
        shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
    return jax.make_array_from_single_device_arrays(sizes, sharding, shards)


def _bounded(index: Index | None, sizes: tuple[int, ...]) -> Index:
    # None, which JAX's types allow for a device that holds nothing, is not among the devices of this process.
    assert index is not None
    return tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index, sizes, strict=True))


def _open_safetensors(folder: pathlib.Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        try:
            handle = safetensors.safe_open(file, framework='np')
        except safetensors.SafetensorError as error:
            raise ConfigError(f'{file}: cannot be read ({error}); the download may be incomplete') from error
        with handle:
            for name in handle.keys():  # noqa: SIM118  (no mapping: it has keys() alone)
                header = handle.get_slice(name)
                if header.get_dtype() not in _SAFETENSORS_DTYPES:
                    stored, known = header.get_dtype(), ', '.join(_SAFETENSORS_DTYPES)
                    raise ConfigError(f'{file}: the tensor {name} is stored as {stored}; only {known} can be read')
                if name in tensors:
                    raise ConfigError(f'{file}: the tensor {name} is also in {tensors[name].file}')
                read = functools.partial(_read_slice, file, name)
                tensors[name] = Tensor(tuple(header.get_shape()), str(file), read)
    return tensors


def _read_slice(file: pathlib.Path, name: str, index: Index) -> np.ndarray:
    # Opened anew for each slice (less than a millisecond): an open file keeps every page that was read mapped into this
    # process, in the end the whole file.
    with safetensors.safe_open(file, framework='np') as handle:
        return handle.get_slice(name)[index]


def _drop_known_extras(tensors: dict[str, Tensor], shape: DecoderShape) -> Tensor | None:
    # Returns the head that some tied checkpoints store all the same.
    for name in [name for name in tensors if name.endswith('.rotary_emb.inv_freq')]:
        del tensors[name]  # a buffer that old Llama checkpoints saved; it follows from the configuration
    return tensors.pop('lm_head.weight', None) if shape.tie_embeddings else None


def _check_same_head(head: Tensor, embed: Tensor) -> None:
    # Leaving out a head that differs would change the model in silence. Every process compares all of it, a block of
    # rows at a time: were each to look at its own slices alone, some could refuse it while others went on.
    rows, columns = embed.sizes
    block = max(1, _COMPARED_BYTES // (columns * _DTYPES['float32'].itemsize))
    blocks = ((slice(start, min(start + block, rows)), slice(0, columns)) for start in range(0, rows, block))
    if head.sizes != embed.sizes or not all(np.array_equal(head.read(part), embed.read(part)) for part in blocks):
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
