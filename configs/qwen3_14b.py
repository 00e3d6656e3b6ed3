"""Math RL of Qwen3-14B with the Sparrow paper's settings.

    python -m sparrow_jax.train --config=configs/qwen3_14b.py --config.data.source=POLARIS.jsonl
    --workdir=runs/qwen3_14b

Needs 16 H200s (141 GB each), the checkpoint's folder in weights/Qwen3-14B (or --config.model.path=...) and a file of
problems in the layout of Polaris-53K. A run that would not fit the memory at hand says so before it reads weights.
This size has not been trained to its end here. The paper's run with this schedule reached avg@16 of .803 (AIME24),
.750 (AIME25) and .771 (AIME26) after one epoch; a dense sampler .813, .750 and .777, with rollouts that took 1.49
times as long. `qwen3_14b.py:smoke` runs two steps of the same settings with a tiny random model, in seconds on a CPU.
"""

from ml_collections import ConfigDict

from configs import base, qwen3


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = qwen3.math_rl(
        '14B',
        d_model=5120,
        layers=40,
        query_heads=40,
        d_ff=17408,
        tie_embeddings=False,
        most_pages=1789,
        slots=64,
        rows=8,
    )
    c.parallel.data, c.parallel.fsdp = 1, -1  # weights and optimizer are split over all devices
    return base.finish(c, arg, 'qwen3_14b.py')
