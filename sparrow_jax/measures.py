"""Numbers and answers of a step, from what the rollout, the verifiers and the learner returned. Pure functions; names
as in the metrics and samples files.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow_jax.learner.learner import Scores
from sparrow_jax.learner.rows import Rows
from sparrow_jax.parallel.transfer import read
from sparrow_jax.rollout.engine import Adapted, Response
from sparrow_jax.sparsity.controller import Control
from sparrow_jax.sparsity.cost import kv_read_fraction
from sparrow_jax.sparsity.mismatch import TailSummary, lower_quantile, summarize
from sparrow_jax.sparsity.schedules import Schedule
from sparrow_jax.tasks.problems import Problem
from sparrow_jax.tasks.verifiers import Score


def answer_rows(
    prompts: Sequence[str],
    problems: Sequence[Problem],
    completions: Sequence[str],
    scores: Sequence[Score],
    responses: Sequence[Response],
) -> list[dict[str, Any]]:
    """The rows of a samples file but for what says where they come from (step, sampler).

    One entry an answer in every argument, in the same order; prompts and completions as the sampler read and wrote
    them, special tokens included.
    """
    return [
        {
            'prompt': prompt,
            'completion': completion,
            'answer': problem.answer,
            'reward': score.reward,
            'finish_reason': response.finish_reason,
            'tokens': len(response.tokens),
        }
        for prompt, problem, completion, score, response in zip(
            prompts, problems, completions, scores, responses, strict=True
        )
    ]


def reward_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Mean, largest and smallest reward of a step's answers, the shares that are right and well formed, and how many
    got no verdict.
    """
    rewards = np.asarray([s.reward for s in scores])
    return {
        'critic/score/mean': float(rewards.mean()),
        'critic/score/max': float(rewards.max()),
        'critic/score/min': float(rewards.min()),
        'reward/correct': float(np.mean([s.correct for s in scores])),
        'reward/format_valid': float(np.mean([s.format_valid for s in scores])),
        'reward/timed_out': float(sum(s.timed_out for s in scores)),
    }


def length_metrics(prompt_tokens: Sequence[int], responses: Sequence[Response]) -> dict[str, float]:
    """Tokens of prompts (of each response) and responses; `clip_ratio` is the share cut off at its limit."""
    lengths = np.asarray([len(r.tokens) for r in responses])
    return {
        'prompt_length/mean': float(np.mean(prompt_tokens)),
        'response_length/mean': float(lengths.mean()),
        'response_length/max': float(lengths.max()),
        'response_length/min': float(lengths.min()),
        'response_length/clip_ratio': float(np.mean([r.finish_reason == 'length' for r in responses])),
    }


def read_metrics(
    schedule: Schedule, layers: int, prompt_tokens: Sequence[int], responses: Sequence[Response]
) -> dict[str, float]:
    """How much of the cache the sampler read. prompt_tokens: of each response. The first token is prefill's and left
    out.
    """
    lengths = [n + np.arange(1, len(r.tokens)) for n, r in zip(prompt_tokens, responses, strict=True)]
    read = np.concatenate([r.pages_read[1:] for r in responses])
    reserved = schedule.reserved_pages
    return {
        'sparse/kv_read_fraction': kv_read_fraction(schedule, layers, np.concatenate(lengths), read),
        'sparse/pages_read/mean': float(read.mean()) if read.size else float('nan'),
        'sparse/budget_pages/mean': float(np.maximum(read - reserved, 0).mean()) if read.size else float('nan'),
    }


def mismatch_metrics(
    scored: Sequence[tuple[Rows, Scores]], bin_width_tokens: int, min_count: int
) -> tuple[dict[str, float], TailSummary]:
    """Exact and top-20 alpha of the sampled tokens, all together and by cached length; the first token of each
    response is left out.
    """
    alpha, top20, lengths = [], [], []
    for rows, scores in scored:
        keep = (np.asarray(rows.mask_BT) > 0) & ~np.asarray(rows.first_BT)
        alpha.append(read(scores.alpha_BT)[keep])
        top20.append(read(scores.alpha_top20_BT)[keep])
        lengths.append(np.asarray(rows.position_BT)[keep] + 1)
    tail = summarize(np.concatenate(alpha), np.concatenate(lengths), bin_width_tokens, min_count)
    metrics = {
        'sparse/alpha_p05': tail.p05,
        'sparse/alpha_p01': tail.p01,
        'sparse/alpha_p05_top20': lower_quantile(np.concatenate(top20)),
        'sparse/alpha_mean': tail.mean,
        'sparse/bins_below_min_count': float(tail.bins_too_small),
    }
    for (low, high), value in tail.bins.items():
        metrics[f'sparse/alpha_p05/bin_{low}_{high}'] = value
    return metrics, tail


def adaptive_metrics(
    adapted: Adapted, control: Control, most_Z: np.ndarray, longest_tokens: int
) -> tuple[dict[str, float], list[tuple[int, int]]]:
    """What the controller did in a rollout, and the length bins that even the largest budget leaves below the target.

    Args:
        adapted: what the rollout left behind; control: what it holds on to; most_Z: largest budget of each bin, pages.
        longest_tokens: cached tokens of the longest sequence; bins that none has reached are left out.
    """
    metrics, full = {'sparse/budget_moves': float(adapted.moves)}, []
    for z in range(min(len(most_Z), longest_tokens // control.bin_width_tokens + 1)):
        low, high = z * control.bin_width_tokens, (z + 1) * control.bin_width_tokens
        metrics[f'sparse/budget_pages/bin_{low}_{high}'] = float(adapted.budget_Z[z])
        if adapted.p05_Z[z] >= 0:
            metrics[f'sparse/probe_p05/bin_{low}_{high}'] = float(adapted.p05_Z[z])
            if adapted.budget_Z[z] >= most_Z[z] and adapted.p05_Z[z] < control.target - control.tolerance:
                full.append((low, high))
    return metrics, full


def entropy_metric(scored: Sequence[tuple[Rows, Scores]]) -> dict[str, float]:
    """Mean entropy, in nats, of the dense policy over response tokens."""
    total = count = 0.0
    for rows, scores in scored:
        keep = np.asarray(rows.mask_BT) > 0
        total += float(np.asarray(read(scores.entropy_BT), np.float64)[keep].sum())
        count += float(keep.sum())
    return {'actor/entropy': total / max(count, 1.0)}


def pass_at_k(correct: int, samples: int, k: int) -> float:
    """Unbiased chance that at least one of k answers is correct, given `correct` of `samples` (arXiv 2107.03374, eq.
    1).

    1 - C(n - c, k) / C(n, k).
    """
    if samples - correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - correct + 1, samples + 1)))
