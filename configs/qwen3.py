"""What the Qwen3 configurations (qwen3_0p6b.py to qwen3_32b.py) share: the shape common to all and math RL as the
Sparrow paper sets it.

Not a configuration itself. The paper gives learning rate, clipping, samples a prompt, lengths, temperature, evaluation
and schedules; the batch of 64 prompts and the warm-up are our choice.
"""

from ml_collections import ConfigDict

from configs import base


def math_rl(
    size: str,
    *,
    d_model: int,
    layers: int,
    query_heads: int,
    d_ff: int,
    tie_embeddings: bool,
    slots: int,
    rows: int = 1,
    most_pages: int = 1021,
) -> ConfigDict:
    """Math RL of one Qwen3 model on Polaris-53K; unlocked.

    Args:
        size: as in the checkpoint's name, '1.7B'; also names the published schedule.
        d_model, layers, query_heads, d_ff, tie_embeddings: of the shape; 8 KV heads of 128 and a vocabulary of 151,936
        are common to all.
        slots: sequences that decode together, over all devices.
        rows: of one learner pass, over all devices; each is one sequence of up to 39,936 tokens.
        most_pages: of a budget, some twice the largest of the table; kernels are laid out for these and the 3 reserved
        ones, in blocks of 512.
    """
    c = base.get_config()
    c.steps = 400

    c.model.path = f'weights/Qwen3-{size}'
    shape = c.model.shape
    shape.family = 'qwen3'
    shape.vocab_size = 151_936
    shape.d_model, shape.layers, shape.d_ff = d_model, layers, d_ff
    shape.query_heads, shape.kv_heads, shape.head_dim = query_heads, 8, 128
    shape.rope_theta, shape.norm_eps = 1e6, 1e-6
    shape.tie_embeddings = tie_embeddings
    shape.max_positions = 40_960

    c.data.source = 'data/polaris-53k.jsonl'
    c.data.layout = 'polaris'
    c.data.train_examples = 0
    c.data.eval_examples = 30
    c.data.instruction = 'Please reason step by step, and put your final answer within \\boxed{}.'

    c.rollout.prompts_per_step = 64
    c.rollout.samples_per_prompt = 8
    c.rollout.slots = slots
    c.rollout.max_prompt_tokens = 2048
    c.rollout.max_response_tokens = 37_888  # 37K; with the prompt 1,024 below what the model knows
    c.rollout.page_tokens = 16
    c.rollout.pool_pages = 0  # what the other parts leave of the memory
    c.rollout.temperature = 1.0

    c.schedule.start = 'published'
    c.schedule.model = f'qwen3-{size.lower()}'
    c.schedule.target_p05 = c.controller.target_p05 = 0.86
    c.controller.most_pages = most_pages

    c.learner.advantage = 'grpo'
    c.learner.rows_per_microbatch = rows
    c.learner.clip_low, c.learner.clip_high = 0.2, 0.28
    c.learner.correction, c.learner.correction_high = 'tis', 3.0
    c.learner.kl_coef = 0.0
    c.optimizer.learning_rate = 1e-6

    c.evaluate.every_steps = 50
    c.evaluate.samples = 16
    c.evaluate.temperature = 1.0
    c.evaluate.top_p = 0.7
    return c
