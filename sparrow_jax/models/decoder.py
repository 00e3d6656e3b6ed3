"""The decoder: Qwen3 and Llama layouts in one module, with attention as an argument.

Tokens and positions come from the learner, the prefill or the decode loop; final hidden states and logits go back
there. The decoder knows no KV cache, no mask and no sparsity: whoever calls it passes `attend(layer, q, k, v) -> o`,
which holds all of that. A low-rank adapter (`adapter.py`) comes in the same way and stays apart from the weights.

Weights live in the shapes that shard well, each with its logical axis names as metadata (`logical_axes`), all listed
in `layer_weights` and `model_weights`. Used functionally: `graphdef, params = nnx.split(decoder)`, then
`nnx.merge(graphdef, params).hidden(...)` under jit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from sparrow_jax.models.shape import DecoderShape, rope_frequencies

# attend(layer, q_BTHA, k_BTKA, v_BTKA) -> o_BTHA. q and k come after RoPE and QK-norm; q is unscaled: attend applies
# A**-0.5.
Attend = Callable[[int, Array, Array, Array], Array]
# Of one layer: name of a matrix -> {'a': [in..., rank], 'b': [rank, out...]}.
Factors = dict[str, dict[str, Array]]


class Weight(NamedTuple):
    """One weight: its sizes, the logical axis names that the sharding rules map to the mesh, and its fan-in (0: a norm
    scale)."""

    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int


def layer_weights(shape: DecoderShape) -> dict[str, Weight]:
    """The weights of one layer by attribute name."""
    d, h, k, a, f = shape.d_model, shape.query_heads, shape.kv_heads, shape.head_dim, shape.d_ff
    weights = {
        'attention_norm': Weight((d,), ('norm',), 0),
        'q': Weight((d, h, a), ('embed', 'heads', 'head_dim'), d),
        'k': Weight((d, k, a), ('embed', 'kv_heads', 'head_dim'), d),
        'v': Weight((d, k, a), ('embed', 'kv_heads', 'head_dim'), d),
        'o': Weight((h, a, d), ('heads', 'head_dim', 'embed'), h * a),
        'ffn_norm': Weight((d,), ('norm',), 0),
        'gate': Weight((d, f), ('embed', 'ffn'), d),
        'up': Weight((d, f), ('embed', 'ffn'), d),
        'down': Weight((f, d), ('ffn', 'embed'), f),
    }
    if shape.qk_norm:
        weights['q_norm'] = Weight((a,), ('norm',), 0)
        weights['k_norm'] = Weight((a,), ('norm',), 0)
    return weights


def model_weights(shape: DecoderShape) -> dict[str, Weight]:
    """The weights outside the layers by attribute name; `head` only where it is not tied to `embed`."""
    table = Weight((shape.vocab_size, shape.d_model), ('vocab', 'embed'), shape.d_model)
    weights = {'embed': table, 'final_norm': Weight((shape.d_model,), ('norm',), 0)}
    if not shape.tie_embeddings:
        weights['head'] = table
    return weights


class Layer(nnx.Module):
    """Pre-norm attention and gated feed-forward block.

    x + o(attend(rope(q), rope(k), v)) , then x + down(silu(gate) * up); each on the RMS-normalized residual stream.
    """

    attention_norm: nnx.Param
    q: nnx.Param
    k: nnx.Param
    v: nnx.Param
    o: nnx.Param
    ffn_norm: nnx.Param
    gate: nnx.Param
    up: nnx.Param
    down: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param

    def __init__(self, shape: DecoderShape, index: int, *, rngs: nnx.Rngs, param_dtype: Any) -> None:
        self.index = index
        self.norm_eps = shape.norm_eps
        self.qk_norm = shape.qk_norm
        _make_weights(self, layer_weights(shape), rngs, param_dtype)

    def __call__(
        self,
        x_BTD: Array,
        cos_BTA: Array,
        sin_BTA: Array,
        attend: Attend,
        factors: Factors | None = None,
        adapter_scale_BT: Array | None = None,
    ) -> Array:
        def project(name: str, equation: str, x: Array) -> Array:
            y = _project(equation, x, getattr(self, name)[...])
            if factors is not None and adapter_scale_BT is not None and name in factors:
                y = add_low_rank(equation, x, y, factors[name]['a'], factors[name]['b'], adapter_scale_BT)
            return y

        y_BTD = rms_norm(x_BTD, self.attention_norm[...], self.norm_eps)
        q_BTHA = project('q', 'btd,dha->btha', y_BTD)
        k_BTKA = project('k', 'btd,dka->btka', y_BTD)
        v_BTKA = project('v', 'btd,dka->btka', y_BTD)
        if self.qk_norm:
            q_BTHA = rms_norm(q_BTHA, self.q_norm[...], self.norm_eps)
            k_BTKA = rms_norm(k_BTKA, self.k_norm[...], self.norm_eps)
        q_BTHA, k_BTKA = rotate(q_BTHA, cos_BTA, sin_BTA), rotate(k_BTKA, cos_BTA, sin_BTA)
        o_BTHA = attend(self.index, q_BTHA, k_BTKA, v_BTKA)
        x_BTD = x_BTD + project('o', 'btha,had->btd', o_BTHA.astype(x_BTD.dtype))
        y_BTD = rms_norm(x_BTD, self.ffn_norm[...], self.norm_eps)
        gate_BTF = project('gate', 'btd,df->btf', y_BTD)
        up_BTF = project('up', 'btd,df->btf', y_BTD)
        return x_BTD + project('down', 'btf,fd->btd', jax.nn.silu(gate_BTF) * up_BTF)


class Decoder(nnx.Module):
    """A causal language model whose attention is passed in.

    Args:
      shape: all sizes.
      rngs: its `params` stream makes the random weights: normal with variance 1 / fan-in; norm scales are 1.
      param_dtype: dtype of the matrices as stored; norm scales are always float32.
      compute_dtype: dtype of activations and of matrix operands; float32 asks for full float32 products on every
      platform.
      remat: recompute each layer in the backward pass. `attend` must then be free of side effects.
      kept_names: values that `attend` names with `jax.ad_checkpoint.checkpoint_name` and that are not recomputed.
    """

    embed: nnx.Param
    final_norm: nnx.Param
    head: nnx.Param

    def __init__(
        self,
        shape: DecoderShape,
        *,
        rngs: nnx.Rngs,
        param_dtype: Any = jnp.float32,
        compute_dtype: Any = jnp.bfloat16,
        remat: bool = False,
        kept_names: tuple[str, ...] = (),
    ) -> None:
        self.shape = shape
        self.compute_dtype = np.dtype(compute_dtype)
        self.remat = remat
        self.kept_names = kept_names
        _make_weights(self, model_weights(shape), rngs, param_dtype)
        self.layers = nnx.List([Layer(shape, i, rngs=rngs, param_dtype=param_dtype) for i in range(shape.layers)])

    def hidden(
        self,
        tokens_BT: Array,
        positions_BT: Array,
        attend: Attend,
        adapter: Sequence[Factors] | None = None,
        adapter_scale_BT: Array | None = None,
    ) -> Array:
        """Final hidden states, after the last norm.

        Args:
          tokens_BT: int, ids in [0, V). What stands at padded places is up to `attend` to hide.
          positions_BT: int, position of each token in its sequence, from 0; fixes the rotary embedding, nothing else.
          attend: called once a layer, in order, with the layer's number as a Python int.
          adapter: from `adapter.init_adapter`, one entry a layer; None leaves no trace in the computation.
          adapter_scale_BT: from `AdapterSpec.scale_at`: alpha / rank where the adapter acts, exactly 0 where it does
            not. Needed with an adapter and ignored without one.

        Returns:
          hidden_BTD in the compute dtype. Differentiable in the weights, in the adapter and through `attend`.

        Raises:
          TypeError: an adapter without its scale, or with a mask in place of it.
          ValueError: the adapter has another number of layers.
        """
        if adapter is not None and (adapter_scale_BT is None or adapter_scale_BT.dtype == bool):
            raise TypeError('adapter_scale_BT: an adapter needs float scales, from AdapterSpec.scale_at(mask)')
        x_BTD = jnp.take(self.embed[...], tokens_BT, axis=0).astype(self.compute_dtype)
        cos_BTA, sin_BTA = rope_angles(self.shape, positions_BT)
        policy = jax.checkpoint_policies.save_only_these_names(*self.kept_names) if self.kept_names else None
        per_layer: Sequence[Factors | None] = [None] * len(self.layers) if adapter is None else adapter
        for layer, factors in zip(self.layers, per_layer, strict=True):
            if self.remat:
                graphdef, params = nnx.split(layer)

                def run(params, x_BTD, cos_BTA, sin_BTA, factors, adapter_scale_BT, graphdef=graphdef) -> Array:
                    layer = nnx.merge(graphdef, params)
                    return layer(x_BTD, cos_BTA, sin_BTA, attend, factors, adapter_scale_BT)

                x_BTD = jax.checkpoint(run, policy=policy)(params, x_BTD, cos_BTA, sin_BTA, factors, adapter_scale_BT)
            else:
                x_BTD = layer(x_BTD, cos_BTA, sin_BTA, attend, factors, adapter_scale_BT)
        return rms_norm(x_BTD, self.final_norm[...], self.shape.norm_eps)

    def logits(self, hidden_D: Array) -> Array:
        """Logits of any batch of hidden states: [..., D] -> [..., V], float32.

        Operands are in the compute dtype, sums and result in float32: a bfloat16 result has steps of 0.25 near 32.
        """
        head_VD = self.head_weight().astype(self.compute_dtype)
        hidden_D = hidden_D.astype(self.compute_dtype)
        return jnp.einsum(
            '...d,vd->...v', hidden_D, head_VD, precision=_precision(hidden_D), preferred_element_type=jnp.float32
        )

    def head_weight(self) -> Array:
        """The LM head [V, D] in its stored dtype; the embedding where the two are tied."""
        return self.embed[...] if self.shape.tie_embeddings else self.head[...]


def add_low_rank(equation: str, x: Array, y: Array, a: Array, b: Array, scale_BT: Array) -> Array:
    """y + scale * ((x a) b), factorised: where scale is 0, y bit for bit, whatever a and b hold.

    Operands are in x's dtype. In bfloat16 XLA may keep a value in float32 between two operations
    (xla_allow_excess_precision, on by default) and chooses anew for every graph: with scale 0 everywhere a model then
    differs from one without adapter by such roundings, unless both are compiled with that option off.

    Args:
      equation: of the product x, W -> y that a b is added to, such as 'btd,dha->btha'.
      x: [B, T, in...].
      y: [B, T, out...].
      a: [in..., rank], any float dtype.
      b: [rank, out...], likewise.
      scale_BT: float32.

    Returns:
      y's shape and dtype. Gradients flow into x, y, a and b; none into a and b from places with scale 0.
    """
    inner, outer = equation.split(',')[0].removeprefix('bt'), equation.split('->bt')[1]
    # The same kind of product as the one for y, dtype of the result included: a float32 result here made XLA's CPU
    # backend round x for y too, which it leaves out without an adapter.
    z_BTr = _project(f'bt{inner},{inner}r->btr', x, a).astype(jnp.float32) * scale_BT[..., None]
    delta = _project(f'btr,r{outer}->bt{outer}', z_BTr.astype(x.dtype), b)
    acts = jnp.expand_dims(scale_BT != 0, tuple(range(2, y.ndim)))
    return jnp.where(acts, y + delta, y)


def rms_norm(x_D: Array, scale_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32; returned in x's dtype."""
    x32_D = x_D.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32_D * x32_D, axis=-1, keepdims=True) + eps)
    return (x32_D * inverse * scale_D).astype(x_D.dtype)


def rope_angles(shape: DecoderShape, positions_BT: Array) -> tuple[Array, Array]:
    """cos and sin of the rotary embedding, each [B, T, A/2] float32, with the scaling that the checkpoint states."""
    frequencies, factor = rope_frequencies(shape)
    angle_BTA = positions_BT.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle_BTA) * factor, jnp.sin(angle_BTA) * factor


def rotate(x_BTHA: Array, cos_BTA: Array, sin_BTA: Array) -> Array:
    """Rotates the pairs (i, i + A/2) of each head by their angle, in float32; returned in x's dtype.

    The halves are paired, not neighbours: the layout of Hugging Face checkpoints.
    """
    first, second = jnp.split(x_BTHA.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTA[..., None, :], sin_BTA[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BTHA.dtype)


def init_decoder(shape: DecoderShape, seed: int, **options: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """A decoder with random weights as (graphdef, params); `options` are those of `Decoder`."""
    return nnx.split(Decoder(shape, rngs=nnx.Rngs(seed), **options))


def abstract_decoder(shape: DecoderShape, **options: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """Like `init_decoder` with `jax.ShapeDtypeStruct` in place of arrays; allocates nothing."""
    return nnx.split(nnx.eval_shape(lambda: Decoder(shape, rngs=nnx.Rngs(0), **options)))


def logical_axes(params: nnx.State) -> nnx.State:
    """The logical axis names of every weight: `params` with a tuple of names, one a dimension, in place of each
    array."""
    is_weight = lambda leaf: isinstance(leaf, nnx.Variable)
    return jax.tree.map(lambda weight: weight.get_metadata('logical_axes'), params, is_leaf=is_weight)


def _make_weights(module: nnx.Module, table: dict[str, Weight], rngs: nnx.Rngs, param_dtype: Any) -> None:
    # One draw for all weights of a module: the generator is compiled once a size, which for small models takes longer
    # than all the rest.
    numbers = jax.random.normal(rngs.params(), (sum(math.prod(w.sizes) for w in table.values() if w.fan_in),))
    start = 0
    for name, weight in table.items():
        if weight.fan_in:
            end = start + math.prod(weight.sizes)
            value = (numbers[start:end].reshape(weight.sizes) * weight.fan_in**-0.5).astype(param_dtype)
            start = end
        else:
            value = jnp.ones(weight.sizes, jnp.float32)
        setattr(module, name, nnx.Param(value, logical_axes=weight.axes))


def _project(equation: str, x: Array, weight: Array) -> Array:
    return jnp.einsum(equation, x, weight.astype(x.dtype), precision=_precision(x))


def _precision(x: Array) -> jax.lax.Precision | None:
    # By default a float32 product on GPU and TPU is rounded to fewer bits; float32 is chosen here to be exact.
    return jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
