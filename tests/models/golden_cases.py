"""Tiny models whose logits transformers computed: their configurations, weights and tokens.

Shared by `scripts/make_golden.py`, which runs them through transformers and stores the logits, and by the tests, which
compare. Plain NumPy, since the script's environment has no JAX. RandomState: its stream is frozen, so weights need not
be stored.
"""

import numpy as np

VOCAB = 97
SHAPES = {'vocab_size': VOCAB, 'hidden_size': 40, 'num_hidden_layers': 2, 'intermediate_size': 56, 'head_dim': 16}
COMMON = {**SHAPES, 'rms_norm_eps': 1e-6, 'max_position_embeddings': 128, 'hidden_act': 'silu', 'attention_bias': False}


def _qwen3(query_heads: int, kv_heads: int, tied: bool, **more) -> dict:
    heads = {'num_attention_heads': query_heads, 'num_key_value_heads': kv_heads}
    tied_field = {'tie_word_embeddings': tied}
    return (
        COMMON
        | {'model_type': 'qwen3', 'architectures': ['Qwen3ForCausalLM'], 'rope_theta': 1e6}
        | heads
        | tied_field
        | more
    )


def _llama(**more) -> dict:
    fields = {'num_attention_heads': 4, 'num_key_value_heads': 2, 'tie_word_embeddings': False, 'rope_theta': 1e4}
    return COMMON | {'model_type': 'llama', 'architectures': ['LlamaForCausalLM'], 'mlp_bias': False} | fields | more


# Positions run to 23, so original positions of 16 put the scaled frequencies well inside the test.
LLAMA3 = {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0}
LLAMA3['original_max_position_embeddings'] = 16
YARN = {'rope_type': 'yarn', 'factor': 8.0, 'original_max_position_embeddings': 16}

CASES = {
    'qwen3_tied_g1': _qwen3(2, 2, True),
    'qwen3_tied_g2': _qwen3(4, 2, True),
    'qwen3_untied_g4': _qwen3(4, 1, False),
    'qwen3_untied_g5': _qwen3(10, 2, False),
    'qwen3_untied_yarn': _qwen3(4, 2, False, rope_scaling=YARN),
    'llama': _llama(),
    'llama_llama3': _llama(rope_scaling=LLAMA3),
    'llama_linear_tied': _llama(rope_scaling={'rope_type': 'linear', 'factor': 3.0}, tie_word_embeddings=True),
}
SMOLLM2_PROMPT = 'What is the capital of France?'
SMOLLM2_POSITIONS = (0, 7, -1)
SMOLLM2_VOCAB_STRIDE = 61


def weights(config: dict) -> dict[str, np.ndarray]:
    """Hugging Face tensors of a tiny model: matrices exact in bfloat16, norm scales float32 and not exact in it."""
    rng = np.random.RandomState(3)
    d, f, a, v = config['hidden_size'], config['intermediate_size'], config['head_dim'], config['vocab_size']
    h, k = config['num_attention_heads'], config['num_key_value_heads']
    tensors = {}

    def matrix(name: str, *sizes: int) -> None:
        tensors[name] = to_bfloat16_grid((rng.standard_normal(sizes) * sizes[-1] ** -0.5).astype(np.float32))

    def norm(name: str, size: int) -> None:
        tensors[name] = (1 + 0.2 * rng.standard_normal(size)).astype(np.float32)

    matrix('model.embed_tokens.weight', v, d)
    norm('model.norm.weight', d)
    if not config['tie_word_embeddings']:
        matrix('lm_head.weight', v, d)
    for i in range(config['num_hidden_layers']):
        layer = f'model.layers.{i}'
        norm(f'{layer}.input_layernorm.weight', d)
        norm(f'{layer}.post_attention_layernorm.weight', d)
        for name, heads in (('q', h), ('k', k), ('v', k)):
            matrix(f'{layer}.self_attn.{name}_proj.weight', heads * a, d)
        matrix(f'{layer}.self_attn.o_proj.weight', d, h * a)
        if config['model_type'] == 'qwen3':
            norm(f'{layer}.self_attn.q_norm.weight', a)
            norm(f'{layer}.self_attn.k_norm.weight', a)
        matrix(f'{layer}.mlp.gate_proj.weight', f, d)
        matrix(f'{layer}.mlp.up_proj.weight', f, d)
        matrix(f'{layer}.mlp.down_proj.weight', d, f)
    return tensors


def tokens_BT() -> np.ndarray:
    """Ids [2, 24] that every case is run on."""
    return np.random.RandomState(5).randint(0, VOCAB, (2, 24))


def to_bfloat16_grid(array: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to the nearest ones that bfloat16 holds (ties to even)."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
