"""Writes an adapter as the folder that the PEFT library, and serving engines with LoRA support, open."""

import json
import pathlib
from collections.abc import Sequence

import jax
import numpy as np
import safetensors.numpy

from sparrow_jax.models.adapter import AdapterSpec
from sparrow_jax.models.decoder import Factors
from sparrow_jax.models.layout import hf_name

_PREFIX = 'base_model.model.'  # of PEFT's own wrappers around a model


def peft_tensors(factors: Sequence[Factors]) -> dict[str, np.ndarray]:
    """float32 tensors by PEFT's names: lora_A [rank, in] and lora_B [out, rank] of every matrix with factors, so that
    the matrix that transformers holds, [out, in], becomes W + alpha / rank B A.

    Args:
      factors: one entry a layer, arrays that this process can address whole.
    """
    tensors = {}
    for layer, targets in enumerate(factors):
        for target, pair in targets.items():
            a, b = (np.asarray(jax.device_get(pair[name]), np.float32) for name in ('a', 'b'))
            name = _PREFIX + hf_name(target, layer).removesuffix('.weight')
            tensors[f'{name}.lora_A.weight'] = np.ascontiguousarray(a.reshape(-1, a.shape[-1]).T)
            tensors[f'{name}.lora_B.weight'] = np.ascontiguousarray(b.reshape(b.shape[0], -1).T)
    return tensors


def save_peft(folder: str | pathlib.Path, spec: AdapterSpec, factors: Sequence[Factors], base_model: str) -> None:
    """Writes adapter_model.safetensors and, last, adapter_config.json.

    Args:
      folder: made if absent.
      spec: of the adapter.
      factors: as `peft_tensors` takes them.
      base_model: folder or name of the model that the adapter is for.
    """
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / 'adapter_model.safetensors'
    safetensors.numpy.save_file(peft_tensors(factors), file, metadata={'format': 'pt'})
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base_model,
        'r': spec.rank,
        'lora_alpha': spec.alpha,
        'lora_dropout': 0.0,
        'target_modules': [hf_name(target, 0).split('.')[-2] for target in spec.targets],
        'bias': 'none',
        'fan_in_fan_out': False,
        'use_rslora': False,
        'modules_to_save': None,
        'inference_mode': True,
    }
    (folder / 'adapter_config.json').write_text(json.dumps(config, indent=2) + '\n')
    file.chmod((folder / 'adapter_config.json').stat().st_mode)  # the library makes it readable to its owner alone
