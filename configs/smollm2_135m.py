"""RL of SmolLM2-135M-Instruct, a real pretrained chat model, on sums of two to four one-digit numbers.

    make model
    python -m sparrow_jax.train --config=configs/smollm2_135m.py --workdir=runs/smollm2_135m

Needs `make model` (93 MB, once) and 8 GB of GPU memory; 16 GB on a CPU, where a step takes many minutes.
Where it starts, on 32 such problems: greedy answers are right on 8 (7 of 9 with two numbers, 1 of 9 with three,
0 of 14 with four) and 22 tokens long; sampled at temperature 1 they are right on 2, and 22 of 32 stand in a box.
Most wrong answers stop after the first two numbers, so accuracy should grow with response length.
`smollm2_135m.py:smoke` runs two steps of the same settings with a tiny random model, in seconds on a CPU.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = base.get_config()
    c.steps = 60

    c.model.path = 'weights/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf'
    shape = c.model.shape
    shape.family = 'llama'
    shape.vocab_size = 49_152
    shape.d_model, shape.layers, shape.d_ff = 576, 30, 1536
    shape.query_heads, shape.kv_heads, shape.head_dim = 9, 3, 64
    shape.rope_theta, shape.norm_eps = 1e5, 1e-5
    shape.max_positions = 8192

    # The file's own template with two solved sums before the problem. Without them no answer in 24 stood in a box.
    c.tokenizer.chat_template = 'configs/smollm2_few_shot.jinja'

    c.data.source = 'reasoning_gym:chain_sum'
    c.data.eval_examples = 512
    c.data.options = '{"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 1}'

    c.rollout.prompts_per_step = 32
    c.rollout.samples_per_prompt = 8
    c.rollout.slots = 256
    c.rollout.max_prompt_tokens = 320
    c.rollout.max_response_tokens = 256
    c.rollout.page_tokens = 8  # a prompt and its answer fill some 33 pages
    c.rollout.segment_steps = 32  # answers have 22 tokens at first
    c.rollout.halvings = 0  # they end together

    c.schedule.budget_pages = 16  # with the reserved ones 19; from there it follows what it measures
    c.mismatch.bin_width_tokens = 128

    c.learner.rows_per_microbatch = 32
    c.optimizer.learning_rate = 1e-5
    c.evaluate.every_steps = 10
    c.checkpoint.every_steps = 10
    return base.finish(c, arg, 'smollm2_135m.py')
