"""One step of `closed_loop`: sequences of forced length are sampled, then the dense policy scores all their tokens."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sparrow_jax.assembly import assemble
from sparrow_jax.config import RunConfig
from sparrow_jax.learner.learner import Learner
from sparrow_jax.learner.rows import Sample, micro_batches
from sparrow_jax.measures import mismatch_metrics, read_metrics
from sparrow_jax.rollout.engine import Engine, Progress, Response, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.controller import Control, Controller
from sparrow_jax.sparsity.cost import kv_read_fraction, pages_read
from sparrow_jax.sparsity.schedules import Schedule
from sparrow_jax.tasks.problems import load_problems
from sparrow_jax.tasks.prompts import take_prompts


class Steps:
    """Model, sampler and learner of a configuration, weights read.

    Budgets, prompts and lengths are values: a policy or a target compiles once, a step never.

    Attributes:
        parts: of the run; their schedule has the policy in use.
        engine: the sampler of that policy.
        on_status: called with what is being done, as `Console.status` takes it.
    """

    def __init__(self, run: RunConfig):
        self.run, self.parts = run, assemble(run, trains=False)
        self.problems = load_problems(run.data, 'train')
        self.params = self.parts.start_params()
        self.learner = Learner(
            self.parts.learner_graph, self.parts.abstract_params(), self.parts.mesh, run, self.parts.shape.d_model
        )
        self.sampling = Sampling(run.rollout.temperature, keep_hidden=True)
        self.on_status: Callable[..., None] = lambda *_, **__: None
        self.engine = self._engine()
        self._warm: set[tuple[str, float]] = set()  # policies and targets

    @property
    def schedule(self) -> Schedule:
        return self.parts.schedule

    @property
    def control(self) -> Control:
        assert self.engine.probing is not None
        return self.engine.probing.control

    def facts(self) -> dict[str, Any]:
        """What a figure is worth nothing without."""
        run, shape = self.run, self.parts.shape
        return {
            'model': run.model.path or f'random weights, {shape.parameter_count():,}',
            'device': jax.devices()[0].device_kind,
            'devices': jax.device_count(),
            'jax': jax.__version__,
            'kernels': f'{self.engine.kernels} ({self.engine.why_kernels})',
            'sequences': run.rollout.prompts_per_step * run.rollout.samples_per_prompt,
            'tokens': run.rollout.max_response_tokens,
            'probes': f'{run.controller.probes} of {run.rollout.slots} slots',
            'bin_width_tokens': self.schedule.bin_width_tokens,
            'page_tokens': self.schedule.page_tokens,
            'most_pages': self.engine.most_budgets().tolist(),
        }

    def use_policy(self, policy: str) -> None:
        """Samples by another way of choosing pages from here on."""
        if policy != self.schedule.policy:
            schedule = dataclasses.replace(self.schedule, policy=type(self.schedule.policy)(policy))
            self.parts = dataclasses.replace(self.parts, schedule=schedule)
            self.engine = self._engine()

    def hold(self, target: float) -> None:
        """Lets the controller hold p05 at this target from here on."""
        assert self.engine.probing is not None
        control = dataclasses.replace(self.control, target=target)
        self.engine.probing = dataclasses.replace(self.engine.probing, control=control)

    def begin_with(self, budget_Z: np.ndarray) -> Controller:
        """A controller that knows nothing yet and begins with these pages."""
        probes = self.engine.probes * self.engine.shards
        return self.engine.placed(controllers.start(budget_Z, probes))

    def fixed(self, budget_Z: np.ndarray) -> dict[str, Any]:
        """A rollout at these budgets; every call has the same prompts and random keys."""
        self._warm_up()
        self.engine.schedule = dataclasses.replace(self.schedule, budget_pages=tuple(budget_Z.tolist()))
        requests = self._requests(0)
        start = time.perf_counter()
        responses = self.engine.generate(self.weights, requests, **self._how(0))
        sampling_s = time.perf_counter() - start
        self.engine.schedule = self.schedule  # what a controller begins with
        return {'sampling_s': sampling_s, **self._scored(requests, responses)}

    def adaptive(self, controller: Controller, step: int) -> tuple[Controller, dict[str, Any]]:
        """A rollout under the controller, and the controller after it. step: 1, 2, ...; each has its own prompts."""
        self._warm_up()
        requests = self._requests(step)
        before_Z, moved = np.asarray(controllers.budgets(controller)), np.asarray(controller.moves_Z)
        start = time.perf_counter()
        responses, adapted = self.engine.generate_adaptively(self.weights, requests, controller, **self._how(step))
        sampling_s = time.perf_counter() - start
        known = lambda p05_Z: [float(p) if p >= 0 else None for p in p05_Z]
        belief = adapted.controller.belief
        bins = len(adapted.budget_Z)
        return adapted.controller, {
            'step': step,
            'budget_pages_before': before_Z.tolist(),
            'budget_pages_after': adapted.budget_Z.tolist(),
            'at_least': (adapted.budget_Z <= self.control.least_budget).tolist(),
            'at_most': (adapted.budget_Z >= self.engine.most_budgets()).tolist(),
            'probe_p05': known(adapted.p05_Z),
            'moves': (np.asarray(adapted.controller.moves_Z) - moved).tolist(),
            'slope': float(np.exp(belief.log_slope)),
            'uncertainty': np.sqrt(np.diagonal(belief.covariance_EE)[:bins]).tolist(),  # of log(budget)
            'probe_overhead': adapted.probe_s / sampling_s,
            'sampling_s': sampling_s,
            **self._scored(requests, responses),
        }

    def read_fraction(self, budget_Z: np.ndarray) -> float:
        """`kv_read_fraction` of the offline rollouts at these budgets, by arithmetic: their lengths are known."""
        schedule = dataclasses.replace(self.schedule, budget_pages=tuple(np.asarray(budget_Z).tolist()))
        tokens = [len(request.prompt_ids) + np.arange(1, request.limit_tokens) for request in self._requests(0)]
        length = np.concatenate(tokens)
        return kv_read_fraction(schedule, self.parts.shape.layers, length, pages_read(schedule, length))

    def _engine(self) -> Engine:
        engine = self.parts.engine(trains=True, forced_lengths=True)
        self.weights = engine.weights(self.params)
        return engine

    def _warm_up(self) -> None:
        key = self.schedule.policy.value, self.control.target
        if key not in self._warm:
            self.on_status('compiling', f'{key[0]}, target {key[1]}')
            self.engine.warm_up(self.weights, [self.sampling])
            self._warm.add(key)

    def _requests(self, step: int) -> list[Request]:
        rollout = self.run.rollout
        count = rollout.prompts_per_step
        taken = take_prompts(self.problems, self.parts.encoder, step * count, count, rollout.max_prompt_tokens)
        return [
            Request(ids, i, sample, rollout.max_response_tokens)
            for i, ids in enumerate(taken.prompt_ids)
            for sample in range(rollout.samples_per_prompt)
        ]

    def _how(self, step: int) -> dict[str, Any]:
        def show(progress: Progress) -> None:
            self.on_status('sampling', f'{progress.tokens:,} tokens')

        key = jax.random.key(self.run.seed)
        return {'run_key': key, 'step': step, 'sampling': self.sampling, 'on_progress': show}

    def _scored(self, requests: Sequence[Request], responses: Sequence[Response]) -> dict[str, Any]:
        """What the dense policy says of all sampled tokens but the first of each response, which prefill draws."""
        start = time.perf_counter()
        samples = [
            Sample(np.asarray(q.prompt_ids), r.tokens, r.logp, hidden=r.hidden)
            for q, r in zip(requests, responses, strict=True)
        ]
        scored = []
        for rows in micro_batches(samples, self.learner.layout):
            scored.append((rows, self.learner.score(self.params, self.learner.device(rows))))
            self.on_status('scoring', f'{sum(len(one.token_BT) for one, _ in scored)} rows')
        width, bins = self.schedule.bin_width_tokens, len(self.schedule.budget_pages)
        _, tail = mismatch_metrics(scored, width, self.run.mismatch.min_count)
        prompts = [len(q.prompt_ids) for q in requests]
        length = np.concatenate([n + np.arange(1, len(r.tokens)) for n, r in zip(prompts, responses, strict=True)])
        read = np.concatenate([r.pages_read[1:] for r in responses])
        bin_, tokens = length // width, np.bincount(length // width, minlength=bins)
        return {
            'p05': [tail.bins.get((z * width, (z + 1) * width)) for z in range(bins)],
            'p05_all': tail.p05,
            'tokens': tokens.tolist(),
            'pages_read': (np.bincount(bin_, read, minlength=bins) / np.maximum(tokens, 1)).tolist(),
            'kv_read_fraction': read_metrics(self.schedule, self.parts.shape.layers, prompts, responses)[
                'sparse/kv_read_fraction'
            ],
            'scoring_s': time.perf_counter() - start,
        }
