"""Attention, tiny models and their checkpoints for the tests of the decoder."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.models.weights import load_params, read_shape

# Each size differs from the others, so that no swapped axis goes unnoticed.
SMALL = DecoderShape(
    family='qwen3',
    vocab_size=50,
    d_model=24,
    layers=3,
    query_heads=6,
    kv_heads=2,
    head_dim=8,
    d_ff=36,
    rope_theta=1e4,
    norm_eps=1e-6,
    tie_embeddings=False,
    max_positions=64,
)


def causal_attend(layer, q_BTHA, k_BTKA, v_BTKA):
    """Plain causal attention of whole rows in float32."""
    del layer
    group = q_BTHA.shape[2] // k_BTKA.shape[2]
    k_BTHA, v_BTHA = jnp.repeat(k_BTKA, group, axis=2), jnp.repeat(v_BTKA, group, axis=2)
    scores_BHTS = jnp.einsum('bthd,bshd->bhts', q_BTHA, k_BTHA).astype(jnp.float32) * q_BTHA.shape[-1] ** -0.5
    causal_TS = jnp.tril(jnp.ones(scores_BHTS.shape[-2:], bool))
    weights_BHTS = jax.nn.softmax(jnp.where(causal_TS, scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum('bhts,bshd->bthd', weights_BHTS.astype(v_BTHA.dtype), v_BTHA)


def run_logits(graphdef, params, tokens_BT, attend=causal_attend):
    """Logits [B, T, V] of whole rows from position 0."""
    tokens_BT = jnp.asarray(tokens_BT)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    decoder = nnx.merge(graphdef, params)
    return decoder.logits(decoder.hidden(tokens_BT, positions_BT, attend))


jitted_logits = jax.jit(run_logits, static_argnames=('graphdef', 'attend'))


def load(path, **options):
    """(graphdef, params) of a checkpoint, in float32."""
    graphdef, abstract = abstract_decoder(read_shape(path), compute_dtype=jnp.float32, **options)
    return graphdef, load_params(path, abstract)


def write_checkpoint(folder, config, tensors, shards=1, bfloat16=False):
    """Writes a Hugging Face folder: keys in random order over `shards` files, matrices in bfloat16 if asked, norms in
    float32."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'config.json').write_text(json.dumps(config))
    names = list(np.random.RandomState(1).permutation(sorted(tensors)))
    for i in range(shards):
        part = {}
        for name in names[i::shards]:
            narrow = bfloat16 and tensors[name].ndim == 2
            part[name] = tensors[name].astype(ml_dtypes.bfloat16) if narrow else tensors[name]
        save_file(
            part, folder / (f'model-{i + 1:05d}-of-{shards:05d}.safetensors' if shards > 1 else 'model.safetensors')
        )
    return folder
