"""A model of 0.8M parameters that learns to count bits: reinforcement learning in minutes on 2 CPU cores.

    python -m sparrow_jax.train --config=configs/tiny.py --workdir=runs/demo

The start checkpoint in configs/tiny_start imitates a mixture of hasty and careful working (`sparrow_jax.tasks.worked`);
greedy decoding follows the hasty majority, which guesses the last ten bits and is right on one problem in four.
Training finds that halving to the end pays, so accuracy and response length grow together (about 170 to 214 tokens).
`tiny.py:scratch` remakes the start checkpoint from random weights; `tiny.py:smoke` runs every part once, in seconds.
"""

from ml_collections import ConfigDict

from configs import base

START = 'configs/tiny_start'


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it, with 'scratch' (supervised start) beside 'smoke'."""
    c = base.get_config()
    c.steps = 24

    c.model.path = START
    c.model.compute_dtype = 'float32'  # CPUs have no fast bfloat16
    c.model.remat = False
    shape = c.model.shape
    shape.vocab_size = 512
    shape.d_model = 128
    shape.layers = 5
    shape.query_heads = 4
    shape.kv_heads = 2
    shape.head_dim = 32
    shape.d_ff = 256
    shape.rope_theta = 1e4
    shape.max_positions = 1024

    c.tokenizer.path = START

    c.data.source = 'reasoning_gym:count_bits'
    c.data.options = '{"min_n": 10000000, "max_n": 99999999}'  # 8 digits, so 24 to 27 halvings
    c.data.train_examples = 20_000

    c.rollout.prompts_per_step = 8
    c.rollout.samples_per_prompt = 8
    c.rollout.slots = 64
    c.rollout.max_prompt_tokens = 48  # 38 are used
    c.rollout.max_response_tokens = 256  # careful solutions have 235 at most
    c.rollout.page_tokens = 8
    c.rollout.segment_steps = 32
    c.rollout.halvings = 0  # responses end together, and each further width compiles for seconds

    # p05 is 1 at any budget, so that budgets fall to their least: with the reserved pages 7 of up to 35, 0.57 of what a
    # dense rollout reads, less as answers grow. What fewer would cost shows in alpha_p01 and in rewards, not in p05.
    c.schedule.budget_pages = 6
    c.controller.least_pages = 3
    c.controller.min_count, c.controller.urgent_count = 200, 50  # of 800 tokens that four probes give in a step
    c.schedule.reserved_last_pages = 3  # 17 tokens at least: the line above the current one is always read
    c.schedule.dense_layers = (0,)

    c.mismatch.bin_width_tokens = 64
    c.mismatch.floor_sequences = 4

    c.learner.packing = 'on'
    c.learner.rows_per_microbatch = 8
    c.learner.row_tokens = 512  # two sequences
    c.learner.head_chunk_tokens = 512

    c.optimizer.learning_rate = 1e-4
    c.optimizer.warmup_steps = 4
    c.optimizer.decay_steps = 20

    c.critic.learning_rate = 1e-3  # small models take large steps
    c.distill.rank = 8

    c.evaluate.every_steps = 12
    c.checkpoint.every_steps = 8

    return base.finish(c, arg, 'tiny.py', {'scratch': scratch, 'smoke': smoke})


def scratch(c: ConfigDict) -> None:
    """Supervised training from random weights, in place."""
    c.phase = 'supervised'
    c.steps = 1000
    c.model.path = ''
    c.model.random_weights = True
    c.data.train_examples = 100_000
    c.rollout.prompts_per_step = 32  # worked solutions of a step
    c.rollout.samples_per_prompt = 1
    c.optimizer.learning_rate = 2e-3
    c.optimizer.warmup_steps = 100
    c.optimizer.decay_steps = c.steps - c.optimizer.warmup_steps
    c.evaluate.every_steps = 250
    c.checkpoint.every_steps = 500


def smoke(c: ConfigDict) -> None:
    """Two steps of a smaller random model, in place."""
    shape = c.model.shape
    c.steps = 2
    c.model.path = ''
    c.model.random_weights = True
    shape.d_model, shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim, shape.d_ff = 32, 2, 4, 2, 8, 64
    c.data.train_examples = 64
    c.data.eval_examples = 4
    c.rollout.prompts_per_step = 2
    c.rollout.samples_per_prompt = 2
    c.rollout.slots = 4
    c.rollout.max_response_tokens = 64
    c.rollout.segment_steps = 16
    c.schedule.budget_pages, c.controller.least_pages = 2, 1
    c.controller.probes, c.controller.min_count, c.controller.urgent_count = 1, 40, 10
    c.mismatch.min_count = 1
    c.mismatch.floor_every_steps = 1
    c.mismatch.floor_sequences = 2
    c.calibrate.sequences, c.calibrate.forced_lengths = 4, True
    c.learner.rows_per_microbatch = 2
    c.learner.row_tokens = 0
    c.distill.rank = 4
    c.checkpoint.every_steps = 1
