"""Accuracy on held-out problems: sampling, verifying and counting, for training's checks and for the evaluate
command.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
from flax import nnx

from sparrow_jax.assembly import Parts
from sparrow_jax.config import ConfigError
from sparrow_jax.measures import length_metrics, pass_at_k, read_metrics
from sparrow_jax.rollout.engine import Engine, Progress, Response, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.tasks.problems import Problem
from sparrow_jax.tasks.prompts import fitting_prompts
from sparrow_jax.tasks.verifiers import Score, Verifier


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Answers to held-out problems: responses and scores are ordered problem by problem, `samples` each."""

    problems: list[Problem]
    samples: int
    prompt_tokens: list[int]
    responses: list[Response]
    completions: list[str]
    scores: list[Score]
    skipped_overlong: int

    def metrics(self, parts: Parts, prefix: str, sparse: bool) -> dict[str, float]:
        """Means with their standard error over problems (samples of one problem hang together)."""
        correct = np.asarray([s.correct for s in self.scores]).reshape(-1, self.samples)
        by_problem = correct.mean(axis=1)
        lengths = length_metrics(self.prompt_tokens, self.responses)
        metrics = {
            f'{prefix}/accuracy': float(by_problem.mean()),
            f'{prefix}/accuracy_stderr': float(by_problem.std(ddof=1) / len(by_problem) ** 0.5)
            if len(by_problem) > 1
            else 0.0,
            f'{prefix}/format_valid': float(np.mean([s.format_valid for s in self.scores])),
            f'{prefix}/response_length/mean': lengths['response_length/mean'],
            f'{prefix}/response_length/clip_ratio': lengths['response_length/clip_ratio'],
            f'{prefix}/problems': float(len(self.problems)),
            f'{prefix}/skipped_overlong': float(self.skipped_overlong),
            f'{prefix}/timed_out': float(sum(s.timed_out for s in self.scores)),
        }
        k = 1
        while k <= self.samples and self.samples > 1:
            metrics[f'{prefix}/pass@{k}'] = float(np.mean([pass_at_k(int(c.sum()), self.samples, k) for c in correct]))
            k *= 2
        if sparse:
            reads = read_metrics(parts.schedule, parts.shape.layers, self.prompt_tokens, self.responses)
            metrics[f'{prefix}/kv_read_fraction'] = reads['sparse/kv_read_fraction']
        return metrics


def held_out_prompts(parts: Parts, problems: Iterable[Problem]) -> list[tuple[Problem, list[int]]]:
    """The problems whose prompts are not too long, with their prompts.

    Raises:
        ConfigError: there are none.
    """
    longest = parts.run.rollout.max_prompt_tokens
    fitting = list(fitting_prompts(problems, parts.encoder, longest))
    if not fitting and parts.run.data.eval_examples == 0:
        raise ConfigError('data.eval_examples=0: there is no held-out problem (evaluate.every_steps=-1 needs none)')
    if not fitting:
        raise ConfigError(f'rollout.max_prompt_tokens={longest}: no held-out problem has so short a prompt')
    return fitting


def evaluate(
    parts: Parts,
    engine: Engine,
    weights: nnx.State,
    verifier: Verifier,
    problems: Sequence[Problem],
    *,
    sampling: Sampling,
    samples: int,
    on_progress: Callable[[Progress], None] | None = None,
) -> Evaluation:
    """Samples `samples` answers to every problem and scores them. Overlong prompts are counted and skipped.

    The random keys come from the run's seed alone, so two policies meet the same draws.

    Raises:
        ConfigError: as `held_out_prompts`.
    """
    fitting = held_out_prompts(parts, problems)
    kept = [problem for problem, _ in fitting]
    requests = [
        Request(ids, i, sample, parts.run.rollout.max_response_tokens)
        for i, (_, ids) in enumerate(fitting)
        for sample in range(samples)
    ]
    key = jax.random.fold_in(jax.random.key(parts.run.seed), EVALUATION_STREAM)
    responses = engine.generate(weights, requests, run_key=key, step=0, sampling=sampling, on_progress=on_progress)
    completions = [parts.encoder.decode(response.tokens) for response in responses]
    repeated = [problem for problem in kept for _ in range(samples)]
    scores = verifier.score(repeated, completions)
    return Evaluation(
        problems=kept,
        samples=samples,
        prompt_tokens=[len(r.prompt_ids) for r in requests],
        responses=responses,
        completions=completions,
        scores=scores,
        skipped_overlong=len(problems) - len(kept),
    )


EVALUATION_STREAM = 1_000_003  # keeps evaluation's random keys apart from training's
