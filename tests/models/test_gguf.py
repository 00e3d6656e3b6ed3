"""GGUF files, written here by the gguf package: the same model as the folder with the same tensors."""

import gguf
import golden_cases
import jax
import numpy as np
import pytest
from tiny_models import load, write_checkpoint

from sparrow_jax.config import ConfigError
from sparrow_jax.models.layout import hf_slots
from sparrow_jax.models.weights import read_shape


def gguf_name(name, arch):
    tensor_map = gguf.get_tensor_name_map(arch, 4)
    return tensor_map.get_name(name, try_suffixes=('.weight',))


def permute(array, heads):
    """Row order of the Llama layout of GGUF, as its converter makes it from a Hugging Face matrix."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, config, tensors, quantization=gguf.GGMLQuantizationType.F32, **fields):
    family = config['model_type']
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config['num_hidden_layers'])
    writer.add_context_length(config['max_position_embeddings'])
    writer.add_embedding_length(config['hidden_size'])
    writer.add_feed_forward_length(config['intermediate_size'])
    writer.add_head_count(config['num_attention_heads'])
    writer.add_head_count_kv(config['num_key_value_heads'])
    writer.add_key_length(config['head_dim'])
    writer.add_rope_freq_base(config['rope_theta'])
    writer.add_layer_norm_rms_eps(config['rms_norm_eps'])
    for key, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f'{family}.{key.replace("__", ".")}', value)
    arch = {'llama': gguf.MODEL_ARCH.LLAMA, 'qwen3': gguf.MODEL_ARCH.QWEN3}[family]
    for name, array in tensors.items():
        if family == 'llama' and name.endswith('q_proj.weight'):
            array = permute(array, config['num_attention_heads'])
        if family == 'llama' and name.endswith('k_proj.weight'):
            array = permute(array, config['num_key_value_heads'])
        if array.ndim == 2:
            array = gguf.quants.quantize(array, quantization)
            writer.add_tensor(gguf_name(name, arch) or name, array, raw_dtype=quantization)
        else:
            writer.add_tensor(gguf_name(name, arch) or name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    'case', ['llama', 'llama_linear_tied', 'qwen3_tied_g2', 'qwen3_untied_g4', 'qwen3_untied_yarn']
)
def test_a_gguf_file_is_the_same_model_as_the_folder(tmp_path, case):
    config = golden_cases.CASES[case]
    tensors = golden_cases.weights(config)
    folder = write_checkpoint(tmp_path / 'folder', config, tensors)
    scaling = config.get('rope_scaling', {})
    fields = {}
    if scaling:
        fields = {'rope__scaling__type': scaling['rope_type'], 'rope__scaling__factor': scaling['factor']}
    if scaling.get('rope_type') == 'yarn':
        fields['rope__scaling__original_context_length'] = float(scaling['original_max_position_embeddings'])
    file = write_gguf(tmp_path / 'model.gguf', config, tensors, **fields)
    assert read_shape(file) == read_shape(folder)
    for a, b in zip(jax.tree.leaves(load(file)[1]), jax.tree.leaves(load(folder)[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ('kind', 'error'),
    [('F16', 2e-3), ('BF16', 0.0), ('Q8_0', 0.02), ('Q4_1', 0.15)],
)
def test_quantizations_are_undone(tmp_path, kind, error):
    # Quantized blocks hold 32 numbers, so every width must be a multiple of that.
    config = golden_cases.CASES['llama'] | {'hidden_size': 64, 'intermediate_size': 96, 'head_dim': 16}
    tensors = golden_cases.weights(config)
    file = write_gguf(tmp_path / 'model.gguf', config, tensors, gguf.GGMLQuantizationType[kind])
    params = load(file)[1]
    for name, slot in hf_slots(read_shape(file)).items():
        found = params
        for key in slot.key:
            found = found[key]
        found = slot.to_hf(np.asarray(jax.tree.leaves(found)[0]))
        difference = np.abs(found - tensors[name]).max()
        assert difference <= error * np.abs(tensors[name]).max(), name


def test_a_missing_and_an_extra_tensor_are_named(tmp_path):
    config = golden_cases.CASES['llama']
    tensors = golden_cases.weights(config)
    missing = {name: array for name, array in tensors.items() if name != 'model.layers.1.self_attn.k_proj.weight'}
    with pytest.raises(ConfigError, match=r'model\.layers\.1\.self_attn\.k_proj\.weight is missing'):
        load(write_gguf(tmp_path / 'missing.gguf', config, missing))
    extra = tensors | {'blk.0.attn_q.bias': np.zeros(64, np.float32)}
    with pytest.raises(ConfigError, match=r'blk\.0\.attn_q\.bias belongs to no weight'):
        load(write_gguf(tmp_path / 'extra.gguf', config, extra))
    scaled = tensors | {'rope_freqs.weight': np.ones(8, np.float32)}
    with pytest.raises(ConfigError, match='llama3'):
        load(write_gguf(tmp_path / 'scaled.gguf', config, scaled))


def test_a_misshapen_tensor_is_named(tmp_path):
    config = golden_cases.CASES['llama']
    tensors = golden_cases.weights(config)
    tensors['model.layers.0.mlp.up_proj.weight'] = np.ones((40, 40), np.float32)
    with pytest.raises(ConfigError, match=r'model\.layers\.0\.mlp\.up_proj\.weight has shape \[40, 40\]'):
        load(write_gguf(tmp_path / 'model.gguf', config, tensors))


def test_other_files_and_architectures_are_refused(tmp_path):
    (tmp_path / 'no.gguf').write_bytes(b'not a gguf file, but long enough to hold a header of one')
    with pytest.raises(ConfigError, match='cannot be read as a GGUF file'):
        read_shape(tmp_path / 'no.gguf')
    for i, cut_off in enumerate((b'GGUF', b'GGUF\x03\0\0\0' + b'\xff' * 40)):
        (tmp_path / f'{i}.gguf').write_bytes(cut_off)
        with pytest.raises(ConfigError, match=r'cannot be read as a GGUF file .*incomplete'):
            read_shape(tmp_path / f'{i}.gguf')
    writer = gguf.GGUFWriter(tmp_path / 'other.gguf', 'mamba')
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match='mamba'):
        read_shape(tmp_path / 'other.gguf')


def test_a_rewritten_file_is_read_again(tmp_path):
    config = golden_cases.CASES['llama']
    tensors = golden_cases.weights(config)
    file = write_gguf(tmp_path / 'model.gguf', config, tensors)
    before = load(file)[1]
    tensors['model.norm.weight'] = tensors['model.norm.weight'] + 1
    file.unlink()
    write_gguf(file, config, tensors)
    after = load(file)[1]
    difference = np.asarray(jax.tree.leaves(after['final_norm'])[0]) - jax.tree.leaves(before['final_norm'])[0]
    np.testing.assert_allclose(difference, 1, rtol=1e-6)
