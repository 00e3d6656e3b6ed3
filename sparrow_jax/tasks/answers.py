"""Where the final answer stands in a completion.

Completions come from the sampler as text; what is found goes to the verifiers. Every function reads its text once,
whatever is in it: a policy can write megabytes of open braces.
"""

import dataclasses
import re

_THINK = re.compile(r'</?think>')
_BOX = re.compile(r'\\boxed\s*\{')
_BRACES = re.compile(r'\\.|[{}]', re.DOTALL)  # an escaped brace is text, not structure


@dataclasses.dataclass(frozen=True)
class Reading:
    """What a completion holds: its final answer (None: none was found), and whether it is well formed."""

    answer: str | None
    format_valid: bool


def read_answer(completion: str, answer_format: str, prompt_opens_think: bool = False) -> Reading:
    """Finds the final answer of a completion.

    The answer is looked for after the last `</think>`. A thought that never ends (cut off, say) has no answer behind
    it.

    Args:
      completion: the sampled text.
      answer_format: 'boxed' (the last \\boxed{...}) or 'tag' (the last <answer>...</answer>).
      prompt_opens_think: the prompt ended inside a thought, so `</think>` comes without its opening tag.

    Returns:
      The answer, stripped, and format_valid: every thought is opened and closed in turn and a non-empty answer was
      found.
    """
    inside, ordered, end = prompt_opens_think, True, 0
    for tag in _THINK.finditer(completion):
        opens = tag.group() == '<think>'
        ordered &= opens != inside
        inside, end = opens, tag.end()
    if inside:
        return Reading(None, False)
    find = {'boxed': last_boxed, 'tag': last_tagged}[answer_format]
    answer = find(completion[end:])
    return Reading(answer, ordered and answer is not None)


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...}, braces balanced; None without one, or if it is empty or never closed."""
    start = -1
    for match in _BOX.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth = 1
    for brace in _BRACES.finditer(text, start):
        depth += {'{': 1, '}': -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.start()].strip() or None
    return None


def last_tagged(text: str) -> str | None:
    """The content of the last <answer>...</answer>; None without one, or if it is empty."""
    end = text.rfind('</answer>')
    start = text.rfind('<answer>', 0, max(end, 0))
    if end < 0 or start < 0:
        return None
    return text[start + len('<answer>') : end].strip() or None
