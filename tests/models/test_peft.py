"""An adapter in PEFT's layout adds to the matrices of a Hugging Face model what it adds in the decoder."""

import dataclasses
import json

import numpy as np
import safetensors.numpy
from tiny_models import SMALL

from sparrow_jax.models.adapter import AdapterSpec, init_adapter
from sparrow_jax.models.layout import hf_slots
from sparrow_jax.models.peft import save_peft

SHAPE = dataclasses.replace(SMALL, layers=2)
SPEC = AdapterSpec(rank=4, alpha=6.0, targets=('q', 'v', 'o', 'down'))
MODULES = {'q': 'self_attn.q_proj', 'v': 'self_attn.v_proj', 'o': 'self_attn.o_proj', 'down': 'mlp.down_proj'}


def test_the_written_adapter_adds_what_the_factors_add(tmp_path):
    factors, rng = init_adapter(SHAPE, SPEC, seed=1), np.random.default_rng(2)
    for layer in factors:
        for pair in layer.values():
            pair['b'] = rng.standard_normal(pair['b'].shape).astype(np.float32)
    save_peft(tmp_path / 'adapter', SPEC, factors, 'some/model')

    config = json.loads((tmp_path / 'adapter/adapter_config.json').read_text())
    assert (config['peft_type'], config['r'], config['lora_alpha']) == ('LORA', 4, 6.0)
    assert config['target_modules'] == ['q_proj', 'v_proj', 'o_proj', 'down_proj']
    assert config['base_model_name_or_path'] == 'some/model'
    tensors = safetensors.numpy.load_file(tmp_path / 'adapter/adapter_model.safetensors')
    assert len(tensors) == SHAPE.layers * len(SPEC.targets) * 2
    slots = hf_slots(SHAPE)
    for layer in range(SHAPE.layers):
        for target, module in MODULES.items():
            name = f'model.layers.{layer}.{module}'
            slot, pair = slots[f'{name}.weight'], factors[layer][target]
            a, b = (tensors[f'base_model.model.{name}.lora_{which}.weight'] for which in 'AB')
            assert (b.shape[0], a.shape[1]) == slot.hf_sizes
            assert (a.shape[0], b.shape[1]) == (SPEC.rank, SPEC.rank)
            added = np.tensordot(np.asarray(pair['a']), pair['b'], axes=1)  # as the decoder's weight stands, [in, out]
            np.testing.assert_allclose(b @ a, slot.to_hf(added), rtol=1e-5, atol=1e-6)
