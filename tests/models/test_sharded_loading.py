"""What each device gets of a checkpoint is its slice of the whole, and nothing more is read for it."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import gguf
import golden_cases
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from test_gguf import write_gguf
from tiny_models import write_checkpoint

from sparrow_jax.models.layout import Tensor, hf_slots
from sparrow_jax.models.shape import DecoderShape

PROGRAM = pathlib.Path(__file__).parent / 'sharded_loading.py'
# data,fsdp,tensor; the last two have more tensor shards than the models have KV heads, the last than query heads.
MESHES = ['8,1,1', '1,8,1', '2,2,2', '1,2,4', '1,1,8']
EVEN = {'vocab_size': 96}  # so that tensor shards cut the vocabulary too
CHECKPOINTS = ['tied', 'untied', 'quantized.gguf']


def start(*args, devices):
    environment = os.environ | {
        'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
        'JAX_PLATFORMS': 'cpu',
        'PYTHONPATH': str(PROGRAM.parents[2]),
    }
    return subprocess.Popen(
        [sys.executable, PROGRAM, *map(str, args)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes, seconds=300):
    try:
        found = []
        for process in processes:
            out, err = process.communicate(timeout=seconds)
            assert process.returncode == 0, err
            found.append(json.loads(out))
        return found
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp('checkpoints')
    tied = golden_cases.CASES['qwen3_tied_g2'] | EVEN
    untied = golden_cases.CASES['qwen3_untied_g4'] | EVEN
    write_checkpoint(folder / 'tied', tied, golden_cases.weights(tied), shards=2, bfloat16=True)
    write_checkpoint(folder / 'untied', untied, golden_cases.weights(untied), shards=3)
    # Rows of 2 and 3 blocks of 32 numbers: most cuts go through a block.
    llama = golden_cases.CASES['llama'] | EVEN | {'hidden_size': 64, 'intermediate_size': 96}
    write_gguf(folder / 'quantized.gguf', llama, golden_cases.weights(llama), gguf.GGMLQuantizationType.Q8_0)
    return folder


@pytest.fixture(scope='module')
def loaded(checkpoints):
    paths = ':'.join(str(checkpoints / name) for name in CHECKPOINTS)
    return finish([start('load', ':'.join(MESHES), paths, devices=8)])[0]


@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('name', CHECKPOINTS)
def test_every_shard_is_its_slice_of_the_whole(loaded, name, mesh):
    found = loaded[f'{name} {mesh}']
    assert found['equal']
    assert found['placed']
    assert found['devices'] == 8
    assert (found['cut'] == 0) == (mesh == '8,1,1')


@pytest.mark.parametrize('mesh', MESHES)
@pytest.mark.parametrize('name', ['tied', 'untied'])
def test_no_number_is_read_twice(loaded, name, mesh):
    """Though all devices, or those of one data shard, hold the same ones."""
    found = loaded[f'{name} {mesh}']
    assert found['read'] == found['held'] == found['all']


def test_a_process_reads_only_what_its_own_devices_hold(checkpoints):
    """Two processes, half of the devices each: with fsdp between them each reads half of every matrix."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        address = f'127.0.0.1:{listener.getsockname()[1]}'
    path = checkpoints / 'untied'
    processes = [start('load', '1,2,4', path, address, process, devices=4) for process in range(2)]
    for found in (found['untied 1,2,4'] for found in finish(processes)):
        assert found['devices'] == 8
        assert found['equal']
        assert found['read'] == found['held']
        assert found['held'] < 0.52 * found['all']  # norm scales are whole in both


def test_a_cut_that_is_no_range_of_the_tensor_is_made_after_reading():
    """No mesh cuts within heads; an index that does so is right all the same."""
    shape = DecoderShape.from_hf_config(golden_cases.CASES['qwen3_tied_g2'])
    rng = np.random.RandomState(0)
    for name, slot in hf_slots(shape).items():
        array = rng.standard_normal(slot.hf_sizes)
        tensor = Tensor(slot.hf_sizes, 'file', lambda index, array=array: array[index])
        whole = (array.T if slot.transposed else array).reshape(slot.sizes)
        np.testing.assert_array_equal(slot.to_hf(whole), array)
        index = tuple(slice(size // 4, size // 4 + max(1, size // 2)) for size in slot.sizes)
        np.testing.assert_array_equal(slot.read(tensor, index), whole[index], err_msg=name)


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path('/proc/self/clear_refs').exists(), reason='peak memory is read from /proc')
@pytest.mark.parametrize('mesh', ['1,8,1', '1,1,8'])
def test_peak_memory_is_what_the_devices_hold_and_one_tensor(tmp_path, mesh):
    """The bound: what simulated devices hold (the host's own memory), the pages of one tensor that are mapped while a
    slice is cut from it, and that slice as read and as placed; not the files.
    """
    shape = DecoderShape('qwen3', 16_000, 1024, 12, 16, 8, 64, 3072, 1e6, 1e-6, True, 4096)
    (tmp_path / 'config.json').write_text(json.dumps(shape.to_hf_config()))
    slots = hf_slots(shape)
    # Random bits: zeros would be stored as holes, and some memory would never be touched.
    random = np.random.RandomState(0).randint(0, 2**14, 16_000 * 1024, np.uint16).view(ml_dtypes.bfloat16)
    tensors = {name: random[: np.prod(slot.hf_sizes)].reshape(slot.hf_sizes) for name, slot in slots.items()}
    largest = max(tensor.nbytes for tensor in tensors.values())
    # The largest tensor comes last, when the devices hold the rest.
    save_file({name: tensors.pop(name) for name in ['model.embed_tokens.weight']}, tmp_path / 'model-2.safetensors')
    for i in range(2):
        save_file(dict(list(tensors.items())[i::2]), tmp_path / f'model-{i}.safetensors')
    (found,) = finish([start('peak', mesh, tmp_path, devices=8)])
    (found,) = found.values()
    assert found['held'] > 300e6
    slack = 15e6  # Python objects, freed memory that the allocator keeps
    assert found['held'] <= found['grown'] + slack
    assert found['grown'] <= found['held'] + 1.3 * largest + slack
