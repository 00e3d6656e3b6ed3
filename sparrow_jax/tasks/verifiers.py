"""Rewards of completions.

Problems come from `problems`, completions from the sampler; the scores go to the advantages and the log. Answers are
judged in helper processes, because a parser can hang or crash on what a policy writes: such a worker is ended and
replaced. Where a run has several processes, each judges its share of the answers, and all get the verdicts of all.
"""

import collections
import dataclasses
import time
from collections.abc import Sequence
from multiprocessing import connection as mp_connection
from typing import Any

import jax
import numpy as np
from absl import logging

from sparrow_jax.config import ConfigError, DataConfig, RewardConfig
from sparrow_jax.parallel import transfer
from sparrow_jax.tasks import scoring
from sparrow_jax.tasks.answers import read_answer
from sparrow_jax.tasks.problems import TASK_PREFIX, Problem
from sparrow_jax.tasks.workers import Failure, Worker, WorkerGroup

_START_S = 120.0  # a worker that has not finished its imports by then never will
_FAILED_STARTS = 3  # in a row: not something else that ended one worker, but what it imports
_LARGEST_BATCH = 32


class RewardError(ConfigError):
    """The user's reward function raised, or returned something that is no reward."""


@dataclasses.dataclass(frozen=True)
class Score:
    """The verdict on one completion.

    Attributes:
      reward: what the policy is trained on: the task's score (0 below reward.correct_threshold) or the user's
        function's value, plus reward.format_bonus where the format is valid.
      correct: 1 if the score before the bonus reaches reward.correct_threshold, else 0.
      format_valid: the answer stands where data.answer_format says, and thoughts are opened and closed in turn.
      timed_out: there is no verdict: judging took longer than reward.timeout_s, needed too much memory or ended its
        worker twice. Counts as 0 in reward and correct, but is not a wrong answer.
      answer: the answer as found, or None.
    """

    reward: float
    correct: float
    format_valid: bool
    timed_out: bool
    answer: str | None


@dataclasses.dataclass
class _Judge:
    """A worker with the requests it holds, and the time (of the monotonic clock) by which its next reply is due."""

    worker: Worker
    due_s: float
    ready: bool = False
    jobs: collections.deque[int] = dataclasses.field(default_factory=collections.deque)

    @property
    def connection(self) -> Any:
        return self.worker.connection


class _Work:
    """The requests of one call and how far they are."""

    def __init__(self, requests: Sequence[tuple]):
        self.requests = requests
        self.verdicts: list[float | None] = [scoring.NO_VERDICT] * len(requests)
        self.open = len(requests)
        self.pending = collections.deque(range(len(requests)))
        self._deaths: collections.Counter[int] = collections.Counter()

    def take(self, count: int) -> list[int]:
        return [self.pending.popleft() for _ in range(min(count, len(self.pending)))]

    def give_back(self, indices: Sequence[int]) -> None:
        self.pending.extendleft(reversed(indices))

    def decide(self, index: int, verdict: float | None) -> None:
        self.verdicts[index] = verdict
        self.open -= 1

    def died(self, index: int) -> None:
        """A worker ended on this request: tried once more, since something else may have ended it."""
        self._deaths[index] += 1
        if self._deaths[index] < 2:
            self.pending.appendleft(index)
        else:
            self.decide(index, scoring.NO_VERDICT)


class Verifier:
    """Scores completions in `reward.workers` processes; a context manager, not for use by several threads at once.

    Args:
      reward, data: the run's sections.
      prompt_opens_think: prompts end inside a thought (`PromptEncoder.opens_think`).

    Raises:
      ConfigError: reward.function cannot be imported; found at construction.
    """

    def __init__(self, reward: RewardConfig, data: DataConfig, *, prompt_opens_think: bool = False):
        self._reward = reward
        self._answer_format = data.answer_format
        self._opens_think = prompt_opens_think
        sources = [data.source, data.eval_source or data.source]
        self._arguments = {
            'function': reward.function,
            'tasks': not reward.function and any(s.startswith(TASK_PREFIX) for s in sources),
            'mathematics': not reward.function and any(not s.startswith(TASK_PREFIX) for s in sources),
        }
        self._group = WorkerGroup()
        self._judges: list[_Judge] = []
        self._failed_starts = 0  # in a row
        self._closed = False
        try:
            for _ in range(reward.workers):
                self._start()
            while not all(judge.ready for judge in self._judges):
                self._collect(None)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> 'Verifier':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all workers and whatever they started; may be called twice."""
        self._closed = True
        self._judges.clear()
        self._group.close()

    def score(self, problems: Sequence[Problem], completions: Sequence[str]) -> list[Score]:
        """Scores `completions[i]` as an answer to `problems[i]`; the order of the result is theirs.

        All processes of a run call it with the same answers.

        Raises:
          RewardError: the user's function raised or returned no finite number; the text names the problem. The verifier
          is closed then.
        """
        if len(problems) != len(completions):
            raise ValueError(f'{len(problems)} problems but {len(completions)} completions')
        if self._closed:
            raise RuntimeError('this verifier is closed')
        readings = [read_answer(text, self._answer_format, self._opens_think) for text in completions]
        requests: list[tuple] = []
        slots: list[int | None] = []  # the request that decides each completion
        known: dict[tuple, int] = {}
        for problem, completion, reading in zip(problems, completions, readings, strict=True):
            if self._reward.function:
                requests.append(('function', dataclasses.asdict(problem), completion))
                slots.append(len(requests) - 1)
                continue
            if reading.answer is None:
                slots.append(None)
                continue
            # The samples of a group often agree: each distinct answer is judged once.
            key = (problem.source, problem.options, problem.index, problem.question, problem.answer, reading.answer)
            if key not in known:
                known[key] = len(requests)
                requests.append(_request(problem, reading.answer))
            slots.append(known[key])
        verdicts = self._judge_together(requests, len(completions))
        scores = []
        for reading, slot in zip(readings, slots, strict=True):
            value = 0.0 if slot is None else verdicts[slot]
            timed_out = value is scoring.NO_VERDICT
            value = 0.0 if value is scoring.NO_VERDICT else value
            correct = slot is not None and not timed_out and value >= self._reward.correct_threshold
            base = value if self._reward.function or correct else 0.0
            bonus = self._reward.format_bonus if reading.format_valid else 0.0
            scores.append(Score(base + bonus, float(correct), reading.format_valid, timed_out, reading.answer))
        return scores

    def warm_up(self, completions: int) -> None:
        """Compiles what brings the verdicts on so many completions together."""
        self._judge_together([], completions)

    def _judge_together(self, requests: list[tuple], most: int) -> list[float | None]:
        """Verdicts on at most so many requests, in their order; each process judges every n-th."""
        processes = jax.process_count()
        share = self._judge(requests[jax.process_index() :: processes])
        own = np.full(-(-most // processes), np.nan)  # of one size, whatever is asked: it compiles nothing
        own[: len(share)] = [np.nan if verdict is scoring.NO_VERDICT else verdict for verdict in share]
        verdicts = transfer.of_all(own).T.reshape(-1)[: len(requests)].tolist()
        return [scoring.NO_VERDICT if np.isnan(verdict) else verdict for verdict in verdicts]

    def _judge(self, requests: list[tuple]) -> list[float | None]:
        batch = max(1, min(_LARGEST_BATCH, len(requests) // (4 * self._reward.workers)))
        work = _Work(requests)
        try:
            while work.open:
                for judge in self._judges:
                    if judge.ready and not judge.jobs and work.pending:
                        self._give(judge, work, batch)
                self._collect(work)
        except BaseException:
            self.close()  # an interrupted worker still holds requests: it cannot serve another call
            raise
        return work.verdicts

    def _give(self, judge: _Judge, work: '_Work', batch: int) -> None:
        judge.jobs.extend(work.take(batch))
        judge.due_s = time.monotonic() + self._reward.timeout_s
        try:
            judge.connection.send([work.requests[i] for i in judge.jobs])
        except (BrokenPipeError, ConnectionResetError):
            return  # `_collect` sees its end
        # A large batch takes its time to get through: the clock runs from here.
        judge.due_s = time.monotonic() + self._reward.timeout_s

    def _collect(self, work: '_Work | None') -> None:
        """Waits for the next replies, and replaces workers that died or are overdue."""
        busy = {judge.connection: judge for judge in self._judges if judge.jobs or not judge.ready}
        wait_s = min(judge.due_s for judge in busy.values()) - time.monotonic()
        for connection in mp_connection.wait(list(busy), max(wait_s, 0.0)):
            judge = busy.pop(connection)  # type: ignore[call-overload, index]
            try:
                reply = judge.connection.recv()
            except (EOFError, OSError):
                self._replace(judge, work, 'died')
                continue
            if isinstance(reply, Failure):
                raise RewardError(reply.text) if judge.ready and reply.mendable else reply.error()
            if not judge.ready:
                judge.ready = True
                self._failed_starts = 0
            else:
                assert work is not None
                work.decide(judge.jobs.popleft(), reply)
            judge.due_s = time.monotonic() + self._reward.timeout_s
        for judge in busy.values():
            if judge.due_s <= time.monotonic() and not judge.connection.poll():
                self._replace(judge, work, 'overdue')

    def _replace(self, judge: _Judge, work: '_Work | None', why: str) -> None:
        self._judges.remove(judge)
        code = self._group.kill(judge.worker)
        if not judge.ready:
            self._failed_starts += 1
            if why == 'overdue' or self._failed_starts == _FAILED_STARTS:
                state = f'ended with exit code {code}' if why == 'died' else f'was not ready after {_START_S:.0f} s'
                raise RuntimeError(f'a verifier worker {state} while it started; its messages stand on standard error')
        if work is not None and judge.jobs:
            index = judge.jobs.popleft()
            work.give_back(judge.jobs)
            if why == 'overdue':
                logging.info('A verifier worker was ended after %g s on one answer.', self._reward.timeout_s)
                work.decide(index, scoring.NO_VERDICT)
            else:
                logging.warning('A verifier worker died with exit code %d; it is replaced.', code)
                work.died(index)
        self._start()

    def _start(self) -> None:
        worker = self._group.start('sparrow_jax.tasks.scoring:serve', self._arguments)
        self._judges.append(_Judge(worker, time.monotonic() + _START_S))


def _request(problem: Problem, answer: str) -> tuple:
    if problem.source.startswith(TASK_PREFIX):
        entry = {'question': problem.question, 'answer': problem.answer, 'metadata': problem.metadata}
        return 'task', problem.source.removeprefix(TASK_PREFIX), problem.options, entry, answer
    return 'math', problem.answer, answer
