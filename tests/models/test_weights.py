"""Checkpoint folders: reading, refusing, writing."""

import dataclasses
import json

import golden_cases
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file
from tiny_models import jitted_logits, load, write_checkpoint

from sparrow_jax.config import ConfigError
from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.weights import load_params, read_shape, save_hf


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_a_missing_tensor_is_named(tmp_path, untied_checkpoint):
    _, config, tensors = untied_checkpoint
    del tensors['model.layers.1.mlp.up_proj.weight']
    with pytest.raises(ConfigError, match=r'bad: the tensor model\.layers\.1\.mlp\.up_proj\.weight is missing'):
        load(write_checkpoint(tmp_path / 'bad', config, tensors))


@pytest.mark.parametrize('name', ['model.layers.2.mlp.up_proj.weight', 'model.layers.0.self_attn.q_proj.bias'])
def test_an_extra_tensor_is_named_with_its_file(tmp_path, untied_checkpoint, name):
    _, config, tensors = untied_checkpoint
    tensors[name] = np.zeros((56, 40), np.float32)
    with pytest.raises(
        ConfigError, match=rf'model-0000\d-of-00002\.safetensors: the tensor {name} belongs to no weight'
    ):
        load(write_checkpoint(tmp_path / 'bad', config, tensors, shards=2))


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path, untied_checkpoint):
    _, config, tensors = untied_checkpoint
    name = 'model.layers.0.mlp.down_proj.weight'
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    with pytest.raises(ConfigError, match=rf'{name} has shape \[56, 40\], but the configuration says \[40, 56\]'):
        load(write_checkpoint(tmp_path / 'bad', config, tensors))


def test_a_tensor_in_two_files_is_refused(untied_checkpoint):
    folder, _, tensors = untied_checkpoint
    save_file({'model.norm.weight': tensors['model.norm.weight']}, folder / 'second.safetensors')
    with pytest.raises(ConfigError, match=r'model\.norm\.weight is also in'):
        load(folder)


def test_only_files_of_the_index_are_read_and_all_must_be_there(tmp_path, untied_checkpoint):
    _, config, tensors = untied_checkpoint
    folder = write_checkpoint(tmp_path / 'indexed', config, tensors, shards=3)
    files = sorted(folder.glob('*.safetensors'))
    weight_map = {name: file.name for file in files for name in load_file(file)}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': weight_map}))
    save_file({'stray': np.zeros(3, np.float32)}, folder / 'consolidated.safetensors')
    load(folder)
    files[1].unlink()
    with pytest.raises(ConfigError, match=f'{files[1].name}: missing'):
        load(folder)


def test_a_truncated_file_is_refused(untied_checkpoint):
    folder = untied_checkpoint[0]
    file = folder / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r'model\.safetensors: cannot be read'):
        load(folder)


def test_unreadable_number_formats_are_refused(tmp_path, untied_checkpoint):
    _, config, tensors = untied_checkpoint
    tensors['model.norm.weight'] = np.ones(40, np.int8)
    with pytest.raises(ConfigError, match=r'model\.norm\.weight is stored as I8'):
        load(write_checkpoint(tmp_path / 'bad', config, tensors))


def test_no_checkpoint_at_the_path(tmp_path, untied_checkpoint):
    with pytest.raises(ConfigError, match='no such checkpoint'):
        read_shape(tmp_path / 'absent')
    with pytest.raises(ConfigError, match=r'config\.json: missing'):
        read_shape(tmp_path)
    with pytest.raises(ConfigError, match='give the folder'):
        read_shape(untied_checkpoint[0] / 'model.safetensors')
    (tmp_path / 'config.json').write_text('{"model_type": ')
    with pytest.raises(ConfigError, match='not JSON'):
        read_shape(tmp_path)


@pytest.mark.parametrize('text', [b'[]', b'\xe9', b'{"model_type": "qwen3"'])
def test_a_broken_config_is_named(tmp_path, text):
    (tmp_path / 'config.json').write_bytes(text)
    with pytest.raises(ConfigError, match=r'config\.json: (not JSON|must hold one JSON object)'):
        read_shape(tmp_path)


@pytest.mark.parametrize('index', ['{}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_files_is_named(untied_checkpoint, index):
    folder = untied_checkpoint[0]
    (folder / 'model.safetensors.index.json').write_text(index)
    with pytest.raises(ConfigError, match=r'index\.json: weight_map must say'):
        load(folder)


def test_a_tied_checkpoint_may_repeat_its_head_but_not_differ(tmp_path):
    config = golden_cases.CASES['qwen3_tied_g2']
    tensors = golden_cases.weights(config)
    _, expected = load(write_checkpoint(tmp_path / 'plain', config, tensors))
    tensors['lm_head.weight'] = tensors['model.embed_tokens.weight'].copy()
    assert same(load(write_checkpoint(tmp_path / 'repeated', config, tensors))[1], expected)
    tensors['lm_head.weight'][3, 4] += 1
    with pytest.raises(ConfigError, match='tie_word_embeddings'):
        load(write_checkpoint(tmp_path / 'different', config, tensors))


def test_dtypes_follow_the_parameters_not_the_files(tmp_path, untied_checkpoint):
    _, config, tensors = untied_checkpoint
    folder = write_checkpoint(tmp_path / 'narrow', config, tensors, bfloat16=True)
    _, abstract = abstract_decoder(read_shape(folder))
    wide, narrow = load_params(folder, abstract), load_params(folder, abstract, param_dtype=jnp.bfloat16)
    assert {x.dtype.name for x in jax.tree.leaves(wide)} == {'float32'}
    assert {(x.ndim == 1, x.dtype.name) for x in jax.tree.leaves(narrow)} == {(True, 'float32'), (False, 'bfloat16')}


def test_weights_are_placed_by_the_sharding_of_the_abstract_parameters(untied_checkpoint):
    folder = untied_checkpoint[0]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    _, abstract = abstract_decoder(read_shape(folder))
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    params = load_params(folder, placed)
    assert same(params, load(folder)[1])
    assert all(x.sharding == sharding for x in jax.tree.leaves(params))


def test_a_decoder_of_another_shape_is_refused(untied_checkpoint):
    folder = untied_checkpoint[0]
    _, abstract = abstract_decoder(dataclasses.replace(read_shape(folder), d_ff=64))
    with pytest.raises(ConfigError, match='the decoder was made for'):
        load_params(folder, abstract)


@pytest.mark.parametrize('case', ['qwen3_tied_g2', 'qwen3_untied_g5', 'llama_llama3'])
@pytest.mark.parametrize('max_shard_bytes', [10_000, 10**9])
def test_save_then_load(tmp_path, case, max_shard_bytes):
    config = golden_cases.CASES[case]
    source = write_checkpoint(tmp_path / 'source', config, golden_cases.weights(config))
    graphdef, params = load(source)
    written = tmp_path / 'written'
    shape = read_shape(source)
    save_hf(written, shape, params, 'float32', end_ids=(5, 7), pad_id=7, max_shard_bytes=max_shard_bytes)
    assert read_shape(written) == shape
    assert same(load(written)[1], params)
    assert (written / 'model.safetensors.index.json').exists() == (max_shard_bytes == 10_000)
    assert (written / 'model.safetensors').exists() == (max_shard_bytes == 10**9)
    assert transformers.AutoConfig.from_pretrained(written).dtype in ('float32', None)
    assert transformers.GenerationConfig.from_pretrained(written).eos_token_id == [5, 7]
    logits = jitted_logits(graphdef, params, golden_cases.tokens_BT())
    np.testing.assert_array_equal(jitted_logits(*load(written), golden_cases.tokens_BT()), logits)


def test_the_written_folder_holds_the_tensors_it_was_read_from(tmp_path, untied_checkpoint):
    folder, _, tensors = untied_checkpoint
    save_hf(tmp_path / 'out', read_shape(folder), load(folder)[1], 'bfloat16')
    file = tmp_path / 'out' / 'model.safetensors'
    assert file.stat().st_mode == (tmp_path / 'out' / 'config.json').stat().st_mode
    written = load_file(file)
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(written[name], tensor.astype(ml_dtypes.bfloat16), err_msg=name)


def test_an_unknown_dtype_is_refused(tmp_path, untied_checkpoint):
    folder = untied_checkpoint[0]
    with pytest.raises(ConfigError, match='float8'):
        save_hf(tmp_path / 'out', read_shape(folder), load(folder)[1], 'float8')
