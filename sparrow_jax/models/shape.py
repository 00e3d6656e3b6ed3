"""The shape of a decoder: every number that fixes its weights and its arithmetic.

Comes from a checkpoint's config.json (`weights.read_shape`), from GGUF metadata (`gguf.py`) or from `model.shape` of a
run's configuration; goes to the decoder, the KV cache, the cost model, and back into config.json when a checkpoint is
written.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparrow_jax.config import ConfigError, ShapeConfig

FAMILIES = ('qwen3', 'llama')
ROPE_KINDS = ('linear', 'llama3', 'yarn')
_ARCHITECTURES = {'qwen3': 'Qwen3ForCausalLM', 'llama': 'LlamaForCausalLM'}
# Settings of Hugging Face configs that change the arithmetic in a way the decoder does not know, with the only value
# it does.
_REQUIRED = {'attention_bias': False, 'mlp_bias': False, 'use_sliding_window': False, 'hidden_act': 'silu'}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Stretching of the rotary embedding beyond the positions of pre-training.

    `linear` divides every frequency by `factor`; `llama3` does so for wavelengths above original_max_positions /
    low_freq_factor and blends towards none at original_max_positions / high_freq_factor; `yarn` blends over dimensions
    between the rotation counts `beta_slow` and `beta_fast` and multiplies cos and sin by `attention_factor` (0 = 0.1
    ln(factor) + 1).
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.factor < math.inf:
            raise ConfigError(f'factor={self.factor} of the rope scaling must be positive and finite')


@dataclasses.dataclass(frozen=True)
class DecoderShape(ShapeConfig):
    """All sizes of a decoder: those that a configuration can state, checked, and the RoPE scaling of a checkpoint.

    Hashable, so jitted functions take it as a static argument.

    Raises:
      ConfigError: another family, query heads that do not divide into groups, an odd head dimension.
    """

    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(f'model family {self.family!r}: must be one of {", ".join(FAMILIES)}')
        for field in (
            'vocab_size',
            'd_model',
            'layers',
            'query_heads',
            'kv_heads',
            'head_dim',
            'd_ff',
            'max_positions',
        ):
            value = getattr(self, field)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
                raise ConfigError(f'{field}={value!r}: must be a positive integer')
        for field in ('rope_theta', 'norm_eps'):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise ConfigError(f'{field}={value!r}: must be positive and finite')
        if self.query_heads % self.kv_heads:
            raise ConfigError(f'{self.query_heads} query heads are not a multiple of {self.kv_heads} KV heads')
        if self.head_dim % 2:
            raise ConfigError(f'head_dim={self.head_dim}: must be even (rotary embedding)')

    @property
    def qk_norm(self) -> bool:
        """Whether each query and key head is RMS-normalized before RoPE."""
        return self.family == 'qwen3'

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any], where: str = 'config.json') -> 'DecoderShape':
        """Reads the mapping of a Hugging Face config.json, in the layout of transformers 4 or 5.

        Args:
          config: the parsed file.
          where: named in errors.

        Raises:
          ConfigError: another model type, or a setting whose arithmetic the decoder does not know.
        """
        family = config.get('model_type')
        if family not in FAMILIES:
            raise ConfigError(
                f'{where}: model_type={family!r} is not supported; it must be one of {", ".join(FAMILIES)}'
            )
        for key, value in _REQUIRED.items():
            if config.get(key, value) != value:
                raise ConfigError(f'{where}: {key}={config[key]!r} is not supported; only {value!r} is')
        try:
            heads = config['num_attention_heads']
            default_head_dim = 128 if family == 'qwen3' else config['hidden_size'] // heads
            # transformers 5 holds theta and scaling in one `rope_parameters`; before, `rope_theta` and `rope_scaling`
            # stood apart.
            rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
            theta = rope.get('rope_theta', config.get('rope_theta', 10_000.0))
            return cls(
                family=family,
                vocab_size=config['vocab_size'],
                d_model=config['hidden_size'],
                layers=config['num_hidden_layers'],
                query_heads=heads,
                kv_heads=config.get('num_key_value_heads') or heads,
                head_dim=config.get('head_dim') or default_head_dim,
                d_ff=config['intermediate_size'],
                rope_theta=float(theta),
                norm_eps=float(config.get('rms_norm_eps', 1e-6)),
                tie_embeddings=bool(config.get('tie_word_embeddings', False)),
                max_positions=config['max_position_embeddings'],
                rope_scaling=_rope_scaling(rope, config['max_position_embeddings']),
            )
        except KeyError as error:
            raise ConfigError(f'{where}: the field {error.args[0]!r} is missing') from error
        except ConfigError as error:
            raise ConfigError(f'{where}: {error}') from error
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ConfigError(f'{where}: a field holds something else than it should ({error})') from error

    def to_hf_config(self) -> dict[str, Any]:
        """The config.json that transformers (4 and 5) opens as the same model; `from_hf_config` is its inverse."""
        config: dict[str, Any] = {
            'architectures': [_ARCHITECTURES[self.family]],
            'model_type': self.family,
            'vocab_size': self.vocab_size,
            'hidden_size': self.d_model,
            'num_hidden_layers': self.layers,
            'num_attention_heads': self.query_heads,
            'num_key_value_heads': self.kv_heads,
            'head_dim': self.head_dim,
            'intermediate_size': self.d_ff,
            'rope_theta': self.rope_theta,
            'rms_norm_eps': self.norm_eps,
            'tie_word_embeddings': self.tie_embeddings,
            'max_position_embeddings': self.max_positions,
            **_REQUIRED,
        }
        if self.family == 'llama':
            del config['use_sliding_window']
        else:
            del config['mlp_bias']
        if self.rope_scaling is not None:
            config['rope_scaling'] = _hf_rope_scaling(self.rope_scaling)
        return config

    def parameter_count(self) -> int:
        """Number of weights; a tied head counts once."""
        attention = self.d_model * self.head_dim * 2 * (self.query_heads + self.kv_heads)
        norms = 2 * self.d_model + 2 * self.head_dim * self.qk_norm
        layer = attention + 3 * self.d_model * self.d_ff + norms
        heads = 1 if self.tie_embeddings else 2
        return heads * self.vocab_size * self.d_model + self.layers * layer + self.d_model


def rope_frequencies(shape: DecoderShape) -> tuple[np.ndarray, float]:
    """Rotary frequencies and the factor on cos and sin.

    frequency[i] = theta^(-2i / A), then `shape.rope_scaling` (see `RopeScaling`).

    Returns:
      (frequencies [A/2] float32 in radians a position, factor; 1.0 for all kinds but yarn).
    """
    theta, dim, scaling = shape.rope_theta, shape.head_dim, shape.rope_scaling
    inverse = 1.0 / theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    factor = 1.0
    if scaling is None:
        pass
    elif scaling.kind == 'linear':
        inverse = inverse / scaling.factor
    elif scaling.kind == 'llama3':
        turns = scaling.original_max_positions * inverse / (2 * math.pi)
        kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
        inverse = kept * inverse + (1 - kept) * inverse / scaling.factor
    else:  # yarn
        # The (real-valued) dimension whose frequency makes `turns` rotations over the original positions.
        low, high = (
            dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
        ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
        inverse = (1 - ramp) * inverse + ramp * inverse / scaling.factor
        factor = scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0
    return inverse.astype(np.float32), factor


def _rope_scaling(rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
    kind = rope.get('rope_type', rope.get('type', 'default'))
    if kind == 'default':
        return None
    if kind not in ROPE_KINDS:
        raise ConfigError(f'rope type {kind!r} is not supported; it must be one of default, {", ".join(ROPE_KINDS)}')
    for key in ('mscale', 'mscale_all_dim'):
        if rope.get(key):
            raise ConfigError(f'{key}={rope[key]!r} of the rope scaling is not supported')
    if not rope.get('truncate', True):
        raise ConfigError('truncate=False of the rope scaling is not supported')
    if rope.get('partial_rotary_factor', 1.0) != 1.0:
        raise ConfigError(f'partial_rotary_factor={rope["partial_rotary_factor"]!r} is not supported; only 1.0 is')
    if kind == 'linear':
        return RopeScaling(kind, float(rope['factor']))
    original = rope.get('original_max_position_embeddings') or max_positions
    if kind == 'llama3':
        return RopeScaling(
            kind, float(rope['factor']), float(rope['low_freq_factor']), float(rope['high_freq_factor']), original
        )
    return RopeScaling(
        kind,
        float(rope['factor']),
        original_max_positions=original,
        beta_fast=float(rope.get('beta_fast') or 32),
        beta_slow=float(rope.get('beta_slow') or 1),
        attention_factor=float(rope.get('attention_factor') or 0),
    )


def _hf_rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    fields: dict[str, Any] = {'rope_type': scaling.kind, 'factor': scaling.factor}
    if scaling.kind != 'linear':
        fields['original_max_position_embeddings'] = scaling.original_max_positions
    if scaling.kind == 'llama3':
        fields |= {'low_freq_factor': scaling.low_freq_factor, 'high_freq_factor': scaling.high_freq_factor}
    if scaling.kind == 'yarn':
        fields |= {'beta_fast': scaling.beta_fast, 'beta_slow': scaling.beta_slow}
        if scaling.attention_factor:
            fields['attention_factor'] = scaling.attention_factor
    return fields
