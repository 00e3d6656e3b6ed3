"""One run's parts and state, and what its steps are made of, as named calls; `train` puts them in order.

A step has two halves. `prepare_*` reads the state and changes only the data position, so it can be thrown away and
done again; `update` replaces the weights.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from flax import nnx

from sparrow_jax import guards
from sparrow_jax.answers import Answers, choose_prompts, has_signal
from sparrow_jax.assembly import Parts
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.evaluation import HeldOut, encode_held_out, evaluate
from sparrow_jax.learner.advantages import ADVANTAGES
from sparrow_jax.learner.learner import Learner, Scores
from sparrow_jax.learner.rows import Counts, Rows, Sample, micro_batches
from sparrow_jax.learner.token_advantages import MicroBatch, Moments, TokenAdvantages
from sparrow_jax.learner.updates import LearnerState
from sparrow_jax.measures import (
    adaptive_metrics,
    answer_rows,
    entropy_metric,
    length_metrics,
    mismatch_metrics,
    read_metrics,
    reward_metrics,
)
from sparrow_jax.models.adapter import SamplerAdapter
from sparrow_jax.parallel import transfer
from sparrow_jax.rollout.engine import Adapted, Progress, Response, Sampling
from sparrow_jax.rollout.pool import Request
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.controller import Controller
from sparrow_jax.sparsity.schedules import Schedule
from sparrow_jax.tasks.problems import Problem, load_problems
from sparrow_jax.tasks.prompts import take_prompts
from sparrow_jax.tasks.verifiers import Verifier
from sparrow_jax.tasks.worked import worked_solution


@dataclasses.dataclass
class Position:
    """Where a run stands in its data: part of every checkpoint."""

    step: int = 0  # steps done
    problem: int = 0  # next position in the endless, shuffled order of training problems
    skipped_overlong: int = 0  # prompts left out so far


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What one step's updates are made from.

    Attributes:
        updates: micro-batches of each optimizer update.
        metrics: of the step so far.
        answers: rows for samples.jsonl.
        controller: after the step's rollout, under an adaptive schedule.
        alpha_X: histogram of the sampled tokens' alphas, where the step measured them.
        of_adapter: micro-batches for the sampler's adapter, on the host; none where it learns nothing.
    """

    updates: list[list[MicroBatch]]
    metrics: dict[str, float]
    answers: list[dict]
    controller: Controller | None = None
    alpha_X: np.ndarray | None = None
    of_adapter: Sequence[Rows] = ()


def as_samples(
    requests: Sequence[Request], responses: Sequence[Response], advantages: Sequence[float] | np.ndarray
) -> list[Sample]:
    """What the learner's rows are made from; the three are in the same order."""
    return [
        Sample(np.asarray(q.prompt_ids), r.tokens, r.logp, float(advantage), r.hidden)
        for q, r, advantage in zip(requests, responses, advantages, strict=True)
    ]


def without_truncated(samples: Sequence[Sample], responses: Sequence[Response]) -> list[Sample]:
    """The samples, of which those that were cut off at their limit are not learned from."""
    return [
        dataclasses.replace(sample, learned=response.finish_reason != 'length')
        for sample, response in zip(samples, responses, strict=True)
    ]


def counts_of(batches: Sequence[MicroBatch]) -> Counts:
    return sum((batch.counts for batch in batches), Counts(0.0, 0.0))


def means(collected: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([found[name] for found in collected])) for name in collected[0]}


def with_adapter(state: LearnerState, adapter: LearnerState) -> dict[str, Any]:
    """What a checkpoint of a run with an adapter holds; the learner's arrays have the names they have without one."""
    return {**vars(state), 'adapter': adapter}


class Trainer:
    """One run: its parts, its state, and the steps over them."""

    def __init__(self, parts: Parts, verifier: Verifier, console: Console):
        self.parts, self.run, self.verifier, self.console = parts, parts.run, verifier, console
        self.train_set = load_problems(self.run.data, 'train')
        self.held_out = load_problems(self.run.data, 'held_out')
        self.held_out_prompts: HeldOut  # set by `check_data`, where the run evaluates
        self.engine = parts.engine(trains=self.run.phase == 'rl')
        self.controller = self.engine.start_controller() if self.engine.probing else None
        self.learner = Learner(parts.learner_graph, parts.abstract_params(), parts.mesh, self.run, parts.shape.d_model)
        self.group_advantages = jax.jit(ADVANTAGES[self.run.learner.advantage].of_group)
        self.token_advantages = TokenAdvantages(self.run, parts.mesh)
        self.distiller = parts.distiller(self.learner, self.engine) if self.run.distill.enabled else None
        self.check_data()
        if not transfer.same_in_all(self.train_set.fingerprint):
            raise ConfigError(
                f'data.source={self.run.data.source!r}: the processes see different problems; give all of them the '
                'same file (or the same version of reasoning-gym)'
            )
        self.key = jax.random.key(self.run.seed)
        self.position = Position()
        self.guard = guards.History()
        self.state: LearnerState  # set by `start`
        self.adapter: LearnerState | None = None  # of the sampler; set by `start` where the run has one
        self.reference: nnx.State | None = None
        self.timings: dict[str, float] = {}

    # ------------------------------------------------------------------ state

    def start(self, checkpoints: Checkpoints) -> int | None:
        """Takes up the newest checkpoint, or the start weights; returns the checkpoint's step."""
        step = checkpoints.latest_step()
        if self.run.learner.kl_coef:
            self.reference = self.parts.start_params()
        if step is None:
            self.state = self.learner.init(self.reference if self.reference is not None else self.parts.start_params())
            if self.distiller is not None:
                self.adapter = self.distiller.init(self.run.seed)
            return None
        if self.distiller is None:
            self.state, facts = checkpoints.restore(step, self.learner.abstract_state)
        else:
            wanted = with_adapter(self.learner.abstract_state, self.distiller.abstract_state)
            restored, facts = checkpoints.restore(step, wanted)
            self.adapter, self.state = restored.pop('adapter'), LearnerState(**restored)
        if facts.get('data') != self.train_set.fingerprint:
            raise ConfigError(
                f'data.source={self.run.data.source!r}: has other problems now than when this run began; restore the '
                'file (or the version of reasoning-gym), or give another --workdir'
            )
        self.position = Position(**facts['position'])
        if self.controller is not None:
            self.controller = self.restored_controller(facts)
        self.guard = guards.History(**facts.get('guard', {}))
        self.widen_schedule(self.guard.widened)
        return step

    def restored_controller(self, facts: dict[str, Any]) -> Controller:
        assert self.controller is not None
        try:
            if facts['bin_width_tokens'] != self.parts.schedule.bin_width_tokens:
                raise ValueError(f'they were {facts["bin_width_tokens"]} tokens wide')
            return self.engine.placed(controllers.from_facts(facts['controller'], self.controller))
        except ValueError as error:
            raise ConfigError(
                f'schedule.start={self.run.schedule.start!r}: has other length bins now than when this run began '
                f'({error}); restore schedule.path={self.run.schedule.path!r}, or give another --workdir'
            ) from error

    def save(self, checkpoints: Checkpoints) -> None:
        facts: dict[str, Any] = {
            'position': dataclasses.asdict(self.position),
            'data': self.train_set.fingerprint,
            'guard': dataclasses.asdict(self.guard),
        }
        if self.controller is not None:
            facts['controller'] = controllers.to_facts(self.controller)
            facts['bin_width_tokens'] = self.parts.schedule.bin_width_tokens
        arrays = self.state if self.adapter is None else with_adapter(self.state, self.adapter)
        checkpoints.save(self.position.step, arrays, facts)

    def warm_up(self) -> None:
        """Compiles everything that the run will need, so that nothing compiles later."""
        run = self.run
        self.console.status('compiling')
        samplings = set()
        if run.evaluate.every_steps >= 0:
            samplings.add(self.evaluation_sampling())
            self.verifier.warm_up(len(self.held_out_prompts.problems) * run.evaluate.samples)
        keep_hidden = {False}
        if run.phase == 'rl':
            self.group_advantages(np.zeros((run.rollout.prompts_per_step, run.rollout.samples_per_prompt), np.float32))
            self.verifier.warm_up(run.rollout.prompts_per_step * run.rollout.samples_per_prompt)
            keep_hidden = {self.measured(step) for step in range(1, run.steps + 1)}
            samplings |= {self.sampling(keep) for keep in keep_hidden}
            if run.guard.action == 'dense':
                samplings |= {dataclasses.replace(sampling, sparse=False) for sampling in list(samplings)}
            if run.mismatch.floor_every_steps:
                samplings.add(self.floor_sampling())
                keep_hidden.add(True)
        weights = self.engine.weights(self.state.params)
        self.engine.warm_up(
            weights,
            sorted(samplings, key=repr),
            lambda what: self.console.status('compiling', what),
            self.sampler_adapter(),
        )
        self.console.status('compiling', 'learner')
        if self.distiller is not None and self.adapter is not None:
            self.distiller.warm_up(self.state.params, self.adapter)
        self.state = self.learner.warm_up(self.state, keep_hidden=sorted(keep_hidden))
        if self.token_advantages.needed:
            self.token_advantages.warm_up(self.learner.paddings())

    def check_data(self) -> None:
        """Says what is wrong with the data before minutes of compiling, not after; encodes the held-out prompts."""
        if self.run.phase == 'supervised':
            self.worked_sample(0)
        else:
            take_prompts(self.train_set, self.parts.encoder, 0, 1, self.run.rollout.max_prompt_tokens)
        if self.run.evaluate.every_steps >= 0:
            self.held_out_prompts = encode_held_out(self.parts, self.held_out)

    # ------------------------------------------------------------------ what a step does when

    def measured(self, step: int) -> bool:
        every = self.run.mismatch.every_steps
        return bool(every) and step % every == 0

    def floored(self, step: int) -> bool:
        every = self.run.mismatch.floor_every_steps
        return bool(every) and (step == 1 or step % every == 0)

    def evaluated(self, step: int) -> bool:
        every = self.run.evaluate.every_steps
        return every >= 0 and (step in (0, self.run.steps) or (every > 0 and step % every == 0))

    def sampling(self, keep_hidden: bool) -> Sampling:
        return Sampling(self.run.rollout.temperature, sparse=not self.guard.dense, keep_hidden=keep_hidden)

    def sampler_adapter(self) -> SamplerAdapter | None:
        """The adapter as it is now, for the sparse sampler."""
        return None if self.distiller is None or self.adapter is None else self.distiller.for_sampler(self.adapter)

    def floor_sampling(self) -> Sampling:
        return Sampling(self.run.rollout.temperature, sparse=False, keep_hidden=True)

    def evaluation_sampling(self) -> Sampling:
        # Where every step keeps hidden states, the floor's compiled sampler serves here too.
        keep = self.run.phase == 'rl' and self.run.mismatch.every_steps == 1
        return Sampling(self.run.evaluate.temperature, self.run.evaluate.top_p, sparse=False, keep_hidden=keep)

    # ------------------------------------------------------------------ steps

    def prepare_rl(self) -> Prepared:
        """Everything of a step of reinforcement learning up to the update: prompts, rollout, rewards, dense
        log-probs, advantages.
        """
        step = self.position.step + 1
        weights = self.engine.weights(self.state.params)
        parks = self.engine.parks
        drawn, adapted, batches = self.draw(step, weights)
        score_PR = drawn.scores_PR()
        learned = drawn.of_prompts(choose_prompts(score_PR, self.run.rollout.prompts_per_step))
        penalty_PR = learned.penalties_PR(self.run.reward)
        advantages = np.asarray(self.group_advantages(learned.scores_PR() - penalty_PR)).reshape(-1)
        samples = as_samples(learned.requests, learned.responses, advantages)
        if self.run.learner.mask_truncated:
            samples = without_truncated(samples, learned.responses)
        of_adapter: list[Rows] = []
        if self.distiller is not None and not self.guard.dense:
            pages = [r.pages_read for r in learned.responses]
            read = [dataclasses.replace(s, pages_read=p) for s, p in zip(samples, pages, strict=True)]
            of_adapter = self.distiller.rows(read)
        updates, scored = self.score(self.make_updates(samples))
        prompt_tokens = [len(q.prompt_ids) for q in drawn.requests]
        metrics = {
            **reward_metrics(drawn.scores),
            'critic/rewards/mean': float((learned.scores_PR() - penalty_PR).mean()),
            'critic/advantages/mean': float(advantages.mean()),
            'critic/groups_with_signal': float(has_signal(score_PR).mean()),
            **length_metrics(prompt_tokens, drawn.responses),
            **entropy_metric(scored),
            **read_metrics(self.schedule_in_force(), self.parts.shape.layers, prompt_tokens, drawn.responses),
            'sparse/pallas_kernels': float(self.engine.kernels.platform is not None),
            'rollout/parked': float(self.engine.parks - parks),
            'rollout/batches': float(batches),
            'rollout/prompts_left_out': float(len(score_PR) - len(penalty_PR)),
            'reward/overlong_penalty': float(penalty_PR.mean()),
            'actor/left_out_fraction': float(np.mean([not s.learned for s in samples])),
        }
        if self.token_advantages.needed:
            updates, more = self.finish_advantages(updates)
            metrics.update(more)
        if adapted is not None:
            metrics.update(self.adaptation(adapted, prompt_tokens, drawn.responses))
        alpha_X = None
        if self.measured(step):
            mismatch, alpha_X = self.mismatch(scored)
            metrics.update(mismatch)
        if self.floored(step):
            metrics['sparse/alpha_floor_p05'] = self.floor(step, weights, drawn.requests)
        metrics['perf/total_num_tokens'] = float(sum(s.tokens for s in samples))
        shown = slice(self.run.log.samples_per_step)
        prompt_texts = [self.parts.encoder.decode(q.prompt_ids) for q in drawn.requests[shown]]
        answers = answer_rows(
            prompt_texts, drawn.problems[shown], drawn.completions[shown], drawn.scores[shown], drawn.responses[shown]
        )
        controller = adapted.controller if adapted else None
        return Prepared(updates, metrics, answers, controller, alpha_X, of_adapter)

    def draw(self, step: int, weights: nnx.State) -> tuple[Answers, Adapted | None, int]:
        """Batches of prompts with their answers and scores, until enough prompts have answers that differ, or the
        configured number of batches is there; what the controller made of them; how many batches.
        """
        rollout, controller = self.run.rollout, self.controller
        drawn, adapted = None, None
        for batch in range(1 + rollout.extra_batches):
            problems, prompts = self.next_prompts()
            first = batch * rollout.prompts_per_step
            responses, requests, more = self.sample(step, weights, prompts, first, controller)
            if more is not None:
                controller = more.controller
                adapted = more if adapted is None else adapted.followed_by(more)
            repeated = [p for p in problems for _ in range(rollout.samples_per_prompt)]
            completions = [self.parts.encoder.decode(r.tokens) for r in responses]
            with self.timed('reward', 'verifying'):
                scores = self.verifier.score(repeated, completions)
            new = Answers(repeated, requests, responses, completions, scores, rollout.samples_per_prompt)
            drawn = new if drawn is None else drawn + new
            if has_signal(drawn.scores_PR()).sum() >= rollout.prompts_per_step:
                break
        assert drawn is not None
        return drawn, adapted, batch + 1

    def finish_advantages(self, updates: list[list[MicroBatch]]) -> tuple[list[list[MicroBatch]], dict[str, float]]:
        """The micro-batches with advantages (and returns) that need the log-probs, the critic or the whole batch."""
        moments = Moments()

        def estimate(batch: MicroBatch) -> MicroBatch:
            reference_BT = value_BT = None
            if self.reference is not None and self.token_advantages.needs_reference:
                reference_BT = self.learner.score(self.reference, batch.rows).logp_BT
            if self.token_advantages.needs_values:
                value_BT = self.learner.values(self.state, batch.rows)
            batch, summaries = self.token_advantages.estimate(batch, reference_BT, value_BT)
            moments.add(summaries)
            return batch

        with self.timed('adv', 'advantages'):
            estimated = [[estimate(batch) for batch in update] for update in updates]
            normalized = [[self.token_advantages.normalize(batch, moments) for batch in update] for update in estimated]
        return normalized, moments.metrics(sum(batch.counts.sequences for update in updates for batch in update))

    def adaptation(self, adapted: Adapted, prompt_tokens: list[int], responses: list[Response]) -> dict[str, float]:
        """What the controller did in this step's rollout; says which bins it has made dense."""
        assert self.engine.probing is not None
        longest = max(n + len(r.tokens) for n, r in zip(prompt_tokens, responses, strict=True))
        metrics, dense = adaptive_metrics(adapted, self.engine.probing.control, self.engine.most_budgets(), longest)
        metrics['sparse/probe_overhead'] = adapted.probe_s / self.timings['timing_s/gen']
        for low, high in dense:
            self.console.notice_once(
                f'no smaller budget holds p05 at {self.run.controller.target_p05} between {low:,} and {high:,} tokens: '
                'sequences of this length read as many pages as they may'
            )
        return metrics

    def prepare_supervised(self) -> Prepared:
        """A batch of worked solutions."""
        start = self.position.problem
        count = self.run.rollout.prompts_per_step
        samples = [self.worked_sample(position) for position in range(start, start + count)]
        self.position.problem += count
        updates = [
            [MicroBatch(self.learner.device(rows), None, rows.counts) for rows in update]
            for update in self.make_updates(samples)
        ]
        metrics = {
            'perf/total_num_tokens': float(sum(s.tokens for s in samples)),
            'response_length/mean': float(np.mean([len(s.response_ids) for s in samples])),
        }
        return Prepared(updates, metrics, [])

    def worked_sample(self, position: int) -> Sample:
        """The worked solution at a position of the training problems. Raises ConfigError if no row can hold it."""
        problem = self.train_set.at(position)
        prompt, response = self.parts.encoder.encode_worked(problem, worked_solution(problem, self.run.seed))
        sample = Sample(np.asarray(prompt), np.asarray(response))
        if sample.tokens > self.run.row_tokens:
            raise ConfigError(
                f'rollout.max_response_tokens={self.run.rollout.max_response_tokens}: a worked solution has '
                f'{len(response)} tokens, {sample.tokens} with its prompt, and a row of the learner '
                f'{self.run.row_tokens}; set it higher'
            )
        return sample

    def next_prompts(self) -> tuple[list[Problem], list[list[int]]]:
        rollout = self.run.rollout
        taken = take_prompts(
            self.train_set,
            self.parts.encoder,
            self.position.problem,
            rollout.prompts_per_step,
            rollout.max_prompt_tokens,
        )
        self.position.problem = taken.next_position
        self.position.skipped_overlong += taken.skipped
        return list(taken.problems), list(taken.prompt_ids)

    def sample(
        self, step: int, weights: nnx.State, prompts: list[list[int]], first: int, controller: Controller | None
    ) -> tuple[list[Response], list[Request], Adapted | None]:
        """Answers to prompts that are numbered from `first` within the step, under the controller as it is by now."""
        rollout = self.run.rollout
        requests = [
            Request(ids, i, sample, rollout.max_response_tokens)
            for i, ids in enumerate(prompts, start=first)
            for sample in range(rollout.samples_per_prompt)
        ]
        how: dict[str, Any] = {
            'run_key': self.key,
            'step': step,
            'sampling': self.sampling(self.measured(step)),
            'adapter': self.sampler_adapter(),
            'on_progress': self.show_progress('sampling'),
        }
        with self.timed('gen', 'sampling'):
            if controller is None or self.guard.dense:
                return self.engine.generate(weights, requests, **how), requests, None
            responses, adapted = self.engine.generate_adaptively(weights, requests, controller, **how)
        return responses, requests, adapted

    def make_updates(self, samples: list[Sample]) -> list[list[Rows]]:
        """The micro-batches of each optimizer update of the step; groups stay whole."""
        updates = self.run.learner.updates_per_step
        size = len(samples) // updates
        return [micro_batches(samples[i * size : (i + 1) * size], self.learner.layout) for i in range(updates)]

    def score(self, updates: list[list[Rows]]) -> tuple[list[list[MicroBatch]], list[tuple[Rows, Scores]]]:
        """Dense log-probs of the sampled tokens (and acceptance, where hidden states were kept): the micro-batches with
        them, and every micro-batch's rows on the host beside its scores.
        """
        total = sum(map(len, updates))
        scored: list[tuple[Rows, Scores]] = []

        def score_one(rows: Rows) -> MicroBatch:
            self.console.status('scoring', done=len(scored), total=total)
            placed = self.learner.device(rows)
            scores = self.learner.score(self.state.params, placed)
            scored.append((rows, scores))
            return MicroBatch(self.learner.without_hidden(placed), scores.logp_BT, rows.counts)

        with self.timed('old_log_prob', 'scoring'):
            batches = [[score_one(rows) for rows in update] for update in updates]
            jax.block_until_ready(scored[-1][1].logp_BT)
        return batches, scored

    def mismatch(self, scored: list[tuple[Rows, Scores]]) -> tuple[dict[str, float], np.ndarray]:
        """Metrics of the sampled tokens' alphas, and their histogram."""
        config = self.run.mismatch
        metrics, tail = mismatch_metrics(scored, config.bin_width_tokens, config.min_count)
        if tail.bins_too_small:
            self.console.notice_once(
                f'length bins with fewer than mismatch.min_count={config.min_count} tokens have no p05; '
                'sparse/bins_below_min_count counts them'
            )
        return metrics, tail.histogram_X

    def floor(self, step: int, weights: nnx.State, requests: list[Request]) -> float:
        """p05 of alpha between the decode path with all pages and the learner: what numerical differences alone
        cost.
        """
        with self.timed('floor', 'measuring the dense floor'):
            few = requests[: self.run.mismatch.floor_sequences]
            responses = self.engine.generate(weights, few, run_key=self.key, step=step, sampling=self.floor_sampling())
            rows = micro_batches(as_samples(few, responses, np.zeros(len(few))), self.learner.layout)
            scored = [(one, self.learner.score(self.state.params, self.learner.device(one))) for one in rows]
            _, tail = mismatch_metrics(scored, self.run.mismatch.bin_width_tokens, self.run.mismatch.min_count)
        target = self.run.controller.target_p05
        if self.controller is not None and tail.p05 < target:
            self.console.notice_once(
                f'controller.target_p05={target} is above the floor: even with all pages p05 is {tail.p05:.3f} in '
                f'{self.run.model.compute_dtype}'
            )
        return tail.p05

    def update(self, prepared: Prepared) -> dict[str, float]:
        """The step's optimizer updates, the critic's before the policy's; metrics are means over them. Not to be
        interrupted: the old state is gone.
        """
        self.controller = prepared.controller or self.controller
        metrics: dict[str, float] = {}
        if self.learner.critic is not None:
            with self.timed('update_critic', 'learning values'):
                metrics |= self.update_critic(prepared.updates)
            if self.position.step < self.run.critic.warmup_steps:
                return metrics | self.distill(prepared.of_adapter)
        collected: list[dict[str, float]] = []
        with self.timed('update_actor', 'learning'):
            for update in prepared.updates:
                self.state, found = self.learner.update(self.state, self.with_reference(update), counts_of(update))
                collected.append(found)
        return metrics | means(collected) | self.distill(prepared.of_adapter)

    def update_critic(self, updates: list[list[MicroBatch]]) -> dict[str, float]:
        collected = []
        for _ in range(self.run.critic.passes):
            for update in updates:
                batches = [batch.of_critic() for batch in update]
                self.state, found = self.learner.update_critic(self.state, batches, counts_of(update))
                collected.append(found)
        return means(collected)

    def distill(self, batches: Sequence[Rows]) -> dict[str, float]:
        """The updates of the sampler's adapter, whose dense policy is that of the updated weights."""
        if self.distiller is None or self.adapter is None or not batches:
            return {}
        show = lambda done, total: self.console.status('distilling', done=done, total=total)
        with self.timed('distill', 'distilling'):
            self.adapter, metrics = self.distiller.update(self.state.params, self.adapter, batches, show)
        return metrics

    def with_reference(self, update: list[MicroBatch]) -> Iterator[tuple[Rows, jax.Array, jax.Array]]:
        """What `Learner.update` takes, one micro-batch at a time: the start policy's log-probs are made when needed."""
        for i, batch in enumerate(update):
            self.console.status('learning', done=i, total=len(update))
            # A loss that does not use one of them takes any array of the shape.
            logp_old_BT = batch.rows.logp_actor_BT if batch.logp_old_BT is None else batch.logp_old_BT
            logp_reference_BT = logp_old_BT
            if self.reference is not None and self.run.learner.kl_placement == 'loss':
                logp_reference_BT = self.learner.score(self.reference, batch.rows).logp_BT
            yield batch.rows, logp_old_BT, logp_reference_BT

    def evaluation(self) -> dict[str, float]:
        """Accuracy of the dense policy on the held-out problems."""
        with self.timed('testing', 'evaluating'):
            outcome = evaluate(
                self.parts,
                self.engine,
                self.engine.weights(self.state.params),
                self.verifier,
                self.held_out_prompts,
                sampling=self.evaluation_sampling(),
                samples=self.run.evaluate.samples,
                on_progress=self.show_progress('evaluating'),
            )
        metrics = outcome.metrics(self.parts, 'val', sparse=False)
        self.console.message(
            f'held-out accuracy {metrics["val/accuracy"]:.3f} ± {metrics["val/accuracy_stderr"]:.3f} '
            f'({metrics["val/problems"]:.0f} problems, format valid {metrics["val/format_valid"]:.1%}, '
            f'{metrics["val/response_length/mean"]:.0f} tokens) after step {self.position.step}'
        )
        return metrics

    def judge(self, metrics: dict[str, float]) -> bool:
        """Lets the guard act on a finished step, and says so; whether the run should stop."""
        action = self.run.guard.action
        acts = action != 'none' and not self.guard.dense
        reason = guards.judge(self.run.guard, self.guard, metrics) if acts else None
        metrics['guard/acted'] = float(reason is not None)
        if reason is None:
            return False
        if action == 'widen':
            self.guard.widened += 1
            self.widen_schedule(1)
            if self.controller is not None:
                self.controller = self.engine.widened(self.controller)
            self.console.warn(f'{reason}: all budgets are doubled')
        elif action == 'dense':
            self.guard.dense = True
            self.console.warn(f'{reason}: the sampler is dense from here on')
        else:
            self.console.warn(f'{reason}: stopping after step {self.position.step}')
        return action == 'stop'

    def schedule_in_force(self) -> Schedule:
        """The schedule with the budgets that controller and guard have arrived at."""
        schedule = self.engine.schedule
        if self.guard.dense:
            return dataclasses.replace(schedule, kind='dense')
        if self.controller is not None:
            budgets = np.asarray(controllers.budgets(self.controller))
            return dataclasses.replace(schedule, budget_pages=tuple(budgets.tolist()))
        return schedule

    def widen_schedule(self, times: int) -> None:
        """Doubles the budgets of a schedule that is not adaptive so many times."""
        if self.controller is None:
            self.engine.schedule = self.engine.schedule.widened(times)

    # ------------------------------------------------------------------ what is seen

    @contextmanager
    def timed(self, name: str, phase: str) -> Iterator[None]:
        self.console.status(phase)
        start = time.perf_counter()
        yield
        self.timings[f'timing_s/{name}'] = self.timings.get(f'timing_s/{name}', 0.0) + time.perf_counter() - start

    def show_progress(self, phase: str) -> Callable[[Progress], None]:
        start = time.perf_counter()

        def show(progress: Progress) -> None:
            rate = progress.tokens / max(time.perf_counter() - start, 1e-9)
            self.console.status(
                phase, f'{rate:,.0f} tok/s', done=progress.finished, total=progress.total, unit='finished'
            )

        return show
