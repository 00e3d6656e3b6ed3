"""The answers of a step, prompt by prompt: which of them are learned from, and what their length costs them.

Responses come from the sampler, scores from the verifiers; rewards and chosen groups go to the learner.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np

from sparrow_jax.config import RewardConfig
from sparrow_jax.rollout.engine import Response
from sparrow_jax.rollout.pool import Request
from sparrow_jax.tasks.problems import Problem
from sparrow_jax.tasks.verifiers import Score


@dataclasses.dataclass(frozen=True)
class Answers:
    """Answers in the order of their prompts, equally many of each prompt. One entry an answer in every list.

    Attributes:
        problems, requests, responses, completions, scores: of each answer.
        samples: answers a prompt.
    """

    problems: list[Problem]
    requests: list[Request]
    responses: list[Response]
    completions: list[str]
    scores: list[Score]
    samples: int

    def __add__(self, other: Self) -> Self:
        return self._map(lambda name: getattr(self, name) + getattr(other, name))

    def of_prompts(self, prompts: Sequence[int]) -> Self:
        """The answers of these prompts, by their number here."""
        places = [p * self.samples + i for p in prompts for i in range(self.samples)]
        return self._map(lambda name: [getattr(self, name)[place] for place in places])

    def scores_PR(self) -> np.ndarray:
        """The verifiers' rewards, float32 [prompts, samples]."""
        return np.asarray([s.reward for s in self.scores], np.float32).reshape(-1, self.samples)

    def penalties_PR(self, config: RewardConfig) -> np.ndarray:
        """What each response's length costs, see `overlong_penalty`; float32 [prompts, samples]."""
        tokens = np.asarray([len(r.tokens) for r in self.responses])
        limits = np.asarray([q.limit_tokens for q in self.requests])
        cost = overlong_penalty(tokens, limits, config.overlong_buffer_tokens)
        return (config.overlong_penalty * cost).astype(np.float32).reshape(-1, self.samples)

    def _map(self, entries) -> Self:
        names = ('problems', 'requests', 'responses', 'completions', 'scores')
        return dataclasses.replace(self, **{name: entries(name) for name in names})


def overlong_penalty(tokens: np.ndarray, limit_tokens: np.ndarray, buffer_tokens: int) -> np.ndarray:
    """0 up to limit - buffer tokens, then rising linearly to 1 at the limit (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        tokens: of each response, at most its limit. limit_tokens: likewise. buffer_tokens: 0 = no penalty.
    """
    if not buffer_tokens:
        return np.zeros(len(tokens))
    return np.clip((tokens - limit_tokens + buffer_tokens) / buffer_tokens, 0.0, 1.0)


def has_signal(score_PR: np.ndarray) -> np.ndarray:
    """Of each prompt, whether its samples' scores differ (dynamic sampling, DAPO, arXiv 2503.14476, eq. 11)."""
    return score_PR.max(axis=1) > score_PR.min(axis=1)


def choose_prompts(score_PR: np.ndarray, wanted: int) -> list[int]:
    """The first `wanted` prompts with signal, in order. Where they are fewer, the first ones without signal stay too:
    a step always learns from equally many.
    """
    signal = has_signal(score_PR)
    chosen = [*np.flatnonzero(signal), *np.flatnonzero(~signal)][:wanted]
    return sorted(int(p) for p in chosen)
