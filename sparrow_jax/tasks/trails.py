"""A task whose every step looks far back: trails through a long table of numbers, each followed to its end.

Importing this module registers the task `trails` with reasoning-gym, so that its problems are made, kept and judged
like those of any other task (`generated`, `scoring`); `worked` has solutions of both styles. The table stands in the
prompt in shuffled order, so that each step of a trail is a look-up somewhere in it, and the final answer looks up the
end of every trail in the working. What a sampler misses by reading too few pages shows in the answer, while a guess
needs hardly any reading: what a policy learns here depends on how well its sampler can read.
"""

import dataclasses
import random
import re
from collections.abc import Mapping
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import register_dataset

NAME = 'trails'
_ENDS = '0123'  # a trail ends in one of these digits, repeated
_PAIR = re.compile(r'(\d+)=(\d+)')


@dataclasses.dataclass
class TrailsConfig:
    """Options of the task.

    Attributes:
      digits: of every number.
      width: numbers of the table at each distance from each of the four ends; it has 4 width max_steps lines.
      min_steps, max_steps: lines of the table that a trail goes through.
      starts: trails that are asked for.
      common: probability that a trail ends in zeros; the other three ends share the rest. Guessing zeros everywhere is
        right on so many of them, while a trail that has lost its way ends there one time in four.
      seed, size: as every reasoning-gym task has them.
    """

    digits: int = 3
    width: int = 6
    min_steps: int = 3
    max_steps: int = 8
    starts: int = 32
    common: float = 0.57
    seed: int | None = None
    size: int = 500

    def validate(self) -> None:
        """Raises ValueError with the field that cannot be."""
        if not 1 <= self.min_steps <= self.max_steps:
            raise ValueError(f'min_steps={self.min_steps}: must be from 1 to max_steps={self.max_steps}')
        if not 0 <= self.common <= 1:
            raise ValueError(f'common={self.common}: must be from 0 to 1')
        most = self.width * (self.max_steps - self.min_steps + 1)
        if not 1 <= self.starts <= most:
            raise ValueError(f'starts={self.starts}: must be from 1 to width * (max_steps - min_steps + 1) = {most}')
        numbers = len(_numbers(self.digits))
        if len(_ENDS) * self.width * self.max_steps > numbers:
            raise ValueError(
                f'width={self.width}, max_steps={self.max_steps}: the table needs '
                f'{len(_ENDS) * self.width * self.max_steps} numbers, and {numbers} have {self.digits} digits'
            )


class TrailsDataset(ProceduralDataset):
    """Problem i is a function of (options, seed + i). Its metadata holds every trail, from its start to its end."""

    def __init__(self, config: TrailsConfig):
        super().__init__(config=config, seed=config.seed, size=config.size)
        self._numbers = _numbers(config.digits)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        config, rng = self.config, random.Random(self.seed + idx)
        free = iter(rng.sample(self._numbers, len(_ENDS) * config.width * config.max_steps))
        after: dict[str, str] = {}  # the table
        starts: dict[str, list[str]] = {}  # by end
        for end in (digit * config.digits for digit in _ENDS):
            before, starts[end] = [end], []
            for steps in range(1, config.max_steps + 1):
                layer = [next(free) for _ in range(config.width)]
                after |= {number: rng.choice(before) for number in layer}
                if steps >= config.min_steps:
                    starts[end] += layer
                before = layer
            rng.shuffle(starts[end])
        common, *others = starts
        ends = [common if rng.random() < config.common else rng.choice(others) for _ in range(config.starts)]
        trails = [_trail(starts[end].pop(), after) for end in ends]
        lines = rng.sample(sorted(after), len(after))
        question = '\n'.join(
            [
                f'Each line of the table leads from a number to the next one, and all end in {", ".join(starts)}. '
                'Where does each start end?',
                'Table:',
                *(f'{number} {after[number]}' for number in lines),
                'Starts:',
                ' '.join(trail[0] for trail in trails),
            ]
        )
        answer = ' '.join(f'{trail[0]}={trail[-1]}' for trail in trails)
        return {'question': question, 'answer': answer, 'metadata': {'trails': trails}}

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        """The share of starts whose end is right; where a start is named twice, its last end counts."""
        given = dict(_PAIR.findall(answer or ''))
        trails = entry['metadata']['trails']
        return sum(given.get(trail[0]) == trail[-1] for trail in trails) / len(trails)


def _trail(start: str, after: Mapping[str, str]) -> list[str]:
    trail = [start]
    while trail[-1] in after:
        trail.append(after[trail[-1]])
    return trail


def _numbers(digits: int) -> list[str]:
    """Those that may stand in the table: no leading zero, and not one digit repeated, as ends are."""
    return [str(n) for n in range(10 ** (digits - 1), 10**digits) if len(set(str(n))) > 1]


register_dataset(NAME, TrailsDataset, TrailsConfig)
