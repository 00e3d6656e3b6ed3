"""Accuracy on held-out problems: sampling, verifying and counting, for training's checks and for the evaluate
command.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from sparrow_jax.assembly import Parts
from sparrow_jax.config import ConfigError
from sparrow_jax.measures import answer_rows, length_metrics, pass_at_k, read_metrics
from sparrow_jax.models.adapter import SamplerAdapter
from sparrow_jax.rollout.engine import Engine, Progress, Response, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.tasks.problems import Problem, ProblemSet
from sparrow_jax.tasks.prompts import fitting_prompts
from sparrow_jax.tasks.verifiers import Score, Verifier

EVALUATION_STREAM = 1_000_003  # keeps evaluation's random keys apart from training's


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out problems whose prompts are not too long, with these prompts, and how many others were left out."""

    problems: list[Problem]
    prompt_ids: list[list[int]]
    skipped_overlong: int


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Answers to held-out problems, ordered problem by problem, `held_out.problems[i // samples]` being that of the
    i-th.
    """

    held_out: HeldOut
    samples: int
    responses: list[Response]
    completions: list[str]
    scores: list[Score]

    def metrics(self, parts: Parts, prefix: str, sparse: bool) -> dict[str, float]:
        """Means with their standard error over problems (samples of one problem hang together)."""
        correct = np.asarray([s.correct for s in self.scores]).reshape(-1, self.samples)
        by_problem = correct.mean(axis=1)
        prompt_tokens = [len(ids) for ids in self.held_out.prompt_ids for _ in range(self.samples)]
        lengths = length_metrics(prompt_tokens, self.responses)
        metrics = {
            f'{prefix}/accuracy': float(by_problem.mean()),
            f'{prefix}/accuracy_stderr': float(by_problem.std(ddof=1) / len(by_problem) ** 0.5)
            if len(by_problem) > 1
            else 0.0,
            f'{prefix}/format_valid': float(np.mean([s.format_valid for s in self.scores])),
            f'{prefix}/response_length/mean': lengths['response_length/mean'],
            f'{prefix}/response_length/clip_ratio': lengths['response_length/clip_ratio'],
            f'{prefix}/problems': float(len(self.held_out.problems)),
            f'{prefix}/skipped_overlong': float(self.held_out.skipped_overlong),
            f'{prefix}/timed_out': float(sum(s.timed_out for s in self.scores)),
        }
        k = 1
        while k <= self.samples and self.samples > 1:
            metrics[f'{prefix}/pass@{k}'] = float(np.mean([pass_at_k(int(c.sum()), self.samples, k) for c in correct]))
            k *= 2
        if sparse:
            reads = read_metrics(parts.schedule, parts.shape.layers, prompt_tokens, self.responses)
            metrics[f'{prefix}/kv_read_fraction'] = reads['sparse/kv_read_fraction']
        return metrics

    def rows(self, parts: Parts) -> list[dict[str, Any]]:
        """The answers as rows of a samples file."""
        held_out, each = self.held_out, range(self.samples)
        prompts = [parts.encoder.decode(ids) for ids in held_out.prompt_ids]
        return answer_rows(
            [prompt for prompt in prompts for _ in each],
            [problem for problem in held_out.problems for _ in each],
            self.completions,
            self.scores,
            self.responses,
        )


def encode_held_out(parts: Parts, problems: ProblemSet) -> HeldOut:
    """The held-out problems that can be asked, encoded.

    Raises:
        ConfigError: there are none.
    """
    longest = parts.run.rollout.max_prompt_tokens
    fitting = list(fitting_prompts(problems, parts.encoder, longest))
    if not fitting and parts.run.data.eval_examples == 0:
        raise ConfigError('data.eval_examples=0: there is no held-out problem (evaluate.every_steps=-1 needs none)')
    if not fitting:
        raise ConfigError(f'rollout.max_prompt_tokens={longest}: no held-out problem has so short a prompt')
    kept, prompt_ids = map(list, zip(*fitting, strict=True))
    return HeldOut(kept, prompt_ids, len(problems) - len(kept))


def evaluate(
    parts: Parts,
    engine: Engine,
    weights: nnx.State,
    verifier: Verifier,
    held_out: HeldOut,
    *,
    sampling: Sampling,
    samples: int,
    adapter: SamplerAdapter | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Evaluation:
    """Samples `samples` answers to every problem and scores them.

    The random keys come from the run's seed alone, so two policies meet the same draws.
    """
    requests = [
        Request(ids, i, sample, parts.run.rollout.max_response_tokens)
        for i, ids in enumerate(held_out.prompt_ids)
        for sample in range(samples)
    ]
    key = jax.random.fold_in(jax.random.key(parts.run.seed), EVALUATION_STREAM)
    how: dict[str, Any] = {'run_key': key, 'step': 0, 'sampling': sampling, 'adapter': adapter}
    responses = engine.generate(weights, requests, **how, on_progress=on_progress)
    completions = [parts.encoder.decode(response.tokens) for response in responses]
    scores = verifier.score([problem for problem in held_out.problems for _ in range(samples)], completions)
    return Evaluation(held_out, samples, responses, completions, scores)
