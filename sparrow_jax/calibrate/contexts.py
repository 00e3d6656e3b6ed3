"""What a calibration measures on: sequences that were sampled for it, or texts that somebody gives."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.rollout.harvest import Response
from sparrow_jax.rollout.pool import Request
from sparrow_jax.tasks.problems import Problem, load_problems
from sparrow_jax.tasks.prompts import PromptEncoder, fitting_prompts, take_prompts

LEAST_RESPONSE = 2  # tokens: the first one is drawn by the dense prefill


@dataclasses.dataclass(frozen=True)
class Contexts:
    """Sequences, each a prompt that is encoded densely and what follows it.

    Attributes:
        prompts, responses: int32 [tokens] of each; no prompt is empty, a response has at least `LEAST_RESPONSE` tokens.
        left_out: sequences or texts that were too short or too long.
    """

    prompts: tuple[np.ndarray, ...]
    responses: tuple[np.ndarray, ...]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        """That are measured."""
        return sum(len(response) - 1 for response in self.responses)

    def measured_lengths(self) -> np.ndarray:
        """int32 [tokens]: cached tokens when each measured token is drawn, in the order of the sequences."""
        pairs = zip(self.prompts, self.responses, strict=True)
        return np.concatenate([len(prompt) + np.arange(1, len(response)) for prompt, response in pairs])

    def flat(self) -> dict[str, np.ndarray]:
        """As arrays for a file; `from_flat` is the inverse."""
        return {
            'prompt': np.concatenate(self.prompts),
            'prompt_tokens': np.asarray([len(x) for x in self.prompts]),
            'response': np.concatenate(self.responses),
            'response_tokens': np.asarray([len(x) for x in self.responses]),
            'left_out': np.asarray(self.left_out),
        }

    @classmethod
    def from_flat(cls, arrays: Any) -> 'Contexts':
        cut = lambda name: tuple(np.split(arrays[name], np.cumsum(arrays[f'{name}_tokens'])[:-1]))
        return cls(cut('prompt'), cut('response'), int(arrays['left_out']))

    @classmethod
    def joined(cls, parts: Sequence['Contexts']) -> 'Contexts':
        prompts = tuple(prompt for part in parts for prompt in part.prompts)
        responses = tuple(response for part in parts for response in part.responses)
        return cls(prompts, responses, sum(part.left_out for part in parts))


def of_samples(requests: Sequence[Request], responses: Sequence[Response]) -> tuple[Contexts, list[np.ndarray]]:
    """The sampled sequences that have a token to measure, and the sampler's hidden states [response, D] of each."""
    kept = [(q, r) for q, r in zip(requests, responses, strict=True) if len(r.tokens) >= LEAST_RESPONSE]
    prompts = tuple(np.asarray(q.prompt_ids, np.int32) for q, _ in kept)
    contexts = Contexts(prompts, tuple(r.tokens for _, r in kept), len(requests) - len(kept))
    return contexts, [r.hidden for _, r in kept if r.hidden is not None]


def make_requests(run: RunConfig, encoder: PromptEncoder) -> list[Request]:
    """One for each sequence to be sampled; prompts begin again where there are fewer of them."""
    c, limit, longest = run.calibrate, run.rollout.max_response_tokens, run.rollout.max_prompt_tokens
    if not c.prompts:
        ids = take_prompts(load_problems(run.data, 'train'), encoder, 0, c.sequences, longest).prompt_ids
    else:
        questions = list(_questions(Path(c.prompts).expanduser(), f'calibrate.prompts={c.prompts}'))
        problems = [Problem(i, question, '', 'calibrate.prompts', {}) for i, question in enumerate(questions)]
        found = [ids for _, ids in fitting_prompts(problems, encoder, longest)]
        if not found:
            raise ConfigError(
                f'rollout.max_prompt_tokens={longest}: no prompt of calibrate.prompts={c.prompts} is so short'
            )
        ids = tuple(found[i % len(found)] for i in range(c.sequences))
    return [Request(list(prompt), i, 0, limit) for i, prompt in enumerate(ids)]


def read_texts(run: RunConfig, encoder: PromptEncoder) -> Contexts:
    """The first `calibrate.sequences` texts of a file.

    A text without a prompt has its first token for one. What is longer than prompt and response may be together is
    cut into several sequences.

    Raises ConfigError where the file cannot be read, or holds fewer than two texts that are long enough.
    """
    c, r = run.calibrate, run.rollout
    name = f'calibrate.texts={c.texts}'
    ids_of = lambda text: np.asarray(encoder.tokenizer(text, add_special_tokens=False)['input_ids'], np.int32)
    prompts: list[np.ndarray] = []
    responses: list[np.ndarray] = []
    left_out = 0
    for prompt, text in _texts(Path(c.texts).expanduser(), name):
        ids, prompt_ids = ids_of(text), ids_of(prompt)
        longest = r.max_response_tokens if len(prompt_ids) else r.max_response_tokens + 1
        for start in range(0, max(len(ids), 1), longest):
            part = ids[start : start + longest]
            first, rest = (prompt_ids, part) if len(prompt_ids) else (part[:1], part[1:])
            if len(rest) < LEAST_RESPONSE or len(first) > r.max_prompt_tokens:
                left_out += 1
            elif len(prompts) < c.sequences:
                prompts.append(first)
                responses.append(rest)
            if len(prompt_ids):
                break  # what follows would stand behind another prompt than the one that is there
    if len(prompts) < 2:
        raise ConfigError(
            f'{name}: holds {len(prompts)} texts of at least {LEAST_RESPONSE} tokens behind a prompt of 1 to '
            f'rollout.max_prompt_tokens={r.max_prompt_tokens}; confidence needs two'
        )
    return Contexts(tuple(prompts), tuple(responses), left_out)


def _questions(file: Path, name: str) -> Iterator[str]:
    if file.suffix == '.txt':
        yield from (line for line in _read(file, name).splitlines() if line.strip())
        return
    for row in _rows(file, name):
        if 'prompt' not in row:
            raise ConfigError(f'{name}: a row has no "prompt", but {", ".join(row) or "nothing"}')
        yield row['prompt']


def _texts(file: Path, name: str) -> Iterator[tuple[str, str]]:
    if file.suffix == '.txt':
        yield '', _read(file, name)
        return
    for row in _rows(file, name):
        if 'text' not in row and not {'prompt', 'completion'} <= set(row):
            has = ', '.join(row) or 'nothing'
            raise ConfigError(f'{name}: a row needs "text", or "prompt" and "completion", and has {has}')
        yield ('', row['text']) if 'text' in row else (row['prompt'], row['completion'])


def _rows(file: Path, name: str) -> Iterator[dict[str, str]]:
    """The text columns of a .jsonl file's rows."""
    if file.suffix != '.jsonl':
        raise ConfigError(f'{name}: must end in .txt or .jsonl')
    for number, line in enumerate(_read(file, name).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f'{name}: line {number} is not JSON ({error})') from error
        if not isinstance(row, dict):
            raise ConfigError(f'{name}: line {number} must be a JSON object')
        yield {key: value for key, value in row.items() if isinstance(value, str)}


def _read(file: Path, name: str) -> str:
    if not file.is_file():
        raise ConfigError(f'{name}: no such file')
    try:
        return file.read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'{name}: cannot be read ({error})') from error
