"""The decoder for one token a sequence, from fused kernels.

The same function as `Decoder.hidden`, in other pieces: what a projection's result still needs (norms, rotation, the
residual sum, the gate) happens in the kernel that makes or takes it, so that a layer is seven kernels beside those of
`attend` and reads its weights at the speed of memory. Sums stay in float32 where `Decoder.hidden` rounds products to
the compute dtype.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import residual_norm as norms
from pallas_kernels import skinny_matmul as products
from pallas_kernels.implementation import Implementation
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.skinny_matmul import skinny_matmul
from sparrow_jax.models.adapter import SamplerAdapter
from sparrow_jax.models.decoder import Decoder, Factors, Layer, rms_norm, rope_angles
from sparrow_jax.models.shape import DecoderShape

# write(layer, parts_SBF, norms, cos_BR, sin_BR, eps) -> q_BHA, with the token's key and value in the cache
Write = Callable[..., jax.Array]
# attend(layer, q_BHA) -> o_BHA
Attend = Callable[[int, jax.Array], jax.Array]


def why_unfused(shape: DecoderShape, sequences: int, dtype: np.dtype) -> str | None:
    """Why the fused kernels do not take such a decoder, or None where they do."""
    heads = [n * shape.head_dim for n in (shape.query_heads, shape.kv_heads)]
    if shape.d_model % norms.LANES:
        return f'the fused kernels take widths that are multiples of {norms.LANES}, not {shape.d_model}'
    matrices = ((shape.d_model, (*heads, shape.d_ff)), (heads[0], (shape.d_model,)), (shape.d_ff, (shape.d_model,)))
    reasons = (products.why_unfit(sequences, depth, columns, dtype) for depth, columns in matrices)
    return next((reason for reason in reasons if reason), None)


def fused_hidden(
    decoder: Decoder,
    token_B: jax.Array,
    position_B: jax.Array,
    write: Write,
    attend: Attend,
    implementation: Implementation,
    adapter: SamplerAdapter | None = None,
) -> jax.Array:
    """Final hidden states, after the last norm.

    Args:
        decoder: its weights are arguments of the program that this is traced into.
        token_B: int32; position_B: int32, of the token in its sequence.
        write: `rotate_and_write` on the cache, called once a layer before attend.
        attend: called once a layer with its queries.
        implementation: of the kernels.
        adapter: its additions are one more of the sums that the kernels add up; gate and up, which one kernel
            multiplies with each other, are multiplied outside where the adapter adds to them.

    Returns:
        hidden_BD in the compute dtype.
    """
    shape, eps = decoder.shape, decoder.shape.norm_eps
    multiply = lambda x_BD, *weights, gated=False: skinny_matmul(
        x_BD, weights, gated=gated, weights_at_rest=True, implementation=implementation
    )
    add = lambda x_BD, parts_SBD, scale_D: residual_norm(
        x_BD, parts_SBD, scale_D, eps=eps, implementation=implementation
    )
    cos_B1R, sin_B1R = rope_angles(shape, position_B[:, None])
    layers = list(decoder.layers)
    next_norms = [*(layer.attention_norm for layer in layers[1:]), decoder.final_norm]
    x_BD = jnp.take(decoder.embed[...], token_B, axis=0).astype(decoder.compute_dtype)
    y_BD = rms_norm(x_BD, layers[0].attention_norm[...], eps)
    B = token_B.shape[0]
    for layer, next_norm in zip(layers, next_norms, strict=True):
        q_DF, k_DF, v_DF = (matrix[...].reshape(shape.d_model, -1) for matrix in (layer.q, layer.k, layer.v))
        head_norms = (layer.q_norm[...], layer.k_norm[...]) if shape.qk_norm else None
        factors, factor_scale = ({}, 0.0) if adapter is None else (adapter.factors[layer.index], adapter.scale)
        own = _Additions(layer, factors, factor_scale)
        qkv_SBF = own(y_BD, multiply(y_BD, q_DF, k_DF, v_DF), 'q', 'k', 'v')
        q_BHA = write(layer.index, qkv_SBF, head_norms, cos_B1R[:, 0], sin_B1R[:, 0], eps)
        o_BF = attend(layer.index, q_BHA).reshape(B, -1)
        o_SBD = own(o_BF, multiply(o_BF, layer.o[...].reshape(-1, shape.d_model)), 'o')
        x_BD, y_BD = add(x_BD, o_SBD, layer.ffn_norm[...])
        if own.any('gate', 'up'):
            pair_SBF = own(y_BD, multiply(y_BD, layer.gate[...], layer.up[...]), 'gate', 'up')
            gate_BF, up_BF = jnp.split(pair_SBF.sum(axis=0), 2, axis=1)
            h_BF = (jax.nn.silu(gate_BF) * up_BF).astype(y_BD.dtype)
        else:
            h_BF = multiply(y_BD, layer.gate[...], layer.up[...], gated=True)
        x_BD, y_BD = add(x_BD, own(h_BF, multiply(h_BF, layer.down[...]), 'down'), next_norm[...])
    return y_BD


class _Additions:
    """What an adapter adds to the products of one layer; nothing without an adapter."""

    def __init__(self, layer: Layer, factors: Factors, scale: float):
        self.layer, self.factors, self.scale = layer, factors, scale

    def any(self, *names: str) -> bool:
        return any(name in self.factors for name in names)

    def __call__(self, x_BD: jax.Array, parts_SBF: jax.Array, *names: str) -> jax.Array:
        """The sums of x's products with the named weights, side by side, and those of the adapter as a last one."""
        if not self.any(*names):
            return parts_SBF
        added = [self._added(x_BD, name) for name in names]
        return jnp.concatenate([parts_SBF, jnp.concatenate(added, axis=1)[None]])

    def _added(self, x_BD: jax.Array, name: str) -> jax.Array:
        if name not in self.factors:
            columns = getattr(self.layer, name)[...].size // x_BD.shape[1]
            return jnp.zeros((len(x_BD), columns), jnp.float32)
        a_Dr, b_rF = self.factors[name]['a'], self.factors[name]['b']
        rank = b_rF.shape[0]
        a_Dr, b_rF = a_Dr.reshape(-1, rank).astype(x_BD.dtype), b_rF.reshape(rank, -1).astype(x_BD.dtype)
        product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
        return product((product(x_BD, a_Dr) * self.scale).astype(x_BD.dtype), b_rF)
