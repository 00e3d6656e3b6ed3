"""From a problem to the tokens that the sampler starts from, and from sampled tokens back to text.

Problems come from `problems`; the token lists go to the engine (training, evaluation) or, with a worked solution behind
them, to the supervised phase. What may be cut or skipped is the caller's to decide: nothing is truncated here.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sparrow_jax.config import ConfigError, DataConfig, TokenizerConfig
from sparrow_jax.tasks.problems import Problem, ProblemSet
from sparrow_jax.tasks.tokenizer import end_ids, load_tokenizer

_OPEN, _CLOSE = '<think>', '</think>'
_PROBE = 'What is 271 + 828?'  # stands in no template


class PromptEncoder:
    """Encodes problems with a checkpoint's chat template.

    Args:
      tokenizer_config, data_config: the run's sections; read are the path, the template and its options, the system
        prompt, the end tokens, and data.instruction, which follows the problem's text on a line of its own.
      model_path: model.path, '' for random weights: the tokenizer stands there if tokenizer.path is empty, and its
        generation_config names end tokens.
      tokenizer: one that is loaded already; else it is read from the path.

    Attributes:
      tokenizer: the transformers tokenizer.
      chat_template: the template in use, as text.
      end_ids: every id that ends a response (Qwen3 has two), sorted.
      end_id: the one that ends a worked solution: the tokenizer's own.
      pad_id: fills rows. May equal an end id, so masks must come from lengths and never from comparing ids.
      opens_think: the prompt ends inside a thought, so completions hold `</think>` without its opening tag.

    Raises:
      ConfigError: no tokenizer, no chat template, a template that fails, or an end token that is not in the vocabulary.
    """

    def __init__(
        self, tokenizer_config: TokenizerConfig, data_config: DataConfig, model_path: str, *, tokenizer: Any = None
    ):
        path = tokenizer_config.path or model_path
        if tokenizer is None:
            if not path:
                raise ConfigError("tokenizer.path='': set it, since there is no model.path to take a tokenizer from")
            tokenizer = load_tokenizer(path)
        self._config = tokenizer_config
        self._instruction = data_config.instruction
        self.tokenizer = tokenizer
        self.chat_template = _chat_template(tokenizer_config, tokenizer, path)
        self.end_ids = end_ids(tokenizer, model_path or tokenizer_config.path, tokenizer_config.end_tokens)
        own = tokenizer.eos_token_id
        self.end_id = own if own in self.end_ids else self.end_ids[0]
        self.pad_id = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if _PROBE not in self._render(_PROBE, generation=True):
            raise ConfigError(
                f'tokenizer.chat_template={tokenizer_config.chat_template!r}: the template leaves out what the user '
                'says (messages[...].content)'
            )
        # Only what the template itself adds counts: a problem may speak of thoughts, too.
        opening = self._render('0', generation=True).removeprefix(self._render('0', generation=False))
        self.opens_think = opening.rfind(_OPEN) > opening.rfind(_CLOSE)

    def text(self, problem: Problem) -> str:
        """The prompt as text, up to where the response begins."""
        question = f'{problem.question}\n{self._instruction}' if self._instruction else problem.question
        return self._render(question, generation=True)

    def encode(self, problem: Problem) -> list[int]:
        """The prompt's token ids, unpadded."""
        return self._ids(self.text(problem))

    def encode_worked(self, problem: Problem, solution: str) -> tuple[list[int], list[int]]:
        """Prompt ids and response ids of a worked solution; the response ends with `end_id`.

        They are encoded apart, as the sampler would see them. A solution brings its thought as <think>...</think>;
        where the prompt opens the thought already, the solution's opening tag is left out.
        """
        if self.opens_think:
            if _CLOSE not in solution:
                raise ConfigError(
                    'the chat template opens a thought, and a worked solution does not close it; set '
                    'tokenizer.template_options so that the template opens none'
                )
            solution = solution.removeprefix(_OPEN).lstrip('\n')
        return self.encode(problem), [*self._ids(solution), self.end_id]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of sampled ids without the end ids behind it; other special tokens stay: verifiers look for some."""
        ids = [int(i) for i in ids]
        while ids and ids[-1] in self.end_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _ids(self, text: str) -> list[int]:
        # The template has written the special tokens already.
        return list(self.tokenizer(text, add_special_tokens=False)['input_ids'])

    def _render(self, question: str, *, generation: bool) -> str:
        messages = [{'role': 'user', 'content': question}]
        if self._config.system_prompt:
            messages.insert(0, {'role': 'system', 'content': self._config.system_prompt})
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.chat_template,
                tokenize=False,
                add_generation_prompt=generation,
                **self._config.template_options,
            )
        except Exception as error:  # jinja2's own, and what an expression of the template raises
            raise ConfigError(
                f'tokenizer.chat_template={self._config.chat_template!r}: the template fails with '
                f'tokenizer.template_options={dict(self._config.template_options)}: {error}'
            ) from error


def _chat_template(config: TokenizerConfig, tokenizer: Any, path: str) -> str:
    if config.chat_template:
        file = pathlib.Path(config.chat_template).expanduser()
        try:
            return file.read_text(encoding='utf-8')
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f'tokenizer.chat_template={config.chat_template!r}: cannot be read ({error})') from error
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        template = template.get('default')
    if not template:
        raise ConfigError(
            f"tokenizer.chat_template='': the tokenizer {path or '(given)'} brings no chat template; "
            'set it to the path of a .jinja file'
        )
    return template


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Training prompts of one step.

    Attributes:
      problems, prompt_ids: in order.
      next_position: where the next step begins; the only state of the data order.
      skipped: problems passed over because their prompt was too long.
    """

    problems: tuple[Problem, ...]
    prompt_ids: tuple[list[int], ...]
    next_position: int
    skipped: int


def take_prompts(
    problems: ProblemSet, encoder: PromptEncoder, position: int, count: int, max_prompt_tokens: int
) -> Prompts:
    """The next `count` training problems from `position` on whose prompts have at most `max_prompt_tokens` tokens.

    A function of its arguments alone, so that a resumed run and every host of a run take the same.

    Raises:
      ConfigError: no problem of a whole epoch fits.
    """
    chosen: list[Problem] = []
    ids: list[list[int]] = []
    skipped = since = 0
    while len(chosen) < count:
        problem = problems.at(position)
        position += 1
        encoded = encoder.encode(problem)
        if len(encoded) <= max_prompt_tokens:
            chosen.append(problem)
            ids.append(encoded)
            since = 0
            continue
        skipped += 1
        since += 1
        if since == 2 * len(problems):  # two epochs' ends may meet; a whole one lies between
            raise ConfigError(
                f'rollout.max_prompt_tokens={max_prompt_tokens}: no training problem has so short a prompt '
                f'(the last one has {len(encoded)} tokens)'
            )
    return Prompts(tuple(chosen), tuple(ids), position, skipped)


def fitting_prompts(
    problems: Iterable[Problem], encoder: PromptEncoder, max_prompt_tokens: int
) -> Iterator[tuple[Problem, list[int]]]:
    """The problems of a split in their own order, with their prompt ids; those with longer prompts are left out."""
    for problem in problems:
        encoded = encoder.encode(problem)
        if len(encoded) <= max_prompt_tokens:
            yield problem, encoded
