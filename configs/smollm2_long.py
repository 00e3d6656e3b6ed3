"""The controller on a real model: 64 sequences of SmolLM2-135M, each 2,048 tokens long whatever it says.

    python -m sparrow_jax.closed_loop --config=configs/smollm2_long.py --out=closed_loop

Needs `make model`. After its short answer the model goes on with problems, code and tales of its own, so that the text
is as varied as it can write. `smollm2_long.py:smoke` is the same with a tiny random model, in seconds on a CPU.
"""

from ml_collections import ConfigDict

from configs import base, smollm2_135m


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = ConfigDict(smollm2_135m.get_config().to_dict())

    c.rollout.prompts_per_step = 32
    c.rollout.samples_per_prompt = 2
    c.rollout.slots = 64
    c.rollout.max_response_tokens = 2048
    c.rollout.page_tokens = 16
    c.rollout.segment_steps = 128  # so often budgets can move
    c.rollout.halvings = 4
    c.rollout.prefill_rows = 32

    c.schedule.budget_pages = 32  # what it starts with, at every length
    c.mismatch.bin_width_tokens = 512
    c.mismatch.min_count = 2000  # in the first bin lie 280 tokens of each sequence, 18,000 in all
    # Sequences differ: four tell p05 of all to 0.015, eight to 0.01.
    c.controller.probes = 8
    c.controller.min_count = 500  # a segment of the probes has twice as many
    c.controller.urgent_count = 250

    c.calibrate.forced_lengths = True
    c.learner.rows_per_microbatch = 8
    return base.finish(c, arg, 'smollm2_long.py', {'smoke': smoke})


def smoke(c: ConfigDict) -> None:
    """As everywhere, with the schedule that this configuration is for."""
    base.smoke(c)
    c.schedule.kind = 'adaptive'
