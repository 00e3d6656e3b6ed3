"""Reading and writing of config.json."""

import dataclasses

import golden_cases
import numpy as np
import pytest
import transformers
from tiny_models import SMALL

from sparrow_jax.config import ConfigError
from sparrow_jax.models.shape import DecoderShape, RopeScaling, rope_frequencies

LLAMA3 = RopeScaling('llama3', 8.0, 1.0, 4.0, original_max_positions=8192)
YARN = RopeScaling('yarn', 4.0, original_max_positions=32_768, attention_factor=1.25)
SCALINGS = [None, RopeScaling('linear', 2.0), LLAMA3, YARN]


@pytest.mark.parametrize('family', ['qwen3', 'llama'])
@pytest.mark.parametrize('scaling', SCALINGS)
def test_config_round_trip(family, scaling):
    shape = dataclasses.replace(SMALL, family=family, rope_scaling=scaling)
    assert DecoderShape.from_hf_config(shape.to_hf_config()) == shape


@pytest.mark.parametrize('family', ['qwen3', 'llama'])
@pytest.mark.parametrize('scaling', SCALINGS)
def test_transformers_reads_and_rewrites_the_config(tmp_path, family, scaling):
    shape = dataclasses.replace(SMALL, family=family, rope_scaling=scaling)
    fields = shape.to_hf_config()
    read = transformers.AutoConfig.for_model(**fields)
    assert (read.hidden_size, read.head_dim, read.num_key_value_heads) == (24, 8, 2)
    read.save_pretrained(tmp_path)
    rewritten = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    # transformers 5 writes `rope_parameters` where 4 wrote `rope_theta` and `rope_scaling`: both must be understood.
    assert 'rope_parameters' in rewritten
    assert DecoderShape.from_hf_config(rewritten) == shape


def test_head_dim_and_kv_heads_follow_from_older_configs():
    config = dict(golden_cases.CASES['llama'])
    del config['head_dim'], config['num_key_value_heads'], config['rope_theta']
    shape = DecoderShape.from_hf_config(config)
    assert (shape.head_dim, shape.kv_heads, shape.rope_theta) == (10, 4, 10_000.0)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'model_type': 'mixtral'}, 'mixtral'),
        ({'attention_bias': True}, 'attention_bias'),
        ({'hidden_act': 'gelu'}, 'hidden_act'),
        ({'use_sliding_window': True}, 'use_sliding_window'),
        ({'rope_scaling': {'rope_type': 'longrope', 'factor': 2.0}}, 'longrope'),
        ({'rope_scaling': {'type': 'dynamic', 'factor': 2.0}}, 'dynamic'),
        ({'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0, 'truncate': False}}, 'truncate'),
        ({'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0, 'mscale': 1.0}}, 'mscale'),
        ({'rope_scaling': {'rope_type': 'llama3', 'factor': 2.0}}, 'low_freq_factor'),
        ({'num_key_value_heads': 3}, 'some/config.json: .* KV heads'),
        ({'hidden_size': '128'}, "some/config.json: d_model='128': must be a positive integer"),
        ({'hidden_size': None}, 'some/config.json: d_model=None'),
        ({'num_hidden_layers': -1}, 'layers=-1: must be a positive integer'),
        ({'num_attention_heads': 0}, 'query_heads=0: must be a positive integer'),
        ({'num_attention_heads': [4]}, 'some/config.json'),
        ({'max_position_embeddings': True}, 'max_positions=True'),
        ({'rms_norm_eps': float('nan')}, 'norm_eps=nan: must be positive and finite'),
        ({'rope_theta': 'x'}, 'some/config.json: a field holds something else'),
        ({'rope_scaling': [1]}, 'some/config.json: a field holds something else'),
        ({'rope_scaling': {'rope_type': 'linear', 'factor': 0}}, 'some/config.json: factor=0.0 of the rope scaling'),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        DecoderShape.from_hf_config(golden_cases.CASES['qwen3_tied_g2'] | change, where='some/config.json')


def test_a_missing_field_is_named():
    config = dict(golden_cases.CASES['qwen3_tied_g2'])
    del config['intermediate_size']
    with pytest.raises(ConfigError, match=r'some/config\.json.*intermediate_size'):
        DecoderShape.from_hf_config(config, where='some/config.json')


def test_frequencies():
    plain = dataclasses.replace(SMALL, head_dim=4, rope_theta=100.0)
    np.testing.assert_allclose(rope_frequencies(plain)[0], [1.0, 0.1])
    linear = dataclasses.replace(plain, rope_scaling=RopeScaling('linear', 4.0))
    np.testing.assert_allclose(rope_frequencies(linear)[0], [0.25, 0.025])
    # llama3: 63 positions a turn at frequency 0.1. Ten original turns or more keep a frequency, one or fewer divide it.
    scaling = RopeScaling('llama3', 4.0, 1.0, 10.0, original_max_positions=62)
    llama3 = dataclasses.replace(plain, rope_scaling=scaling)
    np.testing.assert_allclose(rope_frequencies(llama3)[0], [1.0 * (1 - 0.75 * (10 - 9.8676) / 9), 0.025], rtol=1e-4)


@pytest.mark.parametrize('scaling', SCALINGS[1:])
def test_published_settings_change_low_frequencies_only(scaling):
    qwen = dataclasses.replace(SMALL, head_dim=128, rope_theta=1e6)
    plain = rope_frequencies(qwen)[0]
    scaled, factor = rope_frequencies(dataclasses.replace(qwen, rope_scaling=scaling))
    np.testing.assert_allclose(scaled[-1], plain[-1] / scaling.factor, rtol=1e-6)
    assert (scaled[0] == plain[0]) == (scaling.kind != 'linear')
    assert factor == (1.25 if scaling.kind == 'yarn' else 1.0)
