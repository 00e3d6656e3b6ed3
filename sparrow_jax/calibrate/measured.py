"""The points of a calibration: takes up what its folder has, and measures the rest."""

import dataclasses
import math
import statistics as middle
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx

from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.assembly import Parts
from sparrow_jax.calibrate.contexts import Contexts, make_requests, of_samples
from sparrow_jax.calibrate.passes import Passes
from sparrow_jax.calibrate.results import Point, Results
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.rollout.engine import Engine, Progress, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.sparsity.calibration import QUANTILES, Estimate, Tokens, bin_tails
from sparrow_jax.sparsity.cost import kv_read_fraction, pages_read
from sparrow_jax.sparsity.mismatch import lower_quantile
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule

RECENT = 3  # points, from whose time that of the others is taken


class Measured:
    """What is measured so far, and what measures the rest; the model is read when the first point needs it."""

    def __init__(self, parts: Parts, results: Results, console: Console):
        self.parts, self.run, self.results, self.console = parts, parts.run, results, console
        self.contexts: Contexts
        self.floor: Tokens | None = None  # of the dense sampler
        self._dense: list[np.ndarray] | None = None
        self._passes: Passes | None = None
        self._engines: dict[tuple[str, int], Engine] = {}
        self._weights: nnx.State | None = None
        self._seconds: list[float] = []

    # ------------------------------------------------------------------ contexts

    def prepare(self, given: Contexts | None, requests: list[Request]) -> None:
        """The sequences: texts as they are, or samples of the dense policy, a group of slots at a time."""
        if given is not None:
            self.contexts = given
            self.results.keep_contexts(0, given, None)
        else:
            slots, drawn, floors = self.run.rollout.slots, list[Contexts](), list[Tokens]()
            for number, start in enumerate(range(0, len(requests), slots)):
                contexts, floor = self.results.contexts(number) or self._draw_dense(number, requests, start)
                assert floor is not None
                floors.append(dataclasses.replace(floor, sequence=floor.sequence + sum(map(len, drawn))))
                drawn.append(contexts)
            self.contexts, self.floor = Contexts.joined(drawn), Tokens.joined(floors)
            self.console.message(f'{len(self.contexts)} sequences, {self.contexts.tokens:,} tokens to measure')
        self._free_sampler()
        if self.contexts.left_out:
            what = 'texts were too short or too long' if given is not None else 'answers ended with their first token'
            self.console.warn(f'{self.contexts.left_out} {what}, and are left out')
        if len(self.contexts) < 2:
            raise ConfigError(
                'calibrate.sequences: fewer than two of them have more than a token; set calibrate.forced_lengths=True '
                'or give other prompts'
            )

    def _draw_dense(self, number: int, requests: list[Request], start: int) -> tuple[Contexts, Tokens]:
        schedule = self.schedule(Point(self.run.schedule.policy, self.run.rollout.page_tokens, 0))
        group = requests[start : start + self.run.rollout.slots]
        contexts, hidden = self._draw(schedule, group, sparse=False, done=start, total=len(requests))
        if not len(contexts):
            raise ConfigError(
                'calibrate.forced_lengths=False: all answers of a group end with their first token; set it to True'
            )
        floor = self.passes.sampled(contexts, self._dense_of(contexts), hidden, self._shown('scoring'))
        self.results.keep_contexts(number, contexts, floor)
        return contexts, floor

    def _draw(
        self, schedule: Schedule, requests: list[Request], *, sparse: bool, done: int, total: int
    ) -> tuple[Contexts, list[np.ndarray]]:
        """Sequences and the hidden states of their sampler."""
        key = schedule.policy.value, schedule.page_tokens
        if key not in self._engines:
            self._free_sampler()  # there is room for one pool
            self.console.status('compiling', 'the sampler')
            self._engines[key] = self._engine(schedule)
        engine = self._engines[key]
        engine.schedule = schedule
        if self._weights is None:
            self._weights = engine.weights(self.passes.params)
        began = time.perf_counter()

        def show(progress: Progress) -> None:
            tokens, seconds = progress.tokens, time.perf_counter() - began
            longest = len(requests) * self.run.rollout.max_response_tokens
            left = seconds / max(tokens, 1) * (longest - tokens)
            detail = f'{tokens:,} tokens, {tokens / seconds:,.0f} tokens/s, at most {_clock(left)} left'
            self.console.status('sampling', detail, done=done + progress.finished, total=total, unit='sequences')

        responses = engine.generate(
            self._weights,
            requests,
            run_key=jax.random.key(self.run.seed),
            step=0,
            sampling=Sampling(self.run.rollout.temperature, sparse=sparse, keep_hidden=True),
            on_progress=show,
        )
        return of_samples(requests, responses)

    def _engine(self, schedule: Schedule) -> Engine:
        rollout = self.run.rollout
        pool = rollout.pool_pages * rollout.page_tokens // schedule.page_tokens
        rollout = dataclasses.replace(rollout, page_tokens=schedule.page_tokens)
        rollout = dataclasses.replace(rollout, pool_pages=max(pool, rollout.pages_per_sequence) if pool else 0)
        never = (self.parts.shape.vocab_size,)  # no token has that number
        return Engine(
            self.parts.sampler_graph,
            self.parts.shape,
            self.parts.mesh,
            rollout,
            schedule,
            never if self.run.calibrate.forced_lengths else self.parts.encoder.end_ids,
            self.run.model.compute_dtype,
            may_widen=True,  # budgets change from point to point
        )

    def _free_sampler(self) -> None:
        self._engines.clear()
        self._weights = None

    # ------------------------------------------------------------------ points

    def point(self, point: Point, number: int, total: int) -> None:
        """Measures a point, unless it is there, and shows its row."""
        self.console.begin_step(number)
        began = time.perf_counter()
        tokens = self.results.tokens(point.name)
        if tokens is None:
            tokens = self._measure(self.schedule(point))
            self.results.keep_tokens(point.name, tokens)
            self._seconds.append(time.perf_counter() - began)
        row = self._row(point, tokens) | {'seconds': time.perf_counter() - began}
        if self._seconds:
            row['left'] = middle.median(self._seconds[-RECENT:]) * (total - number)
        self.console.row(number, row)

    def schedule_tokens(self, name: str, schedule: Schedule) -> Tokens:
        """What a schedule as a whole gives."""
        tokens = self.results.tokens(name)
        if tokens is None:
            tokens = self._measure(schedule)
            self.results.keep_tokens(name, tokens)
        return tokens

    def schedule(self, point: Point, budget_Z: tuple[int, ...] = ()) -> Schedule:
        """The schedule of a point, or with other budgets; always with as many bins, so that budgets compile nothing."""
        run, r = self.run, self.run.rollout
        bins = (r.max_prompt_tokens + r.max_response_tokens) // run.mismatch.bin_width_tokens + 1
        budget = point.budget_tokens // point.page_tokens or EVERY_PAGE
        filled = (*budget_Z, *budget_Z[-1:] * (bins - len(budget_Z))) if budget_Z else (budget,) * bins
        return Schedule(
            kind='fixed',
            page_tokens=point.page_tokens,
            bin_width_tokens=run.mismatch.bin_width_tokens,
            reserved_first=run.schedule.reserved_first_pages,
            reserved_last=run.schedule.reserved_last_pages,
            dense_layers=tuple(run.schedule.dense_layers),
            budget_pages=filled,
            policy=SelectionPolicy(point.policy),
        )

    @property
    def passes(self) -> Passes:
        if self._passes is None:
            self.console.status('reading the model')
            self._passes = Passes(self.parts, self.parts.start_params())
        return self._passes

    def _measure(self, schedule: Schedule) -> Tokens:
        if self.run.calibrate.contexts == 'sparse_samples':
            parts, slots = [], self.run.rollout.slots
            requests = make_requests(self.run, self.parts.encoder)
            for start in range(0, len(requests), slots):
                group = requests[start : start + slots]
                contexts, hidden = self._draw(schedule, group, sparse=True, done=start, total=len(requests))
                if len(contexts):
                    tokens = self.passes.sampled(contexts, self._dense_of(contexts), hidden, self._shown('scoring'))
                    parts.append(dataclasses.replace(tokens, sequence=tokens.sequence + start))
            return Tokens.joined(parts)
        if self._dense is None:
            self._dense = self._dense_of(self.contexts)
        return self.passes.sparse(self.contexts, self._dense, schedule, self._shown('sparse pass'))

    def _dense_of(self, contexts: Contexts) -> list[np.ndarray]:
        return self.passes.dense(contexts, self._shown('dense pass'))

    def _shown(self, what: str) -> Callable[[int, int], None]:
        self.console.status(what)
        return lambda done, total: self.console.status(what, done=done, total=total, unit='sequences')

    def _row(self, point: Point, tokens: Tokens) -> dict[str, Any]:
        m, schedule = self.run.mismatch, self.schedule(point)
        tails = [tail for tail in bin_tails(tokens, m.bin_width_tokens, m.min_count) if tail is not None]
        worst = min(tails, key=lambda tail: tail.value, default=Estimate(math.nan, math.nan, math.nan))
        read = pages_read(schedule, tokens.length)
        return {
            'policy': point.policy,
            'page_tokens': point.page_tokens,
            'budget_tokens': point.budget_tokens or 'all',
            'p05': lower_quantile(tokens.alpha),
            'worst': worst.value,
            'worst_low': worst.low,
            'p01': lower_quantile(tokens.alpha, QUANTILES['p01']),
            'mean': float(tokens.alpha.mean()),
            'kv_read': kv_read_fraction(schedule, self.parts.shape.layers, tokens.length, read),
        }


def _clock(seconds: float) -> str:
    return f'{int(seconds) // 60}:{int(seconds) % 60:02}'
