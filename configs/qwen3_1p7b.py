"""Math RL of Qwen3-1.7B with the Sparrow paper's settings.

    python -m sparrow_jax.train --config=configs/qwen3_1p7b.py --config.data.source=POLARIS.jsonl
    --workdir=runs/qwen3_1p7b

Needs one H200 (141 GB), the checkpoint's folder in weights/Qwen3-1.7B (or --config.model.path=...) and a file of
problems in the layout of Polaris-53K. A run that would not fit the memory at hand says so before it reads weights.
This size has not been trained to its end here. The paper's run with this schedule reached avg@16 of .542 (AIME24),
.415 (AIME25) and .465 (AIME26) after one epoch; a dense sampler .569, .432 and .483, with rollouts that took 2.21
times as long. `qwen3_1p7b.py:smoke` runs two steps of the same settings with a tiny random model, in seconds on a
CPU.
"""

from ml_collections import ConfigDict

from configs import base, qwen3


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = qwen3.math_rl(
        '1.7B',
        d_model=2048,
        layers=28,
        query_heads=16,
        d_ff=6144,
        tie_embeddings=True,
        most_pages=509,
        slots=32,
    )
    return base.finish(c, arg, 'qwen3_1p7b.py')
