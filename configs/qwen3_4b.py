"""Math RL of Qwen3-4B with the Sparrow paper's settings.

    python -m sparrow_jax.train --config=configs/qwen3_4b.py --config.data.source=POLARIS.jsonl --workdir=runs/qwen3_4b

Needs 4 H200s (141 GB each), the checkpoint's folder in weights/Qwen3-4B (or --config.model.path=...) and a file of
problems in the layout of Polaris-53K. A run that would not fit the memory at hand says so before it reads weights.
This size has not been trained to its end here. The paper's run with this schedule reached avg@16 of .756 (AIME24),
.742 (AIME25) and .713 (AIME26) after one epoch; a dense sampler .775, .715 and .723, with rollouts that took 2.41
times as long. `qwen3_4b.py:smoke` runs two steps of the same settings with a tiny random model, in seconds on a CPU.
"""

from ml_collections import ConfigDict

from configs import base, qwen3


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = qwen3.math_rl(
        '4B',
        d_model=2560,
        layers=36,
        query_heads=32,
        d_ff=9728,
        tie_embeddings=True,
        slots=64,
        rows=4,
    )
    c.parallel.data, c.parallel.fsdp = 1, -1  # weights and optimizer are split over all devices
    return base.finish(c, arg, 'qwen3_4b.py')
