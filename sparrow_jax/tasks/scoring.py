"""Judging one answer at a time; runs in the helper processes of `verifiers` and imports neither jax nor TensorFlow.

Requests come over the connection in batches, one reply goes back for each as soon as it is known: the parent times
every answer by them.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import logging
import math
import resource
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks import generated
from sparrow_jax.tasks.workers import Failure

READY = 'ready'
NO_VERDICT = None  # reply for an answer that needed more memory than a worker may have
_LONGEST_ANSWER = 2000  # characters; parsing what a policy writes beyond that takes a worker's whole time limit
_MEMORY_BYTES = 8 << 30  # address space of a worker that runs this package's own verifiers


def serve(connection: Connection, function: str, tasks: bool, mathematics: bool) -> None:
    """Judges until the parent closes the connection.

    Args:
      connection: sends READY once; then receives lists of requests (tuples of the name of a judge below and its
        arguments) and sends one reply a request: a float, NO_VERDICT or a Failure.
      function: 'module:function' of the user, or ''.
      tasks, mathematics: which verifiers to load beforehand, so that the first answer's time is not spent on imports.
    """
    judges: dict[str, Callable[..., float | Failure | None]] = {'task': judge_task, 'math': judge_math}
    if function:
        judges['function'] = functools.partial(judge_function, function, load_function(function))
    elif sys.platform == 'linux':
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    if tasks:
        importlib.import_module('reasoning_gym')
    # Time is kept by the parent, for every kind of answer alike: math-verify's own alarm would call a time-out wrong.
    # It warns that its alarm is off.
    logging.getLogger('math_verify').setLevel(logging.ERROR)
    if mathematics:
        judge_math(r'\frac{1}{2}', '0.5')
    connection.send(READY)
    while True:
        try:
            batch = connection.recv()
        except EOFError:
            return
        for kind, *arguments in batch:
            connection.send(judges[kind](*arguments))


def judge_task(task: str, options: str, entry: Mapping[str, Any], answer: str) -> float | None:
    """The task's own score of `answer`, from 0 to 1.

    Args:
      task: a reasoning-gym task.
      options: JSON of the fields its problem was made with; some tolerances depend on them.
      entry: question, answer and metadata as the task made them.
      answer: what stands in the completion. One that the task's parser trips over scores 0.
    """
    scorer = _task_scorer(task, options)
    try:
        return float(scorer(answer, entry))
    except MemoryError:
        return NO_VERDICT
    except (
        Exception
    ):  # the parsers of these tasks meet arbitrary text and raise what they like; such an answer is wrong
        return 0.0


@functools.lru_cache(maxsize=64)
def _task_scorer(task: str, options: str) -> Callable[[str, Any], float]:
    config = dataclasses.replace(generated.task_config(task, json.loads(options or '{}')), seed=0, size=500)
    return generated.dataset_class(task)(config=config).score_answer


def judge_math(reference: str, answer: str) -> float | None:
    """1 if math-verify finds `answer` equal to `reference`, else 0.

    An answer of more than _LONGEST_ANSWER characters that is not the reference itself is wrong without being parsed.
    """
    from math_verify import verify

    answer = answer.strip()
    if answer == reference.strip():
        return 1.0
    if len(answer) > _LONGEST_ANSWER:
        return 0.0
    try:
        return float(verify(_parse(reference), _parse(answer), timeout_seconds=None))
    except MemoryError:
        return NO_VERDICT
    except RecursionError:  # nested deeper than any answer is
        return 0.0


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> list:
    from math_verify import parse

    text = text.strip()
    for left, right in ((r'\[', r'\]'), (r'\(', r'\)')):
        if text.startswith(left) and text.endswith(right):
            text = text[2:-2]
    # Read as a whole, as LaTeX: of bare text with several numbers math-verify would take one.
    return parse(f'${text}$', parsing_timeout=None)


def load_function(name: str) -> Callable[[Mapping[str, Any], str], float]:
    """The user's reward function. Raises ConfigError with what went wrong, traceback included if its module raised."""
    field = f'reward.function={name!r}'
    module_name, _, function_name = name.partition(':')
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself, or one that it imports.
        raise ConfigError(f'{field}: {error}; it must be importable from where the command runs') from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f'{field}: importing {module_name} failed:\n{traceback.format_exc()}') from error
    function = getattr(module, function_name, None)
    if not callable(function):
        where = getattr(module, '__file__', None) or 'no file'
        raise ConfigError(f'{field}: {module_name} ({where}) has no function {function_name!r}')
    try:
        inspect.signature(function).bind({}, '')
    except TypeError as error:
        raise ConfigError(f'{field}: is called as {function_name}(problem, completion): {error}') from error
    except ValueError:  # a function of C that tells nothing about its arguments
        pass
    return function


def judge_function(
    name: str, function: Callable[[Mapping[str, Any], str], float], problem: Mapping[str, Any], completion: str
) -> float | Failure:
    """The user's function's value, checked; its errors come back as a Failure with their traceback."""
    where = f'reward.function={name!r}, problem {problem["index"]} ({problem["question"][:80]!r})'
    try:
        value = function(problem, completion)
    except (Exception, SystemExit):
        return Failure(f'{where}: raised\n{traceback.format_exc()}', mendable=True)
    try:
        if isinstance(value, str):
            raise TypeError
        value = float(value)
    except Exception:  # its __float__ may raise anything
        return Failure(f'{where}: returned {value!r:.200}; it must return a number', mendable=True)
    if not math.isfinite(value):
        return Failure(f'{where}: returned {value}; it must return a finite number', mendable=True)
    return value
