"""LoRA: low-rank additions to the decoder's matrices that stay apart from its weights.

The sampler owns one adapter: DistillSparse trains it and the sampler passes it to `Decoder.hidden` for response
positions, while prompts are encoded by the weights alone. It is applied factorised, y + alpha / rank * ((x a) b), and
never merged: bfloat16 numbers near 0.02 stand 1e-4 apart, so that a merge loses a third of a learned change of that
size.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from sparrow_jax.config import ConfigError
from sparrow_jax.config_checks import ADAPTER_TARGETS
from sparrow_jax.models.decoder import Factors, Weight, layer_weights
from sparrow_jax.models.shape import DecoderShape

TARGETS = ADAPTER_TARGETS


@dataclasses.dataclass(frozen=True)
class AdapterSpec:
    """Size and strength of an adapter. Hashable, so jitted functions take it as a static argument.

    Args:
      rank: inner width of each pair of factors, at least 1.
      alpha: the additions are multiplied by alpha / rank; positive.
      targets: the matrices of every layer that get factors, from `TARGETS`.

    Raises:
      ConfigError: a value outside these.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f'distill.rank={self.rank}: must be at least 1')
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f'distill.alpha={self.alpha}: must be positive and finite')
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) < len(self.targets):
            raise ConfigError(
                f'distill.targets={tuple(self.targets)}: must be one or more of {", ".join(TARGETS)}, each once'
            )

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def scale_at(self, mask_BT: Array) -> Array:
        """The `adapter_scale_BT` of `Decoder.hidden`: float32, the scale where mask_BT (bool) holds, else 0."""
        return jnp.where(mask_BT, jnp.float32(self.scale), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SamplerAdapter:
    """An adapter as the sampler takes it.

    Attributes:
      factors: of `init_adapter`, in the compute dtype.
      scale: of its `AdapterSpec`.
    """

    factors: list[Factors]
    scale: float = dataclasses.field(metadata={'static': True})


def init_adapter(shape: DecoderShape, spec: AdapterSpec, seed: int, dtype: Any = jnp.float32) -> list[Factors]:
    """An adapter that changes nothing yet: a normal with variance 1 / fan-in, b zero.

    Args:
      shape: of the decoder it is for.
      spec: its rank and targets.
      seed: fixes every a.
      dtype: of the factors as stored; an optimizer wants float32, the sampler can hold a copy in its compute dtype.

    Returns:
      One dict a layer: target -> {'a': [in..., rank], 'b': [rank, out...]}, the weight's own input and output
      dimensions. A plain pytree for optax, orbax and `jax.eval_shape`.

    Raises:
      ConfigError: the rank is above the smaller side of a target, which no addition to that matrix can use.
    """
    factors = factor_weights(shape, spec)
    # One draw for the whole adapter, as for the decoder's weights: a draw of each size would be compiled anew.
    layer_size = sum(math.prod(a.sizes) for a, _ in factors.values())
    numbers = jax.random.normal(jax.random.key(seed), (shape.layers * layer_size,))
    adapter: list[Factors] = []
    start = 0
    for _ in range(shape.layers):
        layer: Factors = {}
        for name, (a, b) in factors.items():
            end = start + math.prod(a.sizes)
            value = numbers[start:end].reshape(a.sizes) * a.fan_in**-0.5
            layer[name] = {'a': value.astype(dtype), 'b': jnp.zeros(b.sizes, dtype)}
            start = end
        adapter.append(layer)
    return adapter


def adapter_axes(shape: DecoderShape, spec: AdapterSpec) -> list[dict[str, dict[str, tuple[str, ...]]]]:
    """The logical axis names of `init_adapter`'s arrays, a tuple of names in place of each: those of the weight and
    'rank', which no sharding rule cuts."""
    factors = factor_weights(shape, spec)
    return [{name: {'a': a.axes, 'b': b.axes} for name, (a, b) in factors.items()} for _ in range(shape.layers)]


def adapter_parameter_count(shape: DecoderShape, spec: AdapterSpec) -> int:
    """The number of elements of all factors of all layers."""
    pairs = factor_weights(shape, spec).values()
    return shape.layers * sum(math.prod(a.sizes) + math.prod(b.sizes) for a, b in pairs)


def factor_weights(shape: DecoderShape, spec: AdapterSpec) -> dict[str, tuple[Weight, Weight]]:
    """Target -> (a, b) of one layer. Raises ConfigError as `init_adapter`."""
    weights = layer_weights(shape)
    factors = {}
    for name in spec.targets:
        weight = weights[name]
        inputs = next(n for n in range(len(weight.sizes)) if math.prod(weight.sizes[:n]) == weight.fan_in)
        smaller = min(weight.fan_in, math.prod(weight.sizes[inputs:]))
        if spec.rank > smaller:
            raise ConfigError(
                f'distill.rank={spec.rank}: is above the smaller side of {name}, {smaller}; set it to {smaller} or '
                'less, or leave that target out'
            )
        a = Weight((*weight.sizes[:inputs], spec.rank), (*weight.axes[:inputs], 'rank'), weight.fan_in)
        b = Weight((spec.rank, *weight.sizes[inputs:]), ('rank', *weight.axes[inputs:]), spec.rank)
        factors[name] = (a, b)
    return factors
