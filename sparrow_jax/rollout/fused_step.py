"""The decoder for one token a sequence, from fused kernels.

The same function as `Decoder.hidden`, in other pieces: what a projection's result still needs (norms, rotation, the
residual sum, the gate) happens in the kernel that makes or takes it, so that a layer is seven kernels beside those of
`attend` and reads its weights at the speed of memory. Sums stay in float32 where `Decoder.hidden` rounds products to
the compute dtype.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import residual_norm as norms
from pallas_kernels import skinny_matmul as products
from pallas_kernels.implementation import Implementation
from pallas_kernels.residual_norm import residual_norm
from pallas_kernels.skinny_matmul import skinny_matmul
from sparrow_jax.models.adapter import SamplerAdapter
from sparrow_jax.models.decoder import Decoder, layer_weights, rms_norm, rope_angles
from sparrow_jax.models.shape import DecoderShape

# write(layer, parts_SBF, norms, cos_BR, sin_BR, eps) -> q_BHA, with the token's key and value in the cache
Write = Callable[..., jax.Array]
# attend(layer, q_BHA) -> o_BHA
Attend = Callable[[int, jax.Array], jax.Array]
_SAME_INPUT = (('q', 'k', 'v'), ('o',), ('gate', 'up'), ('down',))


class LowRank(NamedTuple):
    """Factors of an addition scale * (x a) b."""

    a_Dr: jax.Array
    b_rF: jax.Array
    scale: float


MergedFactors = list[dict[str, LowRank]]


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
    adapter: MergedFactors | None = None,
) -> jax.Array:
    """Final hidden states, after the last norm.

    Args:
        decoder: its weights are arguments of the program that this is traced into.
        token_B: int32; position_B: int32, of the token in its sequence.
        write: `rotate_and_write` on the cache, called once a layer before attend.
        attend: called once a layer with its queries.
        implementation: of the kernels.
        adapter: of `merged_factors`. What it adds is one more of the sums that the kernels add up; gate and up, which
            one kernel multiplies with each other, are multiplied outside where the adapter adds to them.

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
    # Rows that the products would otherwise add and take away again, each in a kernel of its own: from here to the end
    # B counts them too, while `write` and `attend` work on the sequences.
    sequences = token_B.shape[0]
    missing = -sequences % products.ROW_MULTIPLE
    token_B = jnp.pad(token_B, (0, missing))
    x_BD = jnp.take(decoder.embed[...], token_B, axis=0).astype(decoder.compute_dtype)
    y_BD = rms_norm(x_BD, layers[0].attention_norm[...], eps)
    for layer, next_norm in zip(layers, next_norms, strict=True):
        q_DF, k_DF, v_DF = (matrix[...].reshape(shape.d_model, -1) for matrix in (layer.q, layer.k, layer.v))
        head_norms = (layer.q_norm[...], layer.k_norm[...]) if shape.qk_norm else None
        pairs = {} if adapter is None else adapter[layer.index]
        qkv_SBF = _with_added(y_BD, multiply(y_BD, q_DF, k_DF, v_DF), pairs.get('q'))
        q_BHA = write(layer.index, qkv_SBF, head_norms, cos_B1R[:, 0], sin_B1R[:, 0], eps)
        o_BF = jnp.pad(attend(layer.index, q_BHA).reshape(sequences, -1), ((0, missing), (0, 0)))
        o_SBD = _with_added(o_BF, multiply(o_BF, layer.o[...].reshape(-1, shape.d_model)), pairs.get('o'))
        x_BD, y_BD = add(x_BD, o_SBD, layer.ffn_norm[...])
        if 'gate' in pairs:
            pair_SBF = _with_added(y_BD, multiply(y_BD, layer.gate[...], layer.up[...]), pairs['gate'])
            gate_BF, up_BF = jnp.split(pair_SBF.sum(axis=0), 2, axis=1)
            h_BF = (jax.nn.silu(gate_BF) * up_BF).astype(y_BD.dtype)
        else:
            h_BF = multiply(y_BD, layer.gate[...], layer.up[...], gated=True)
        down_SBD = _with_added(h_BF, multiply(h_BF, layer.down[...]), pairs.get('down'))
        x_BD, y_BD = add(x_BD, down_SBD, next_norm[...])
    return y_BD[:sequences]


def merged_factors(shape: DecoderShape, adapter: SamplerAdapter) -> MergedFactors:
    """What an adapter adds to the products of each layer, one pair of factors for all that have the same input: two
    products in place of two for every target. To be made before a loop over steps.

    Returns:
        Of every layer, the first name of each group of `_SAME_INPUT` with a target to its factors: a [D, r] with those
        of its targets side by side, b [r, F] with theirs along the diagonal, F over all of the group.
    """
    widths = {
        name: math.prod(weight.sizes) // weight.fan_in for name, weight in layer_weights(shape).items() if weight.fan_in
    }
    merged = []
    for factors in adapter.factors:
        pairs = {}
        for names in _SAME_INPUT:
            targets = [name for name in names if name in factors]
            if not targets:
                continue
            ranks = [factors[name]['b'].shape[0] for name in targets]
            rows = [factors[name]['a'].reshape(-1, rank) for name, rank in zip(targets, ranks, strict=True)]
            b_rF = jnp.zeros((sum(ranks), sum(widths[name] for name in names)), rows[0].dtype)
            row = 0
            for name, rank in zip(targets, ranks, strict=True):
                column = sum(widths[before] for before in names[: names.index(name)])
                own_rF = factors[name]['b'].reshape(rank, -1)
                b_rF = b_rF.at[row : row + rank, column : column + own_rF.shape[1]].set(own_rF)
                row += rank
            pairs[names[0]] = LowRank(jnp.concatenate(rows, axis=1), b_rF, adapter.scale)
        merged.append(pairs)
    return merged


def _with_added(x_BD: jax.Array, parts_SBF: jax.Array, pair: LowRank | None) -> jax.Array:
    """The sums of x's products with weights, and the adapter's as one more of them."""
    if pair is None:
        return parts_SBF
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    z_Br = (product(x_BD, pair.a_Dr.astype(x_BD.dtype)) * pair.scale).astype(x_BD.dtype)
    return jnp.concatenate([parts_SBF, product(z_Br, pair.b_rF.astype(x_BD.dtype))[None]])
