"""The stability experiment: how much of the cache must a sampler read for training to go as it does densely?

    python -m sparrow_jax.train --config=configs/stability.py:start --workdir=runs/stability/start
    python -m sparrow_jax.export --workdir=runs/stability/start --out=weights/stability_start --shard_mib=16
    python -m sparrow_jax.train --config=configs/stability.py:ARM --config.seed=S --workdir=runs/stability/ARM_S

ARM is `dense`, `fixed,PAGES` (or `fixed,aggressive`, `fixed,middle`, `fixed,lenient`) or `adaptive,TARGET`. Beside it
may stand `distill` (an adapter in the sampler), `small` (a model for CPUs), `smoke` (every part once, in seconds) and
an algorithm. docs/stability.md has all commands, what is to be expected and how runs are compared.

A model of 19M parameters, trained from nothing, follows 32 trails through a table of 192 numbers (`sparrow_jax.tasks.
trails`): 1.8K tokens of prompt, working of 1.3K tokens in which nearly every number is a look-up far back. The start
imitates a mixture of which most guess (270 tokens, right on one problem in three) and some work (always right). Where
the sampler can read, training finds that working pays; where it cannot, a trail that loses its way ends in the right
place less often than a guess.

On one H200 the start takes 7 minutes, an arm less than 4: one to compile, 48 steps of 1.5 to 2.9 s beside another arm
on the same GPU.
"""

import json

from ml_collections import ConfigDict

from configs import base

# Pages beside the 3 reserved ones, of up to 200. Measured on what the start writes: 20 suffice for guesses (p05 0.78)
# and fail at work (0.00), 40 fail beyond 2,048 tokens, 80 hold 0.99 or more everywhere.
BUDGETS = {'aggressive': 20, 'middle': 40, 'lenient': 80}
# A quarter of the worked solutions, a twentieth of their tokens: looking up is learned sooner in short tables.
EASY = {'width': 2, 'min_steps': 1, 'max_steps': 3, 'starts': 6}
FEW = {'digits': 2, 'width': 1, 'min_steps': 1, 'max_steps': 2, 'starts': 2}


def get_config(arg: str = '') -> ConfigDict:
    """The configuration; `arg` is an arm, 'start', or '' (dense), with what `base.finish` takes beside it.

    Raises:
        ValueError: an arm without its number, a number that cannot be, or an unknown word.
    """
    c = base.get_config()
    c.steps = 48

    c.model.path = 'weights/stability_start'
    c.model.remat = False
    shape = c.model.shape
    shape.vocab_size = 512
    shape.d_model, shape.layers, shape.d_ff = 512, 6, 1536
    shape.query_heads, shape.kv_heads, shape.head_dim = 8, 4, 64
    shape.rope_theta = 1e5
    shape.max_positions = 4096

    c.tokenizer.path = 'configs/tiny_start'

    c.data.source = 'reasoning_gym:trails'
    c.data.options = json.dumps({'width': 6, 'min_steps': 3, 'max_steps': 8, 'starts': 32})
    c.data.train_examples = 4000  # 48 steps use 768
    c.data.eval_examples = 128
    c.reward.correct_threshold = 0.6  # of the trails: one misreading does not decide, as it would not in prose

    c.rollout.prompts_per_step = 16
    c.rollout.samples_per_prompt = 8
    c.rollout.slots = 128
    c.rollout.max_prompt_tokens = 1856  # 1,790 are used
    c.rollout.max_response_tokens = 1792  # the longest working has 1,680
    c.rollout.prefill_rows = 16

    c.schedule.kind = 'dense'
    c.schedule.dense_layers = (0,)
    c.mismatch.bin_width_tokens = 512
    c.mismatch.floor_every_steps = 24
    c.controller.probes = 8
    c.controller.min_count = 1000  # a bin sees 4,000 tokens of the probes in a step
    c.controller.urgent_count = 300

    c.learner.rows_per_microbatch = 16
    c.learner.head_chunk_tokens = 8192  # the vocabulary is small
    c.optimizer.learning_rate = 5e-5
    c.optimizer.warmup_steps = 4

    c.evaluate.every_steps = 12
    c.checkpoint.every_steps = 6  # half a minute

    rest = _arm(c, [word for word in arg.split(',') if word])
    rest.sort(key=lambda word: word != 'small')  # 'start' builds on it
    return base.finish(c, ','.join(rest), 'stability.py', FORMS)


def _arm(c: ConfigDict, words: list[str]) -> list[str]:
    """Sets the schedule that `words` name, in place; the words that are left."""
    kinds = [word for word in words if word in ('dense', 'fixed', 'adaptive')]
    if not kinds:
        return words
    if len(kinds) > 1:
        raise ValueError(f'stability.py:{",".join(words)}: names {len(kinds)} arms; give one')
    kind, at = kinds[0], words.index(kinds[0])
    c.schedule.kind = kind
    if kind == 'dense':
        return words[:at] + words[at + 1 :]
    value = words[at + 1] if at + 1 < len(words) else ''
    if kind == 'fixed':
        pages = str(BUDGETS.get(value, value))
        if not pages.isdecimal() or not int(pages):
            raise ValueError(f'stability.py:fixed,{value}: give its pages, a whole number or {", ".join(BUDGETS)}')
        c.schedule.budget_pages = int(pages)
    else:
        try:
            target = float(value)
        except ValueError:
            target = 0.0
        if not 0 < target < 1:
            raise ValueError(f'stability.py:adaptive,{value}: give the p05 that it holds, between 0 and 1')
        c.schedule.budget_pages = BUDGETS['lenient']  # of its start
        c.controller.target_p05 = target
    return words[:at] + words[at + 2 :]


def start(c: ConfigDict) -> None:
    """Supervised training from random weights, in place: dense, whatever the arm."""
    c.phase = 'supervised'
    c.steps = 1500
    c.model.path = ''
    c.model.random_weights = True
    options = json.loads(c.data.options)
    parts = [EASY, *[options] * 3] if options['width'] > EASY['width'] else [options]
    c.data.options = json.dumps({'mixture': parts, 'eval': options})
    c.data.train_examples = 20_000
    c.rollout.prompts_per_step = 32  # worked solutions of a step
    c.rollout.samples_per_prompt = 1
    c.schedule.kind = 'dense'
    c.learner.rows_per_microbatch *= 2
    c.optimizer.learning_rate = 1e-3
    c.optimizer.warmup_steps = 100
    c.optimizer.decay_steps = c.steps - c.optimizer.warmup_steps
    c.evaluate.every_steps = 500
    c.checkpoint.every_steps = 100


def small(c: ConfigDict) -> None:
    """Two trails through 8 numbers for a model of 0.15M parameters, in place."""
    c.model.path = '' if c.phase == 'supervised' else 'weights/stability_small_start'
    c.model.compute_dtype = 'float32'  # CPUs have no fast bfloat16
    shape = c.model.shape
    shape.d_model, shape.layers, shape.d_ff = 64, 3, 128
    shape.query_heads, shape.kv_heads, shape.head_dim = 4, 4, 16
    shape.max_positions = 512
    c.data.options = json.dumps(FEW)
    c.data.eval_examples = 64
    c.rollout.prompts_per_step = 8
    c.rollout.slots = 64
    c.rollout.max_prompt_tokens = 192
    c.rollout.max_response_tokens = 128
    c.rollout.page_tokens = 8
    c.rollout.segment_steps = 16
    c.schedule.budget_pages = max(1, c.schedule.budget_pages // 10)
    c.mismatch.bin_width_tokens = 64
    c.learner.rows_per_microbatch = 8
    c.learner.row_tokens = 768  # three sequences
    c.learner.head_chunk_tokens = 512


def smoke(c: ConfigDict) -> None:
    """Two steps of a small random model on short tables, in place; the arm stays what it is."""
    phase, kind, pages = c.phase, c.schedule.kind, c.schedule.budget_pages
    small(c)
    base.smoke(c)
    c.phase, c.schedule.kind = phase, kind
    c.schedule.budget_pages = max(1, pages // 20)
    c.model.shape.max_positions = 512
    c.data.source = 'reasoning_gym:trails'
    c.data.options = json.dumps(FEW)
    c.rollout.max_prompt_tokens, c.rollout.max_response_tokens = 192, 128
    if phase == 'supervised':
        c.rollout.samples_per_prompt = 1


def distill(c: ConfigDict) -> None:
    """With an adapter that learns in the sampler, in place; for arms that are not dense."""
    c.distill.enabled = True


FORMS = {'start': start, 'small': small, 'distill': distill, 'smoke': smoke}
