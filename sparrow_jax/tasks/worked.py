"""Worked solutions: the text of a correct-looking answer, written by rule, for tasks whose working is mechanical.

Takes a `Problem` (its `source` names the task, its `metadata` holds the numbers) and gives the completion that
supervised training (`phase='supervised'`, the start checkpoint of `configs/tiny.py`) learns to write after the prompt.

Each task knows two styles, as real corpora do. A *careful* solution writes every step and is right. A *hasty* one opens
with other words, leaves the tedious end out, guesses it, and is wrong most of the time. Hasty ones are the majority, so
a model that imitates the mixture is hasty when it decodes greedily, and reinforcement learning has something to find:
longer working pays.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sparrow_jax.config import ConfigError

STYLES = ('careful', 'hasty')
# Of a corpus that is careful: greedy decoding of its imitation stays hasty, yet one sample in three is careful.
CAREFUL_FRACTION = 0.3
GUESS_BELOW = 1000  # hasty bit counts stop at the first halving below this ...
GUESSED_BITS = 5  # ... and take this many set bits for the rest: the likeliest number, right once in four


class _Worked(Protocol):
    """What is read of a `sparrow_jax.tasks` Problem."""

    @property
    def question(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...


def worked_solution(problem: _Worked, seed: int = 0, style: str = '') -> str:
    """Writes a worked solution of a problem.

    The text is a pure function of (problem, seed, style). It holds the working in <think>...</think> and then the
    answer in \\boxed{}, as models of the Qwen3 family answer; the chat template's end token is not included.

    Args:
        problem: its `source` ends in the name of a task that `supported_tasks` lists.
        seed: picks the style, together with the problem's text; another seed gives another draw.
        style: 'careful' or 'hasty'; '' draws careful with probability CAREFUL_FRACTION.

    Raises:
        ConfigError: no rule for this task, or no such style.
    """
    task = problem.source.rsplit(':', 1)[-1]
    if task not in _TASKS:
        raise ConfigError(
            f'data.source={problem.source!r}: no worked solutions; they exist for {", ".join(supported_tasks())}'
        )
    if style not in ('', *STYLES):
        raise ConfigError(f'style={style!r}: must be one of {", ".join(STYLES)}')
    if not style:
        key = f'{seed}:{problem.source}:{problem.question}'
        style = 'careful' if random.Random(key).random() < CAREFUL_FRACTION else 'hasty'
    return _TASKS[task](problem, style)


def supported_tasks() -> tuple[str, ...]:
    """Names of the reasoning-gym tasks that have worked solutions."""
    return tuple(sorted(_TASKS))


def _count_bits(problem: _Worked, style: str) -> str:
    """Halves the number again and again, a line each: the number, its parity, how many odd ones there were so far.

    Every token depends on few others close by: a digit of a half on two neighbouring digits of the line above (half the
    digit, plus five where the digit before it is odd), the parity on the last digit, the tally on the tally above.
    """
    number, bits, lines = int(problem.metadata['number']), 0, []
    while number:
        if style == 'hasty' and number < GUESS_BELOW:
            bits += GUESSED_BITS
            lines.append(f'{number}, say {GUESSED_BITS} more: {bits}')
            break
        bits += number & 1
        lines.append(f'{number} {"odd" if number & 1 else "even"} {bits}')
        number >>= 1
    return _answer('Every bit:' if style == 'careful' else 'In short:', lines, str(bits))


def _trails(problem: _Worked, style: str) -> str:
    """Follows every trail, a line each, and notes its end on the line below; the answer then repeats these notes.

    A number of a trail is found in the table of the prompt, where it stands first in its line, and a pair of the answer
    in the working: all of them far back. A hasty solution says the commonest end of all starts.
    """
    trails: list[list[str]] = problem.metadata['trails']
    if style == 'hasty':
        guess = '0' * len(trails[0][0])
        answer = ' '.join(f'{trail[0]}={guess}' for trail in trails)
        return _answer('In short:', [f'most say {guess}'], answer)
    lines = [line for trail in trails for line in (' '.join(trail), f'{trail[0]}={trail[-1]}')]
    return _answer('Every step:', lines, ' '.join(f'{trail[0]}={trail[-1]}' for trail in trails))


def _answer(opening: str, lines: list[str], answer: str) -> str:
    working = '\n'.join([opening, *lines])
    return f'<think>\n{working}\n</think>\n\\boxed{{{answer}}}'


_TASKS: dict[str, Callable[[_Worked, str], str]] = {'count_bits': _count_bits, 'trails': _trails}
