"""Math RL of Qwen3-0.6B with the Sparrow paper's settings.

    python -m sparrow_jax.train --config=configs/qwen3_0p6b.py --config.data.source=POLARIS.jsonl
    --workdir=runs/qwen3_0p6b

Needs one H200 (141 GB), the checkpoint's folder in weights/Qwen3-0.6B (or --config.model.path=...) and a file of
problems in the layout of Polaris-53K. A run that would not fit the memory at hand says so before it reads weights.
This size has not been trained to its end here. The paper did not train this size, so there is no published schedule
and no score to expect. The budget is fixed; watch `sparse/alpha_p05`, and give a schedule of your own with
`schedule.kind=file`. `qwen3_0p6b.py:smoke` runs two steps of the same settings with a tiny random model, in seconds
on a CPU.
"""

from ml_collections import ConfigDict

from configs import base, qwen3


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` as `base.finish` takes it."""
    c = qwen3.math_rl(
        '0.6B',
        d_model=1024,
        layers=28,
        query_heads=16,
        d_ff=3072,
        tie_embeddings=True,
        most_pages=509,
        slots=32,
    )
    c.schedule.start = 'fixed'
    # No schedule was published for this size. 253 pages, 4,048 tokens, is what the 1.7B table reads at its longest
    # lengths: a guess.
    c.schedule.budget_pages = 253
    c.schedule.model = ''
    return base.finish(c, arg, 'qwen3_0p6b.py')
