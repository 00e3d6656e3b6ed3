"""python -m sparrow_jax.generate --config=configs/X.py [--workdir=W] --prompt="..." [--sampler=dense]

Answers one prompt and streams the answer to the terminal; with --workdir by the policy of that run's newest checkpoint.
It samples as evaluations do (`evaluate.temperature`, greedy by default).
"""

import dataclasses
import sys
import time

import jax
import numpy as np
from absl import flags

from sparrow_jax import commands
from sparrow_jax.assembly import assemble, load_policy
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.measures import read_metrics
from sparrow_jax.rollout.engine import Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.tasks.problems import Problem
from sparrow_jax.tasks.prompts import PromptEncoder
from sparrow_jax.workdir import Workdir

STREAM_STEPS = 8  # decode steps between two looks at the new tokens


def generate(run: RunConfig, workdir: str, prompt: str, sampler: str) -> int:
    """Streams one answer to standard output, facts about it to standard error; returns the exit code."""
    if sampler not in ('sparse', 'dense'):
        raise ConfigError(f'--sampler={sampler}: must be sparse or dense')
    if not prompt.strip():
        raise ConfigError(f'--prompt={prompt}: is empty; give a question')
    one = dataclasses.replace(run.rollout, slots=1, prefill_rows=1, pool_pages=0, segment_steps=STREAM_STEPS)
    parallel = dataclasses.replace(run.parallel, data=1, fsdp=1, tensor=len(jax.devices()))
    if workdir:
        Workdir.existing(workdir)  # the start weights would answer in its place
    parts = assemble(dataclasses.replace(run, rollout=one, parallel=parallel), trains=False)
    ids = parts.encoder.encode(Problem(index=0, question=prompt, answer='', source='prompt', metadata={}))
    if len(ids) > one.max_prompt_tokens:
        raise ConfigError(f'--prompt: has {len(ids)} tokens, rollout.max_prompt_tokens={one.max_prompt_tokens}')
    policy = load_policy(parts, workdir)
    parts, step = policy.parts, policy.step
    engine = parts.engine()
    how = run.evaluate
    sampling = Sampling(how.temperature, how.top_p, sparse=sampler == 'sparse')
    weights = engine.weights(policy.params)
    engine.warm_up(weights, [sampling], adapter=policy.adapter)
    stream = _Stream(parts.encoder)
    began = time.perf_counter()
    [response] = engine.generate(
        weights,
        [Request(ids, 0, 0, one.max_response_tokens)],
        run_key=jax.random.key(run.seed),
        step=0,
        sampling=sampling,
        adapter=policy.adapter,
        on_tokens=lambda _, tokens: stream.write(tokens),
    )
    seconds = time.perf_counter() - began
    stream.end()
    tokens = len(response.tokens)
    facts = f'{tokens} tokens, {tokens / seconds:,.0f} tokens/s with {engine.kernels} kernels'
    facts += f', {sampler} sampler at temperature {sampling.temperature:g}, finish reason {response.finish_reason}'
    if sampling.sparse and tokens > 1:
        reads = read_metrics(parts.schedule, parts.shape.layers, [len(ids)], [response])
        facts += f', read {reads["sparse/kv_read_fraction"]:.0%} of the dense KV bytes'
    facts += f'; policy after step {step}' if step else f'; start weights ({run.model.path or "random"})'
    print(facts, file=sys.stderr)
    return 0


class _Stream:
    """Prints text as tokens arrive; holds back a character that is not complete yet."""

    def __init__(self, encoder: PromptEncoder):
        self._encoder, self._ids, self._shown = encoder, list[int](), 0

    def write(self, tokens: np.ndarray) -> None:
        self._ids += [int(t) for t in tokens]
        text = self._encoder.decode(self._ids).rstrip('\N{REPLACEMENT CHARACTER}')
        print(text[self._shown :], end='', flush=True)
        self._shown = max(self._shown, len(text))

    def end(self) -> None:
        print(self._encoder.decode(self._ids)[self._shown :], flush=True)


def _flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string('prompt', None, 'the question to answer', flag_values=values)
    flags.DEFINE_string('sampler', 'sparse', 'sparse (the schedule of the config) or dense', flag_values=values)


if __name__ == '__main__':
    commands.run(generate, workdir_required=False, define_flags=_flags)
