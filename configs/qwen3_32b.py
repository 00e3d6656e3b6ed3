"""Math RL of Qwen3-32B with the Sparrow paper's settings.

    python -m sparrow_jax.train --config=configs/qwen3_32b.py --config.data.source=POLARIS.jsonl
    --workdir=runs/qwen3_32b

Needs 32 H200s (141 GB each, with XLA_CLIENT_MEM_FRACTION=0.9), the checkpoint's folder in weights/Qwen3-32B (or
--config.model.path=...) and a file of problems in the layout of Polaris-53K. A run that would not fit the memory at
hand says so before it reads weights. This size has not been trained to its end here. The paper did not train this
size, so there is no published schedule and no score to expect. The budget is fixed; watch `sparse/alpha_p05`, and give
a schedule of your own with `schedule.kind=file`. `qwen3_32b.py:smoke` runs two steps of the same settings with a tiny
random model, in seconds on a CPU.
"""

from ml_collections import ConfigDict

from configs import base, qwen3


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = qwen3.math_rl(
        '32B',
        d_model=5120,
        layers=64,
        query_heads=64,
        d_ff=25600,
        tie_embeddings=False,
        most_pages=1789,
        slots=64,
        rows=8,
    )
    c.schedule.start = 'fixed'
    # No schedule was published for this size. 893 pages, 14,288 tokens, is what the 14B table reads at its longest
    # lengths: a guess.
    c.schedule.budget_pages = 893
    c.schedule.model = ''
    c.parallel.tensor = 2
    c.parallel.data, c.parallel.fsdp = 1, -1  # weights and optimizer are split over all devices
    return base.finish(c, arg, 'qwen3_32b.py')
