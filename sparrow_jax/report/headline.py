"""What a reader wants to know first: a few numbers of every run, each with a word on what it means."""

import dataclasses
from collections.abc import Sequence

from sparrow_jax.guards import TAIL as P05
from sparrow_jax.report.figures import RECENT, last, recent, told_steps
from sparrow_jax.report.logs import Run

WATCHED = ('critic/score/mean', 'actor/pg_loss', 'actor/grad_norm', 'supervised/loss')  # of which none may be NaN


@dataclasses.dataclass(frozen=True)
class Fact:
    """A number of one run.

    Attributes:
        value: as text.
        detail: where it comes from.
        verdict: 'good', 'bad', or '' where it is neither.
    """

    value: str
    detail: str = ''
    verdict: str = ''


@dataclasses.dataclass(frozen=True)
class Card:
    """A number of all runs, in their order."""

    title: str
    meaning: str
    facts: list[Fact]


def cards(runs: Sequence[Run]) -> list[Card]:
    """The cards that at least one run has a number for."""
    of_run = (
        ('Held-out accuracy', 'Right answers of the dense policy to problems that it was not trained on.', _accuracy),
        ('Reward in training', 'Of answers by the sampler, from which the policy learns.', _reward),
        ('Loss in training', 'Of worked solutions, per token.', _loss),
        (
            'p05 of alpha',
            'Agreement of sampler and policy where it is worst, lately; 5% of the tokens are below.',
            _p05,
        ),
        ('KV cache read', 'Bytes that the sampler reads, of what a dense one would.', _read),
        ('Sampling speed', 'Sampled tokens a second, of all devices together.', _speed),
        ('Response length', 'Tokens of an answer in training.', _length),
        ('State', 'How far the run got, and whether anything had to step in.', _state),
    )
    found = [Card(title, meaning, [fact(run) for run in runs]) for title, meaning, fact in of_run]
    return [card for card in found if any(fact is not _NONE for fact in card.facts)]


_NONE = Fact('-', 'not in the logs')


def _accuracy(run: Run) -> Fact:
    steps, values = run.values('val/accuracy')
    if not len(values):
        return _NONE
    error = run.metrics.get('val/accuracy_stderr')
    spread = f' ± {error[run.steps == steps[-1]][0]:.3f}' if error is not None else ''
    problems = last(run, 'val/problems')
    of = f', {problems:.0f} problems' if problems is not None else ''
    if len(values) == 1:
        return Fact(f'{values[0]:.3f}{spread}', f'after step {steps[0]:,}{of}')
    return Fact(f'{values[-1]:.3f}{spread}', f'after step {steps[-1]:,}{of}; {values[0]:.3f} after step {steps[0]:,}')


def _reward(run: Run) -> Fact:
    return _went(run, 'critic/score/mean', '.3f')


def _loss(run: Run) -> Fact:
    return _went(run, 'supervised/loss', '.4f')


def _went(run: Run, name: str, form: str) -> Fact:
    _, values = run.values(name)
    now = recent(run, name)
    if now is None:
        return _NONE
    if len(values) <= RECENT:
        return Fact(f'{now:{form}}', f'mean of {len(values)} steps')
    return Fact(f'{now:{form}}', f'mean of the last {RECENT} steps; {values[:RECENT].mean():{form}} of the first')


def _p05(run: Run) -> Fact:
    steps, values = run.values(P05)
    if not len(values):
        return _NONE
    now, worst = float(values[-RECENT:].mean()), values.argmin()
    lowest = f'lowest {values[worst]:.4f} at step {steps[worst]:,}'
    target = run.setting('controller.target_p05')
    if not isinstance(target, int | float):
        return Fact(f'{now:.4f}', f'lately; {lowest}')
    held = '' if run.setting('schedule.kind') == 'adaptive' else ', which only an adaptive schedule holds'
    at_least = now >= target - (run.setting('controller.tolerance') or 0)
    where = 'at or above' if now >= target else 'within tolerance of' if at_least else 'below'
    return Fact(f'{now:.4f}', f'{where} the target {target}{held}; {lowest}', 'good' if at_least else 'bad')


def _read(run: Run) -> Fact:
    now = recent(run, 'sparse/kv_read_fraction')
    if now is None:
        return _NONE
    pages, count = recent(run, 'sparse/pages_read/mean'), len(run.values('sparse/kv_read_fraction')[1])
    of = f', {pages:,.1f} pages a token' if pages is not None else ''
    return Fact(f'{now:.1%}', f'mean of the last {min(RECENT, count)} steps{of}')


def _speed(run: Run) -> Fact:
    sampled, all_ = recent(run, 'perf/rollout_tokens_per_s'), recent(run, 'perf/throughput')
    if sampled is None:
        return _NONE if all_ is None else Fact(f'{all_:,.0f}/s', 'per device, over whole steps')
    return Fact(f'{sampled:,.0f}/s', '' if all_ is None else f'{all_:,.0f} tokens/s per device over whole steps')


def _length(run: Run) -> Fact:
    now, cut = recent(run, 'response_length/mean'), recent(run, 'response_length/clip_ratio')
    if now is None:
        return _NONE
    first = run.values('response_length/mean')[1][:RECENT].mean()
    ends = f'; {cut:.1%} cut at the limit' if cut is not None else ''
    return Fact(f'{now:,.0f}', f'lately; {first:,.0f} at first{ends}')


def _state(run: Run) -> Fact:
    done, planned = int(run.steps[-1]), run.setting('steps')
    value = f'{done:,} / {planned:,} steps' if isinstance(planned, int) else f'{done:,} steps'
    lost = [name for name in WATCHED if name in run.not_finite]
    if lost:
        return Fact(value, f'{lost[0]} was not a finite number at {told_steps(run.not_finite[lost[0]])}', 'bad')
    steps, acted = run.values('guard/acted')
    at = [int(step) for step in steps[acted > 0]]
    action = str(run.setting('guard.action', 'unknown'))
    if at:
        did = {
            'stop': 'the guard stopped the run',
            'widen': 'the guard doubled all budgets',
            'dense': 'the guard made the sampler dense',
        }
        return Fact(value, f'{did.get(action, "the guard acted")} at {told_steps(at)}', 'bad')
    unguarded = {'none': 'no guard was set', 'unknown': 'what the guard was is unknown'}
    guard = unguarded.get(action, 'the guard never acted')
    if isinstance(planned, int) and done < planned:
        return Fact(value, f'under way, or stopped before its end; {guard}')
    return Fact(value, guard, '' if action in unguarded else 'good')
