"""Problems that reasoning-gym generates, from its own tasks or from `trails`, which registers itself there.

`problems` calls `stream` and keeps what is new; the generator itself runs in a helper process with a fixed hash seed,
because several tasks iterate over sets and would otherwise give other problems in every process, hence on every host.
"""

import dataclasses
import difflib
import itertools
import json
import random
import time
from collections.abc import Generator, Mapping
from multiprocessing.connection import Connection
from typing import Any

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks.workers import Failure, WorkerGroup

TASK_PREFIX = 'reasoning_gym:'
_BLOCK = 10_000  # problems under one seed: tasks draw the i-th from seed + i, and a few prepare all `size` of them
_MESSAGE_ROWS = 64
_MESSAGE_S = 1.0


def parts(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Splits a task's options into those of each part of the mixture, which take turns problem by problem.

    Options are the task's own fields and three words beside them:
      level: a level of the task's curriculum: a number for all its attributes, or an object of numbers by attribute
        ('*' for the others). Fields given beside it win.
      mixture: a list of option objects, each laid over the common ones; repeat one for a larger share.
      eval: an option object for the held-out problems; `problems` takes it out before.
    """
    mixture = options.get('mixture', [{}])
    if not isinstance(mixture, list) or not mixture or not all(isinstance(part, Mapping) for part in mixture):
        raise ConfigError(f'data.options: mixture={mixture!r} must be a list of option objects')
    common = {name: value for name, value in options.items() if name != 'mixture'}
    merged = [{**common, **part} for part in mixture]
    for name in ('mixture', 'eval', 'seed', 'size'):
        if any(name in part for part in merged):
            hint = {'seed': '; data.seed sets it', 'size': '; data.train_examples sets it'}.get(name, '')
            raise ConfigError(f'data.options: {name!r} cannot stand there{hint}')
    return merged


def stream(task: str, options: Mapping[str, Any], seed: int) -> Generator[dict[str, str], None, None]:
    """Yields records (question, answer, metadata, options: all text) without end, the same ones for the same arguments.

    A task without a reference answer gives ''. Closing the iterator ends the helper process.
    """
    with WorkerGroup() as group:
        worker = group.start(
            'sparrow_jax.tasks.generated:generate', {'task': task, 'parts': parts(options), 'seed': seed}
        )
        while True:
            try:
                message = worker.connection.recv()
            except EOFError:
                raise RuntimeError(f'the generator of {task} died with exit code {group.kill(worker)}') from None
            if isinstance(message, Failure):
                raise message.error()
            yield from message


def generate(connection: Connection, task: str, parts: list[dict[str, Any]], seed: int) -> None:
    """Runs in the helper process: sends lists of records until the parent closes the connection."""
    import numpy as np

    configs = [task_config(task, part) for part in parts]
    labels = [json.dumps(part, sort_keys=True) for part in parts]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    rows: list[dict[str, str]] = []
    sent_s = time.monotonic()
    for block in itertools.count():
        try:
            block_seed = (seed + block * _BLOCK) % 2**32
            datasets = [
                dataset_class(task)(config=dataclasses.replace(config, seed=block_seed, size=_BLOCK))
                for config in configs
            ]
            first = datasets[0][0]
        except Exception as error:
            raise ConfigError(
                f'data.options: {task} makes no problem with {labels[0]}: {type(error).__name__}: {error}'
            ) from error
        for i in range(_BLOCK):
            k = i % len(datasets)
            try:
                item = datasets[k][i] if i else first
            except (IndexError, StopIteration):
                break  # the task has no more under this seed
            rows.append(
                {
                    'question': item['question'],
                    'answer': '' if item['answer'] is None else str(item['answer']),
                    'metadata': json.dumps(_plain(item['metadata'])),
                    'options': labels[k],
                }
            )
            if len(rows) == _MESSAGE_ROWS or time.monotonic() - sent_s > _MESSAGE_S:
                connection.send(rows)
                rows, sent_s = [], time.monotonic()


def task_config(task: str, part: Mapping[str, Any]) -> Any:
    """The task's configuration for one part of the mixture. Imports reasoning-gym: call it in a helper process.

    Raises ConfigError: no such task, level or field, or values that the task refuses.
    """
    from reasoning_gym.factory import CURRICULA, DATASETS

    from sparrow_jax.tasks import trails  # noqa: F401  (registers itself)

    tasks = sorted(set(DATASETS) - {'composite'})
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, n=5, cutoff=0.4)
        known = f'near names: {", ".join(near)}' if near else f'known: {", ".join(tasks)}'
        raise ConfigError(f'data.source={TASK_PREFIX + task!r}: reasoning-gym has no such task; {known}')
    config_class = DATASETS[task][1]
    fields = [f.name for f in dataclasses.fields(config_class) if f.name not in ('seed', 'size')]
    values = {name: value for name, value in part.items() if name != 'level'}
    for name in values:
        if name not in fields:
            raise ConfigError(f'data.options: {task} has no field {name!r}; it has {", ".join(fields)}')
    base = config_class()
    if 'level' in part:
        if task not in CURRICULA:
            raise ConfigError(f'data.options: level is set, but {task} has no curriculum; set its fields instead')
        base = _at_level(task, CURRICULA[task](), part['level'])
    try:
        config = dataclasses.replace(base, **values)
        if hasattr(config, 'validate'):
            config.validate()
    except Exception as error:
        raise ConfigError(f'data.options: {task} refuses {json.dumps(values)}: {error}') from error
    return config


def dataset_class(task: str) -> Any:
    """The class of a task that `task_config` knows."""
    from reasoning_gym.factory import DATASETS

    return DATASETS[task][0]


def _at_level(task: str, curriculum: Any, level: Any) -> Any:
    highest = {name: len(attribute.levels) - 1 for name, attribute in curriculum.attributes.items()}
    wanted = dict(level) if isinstance(level, Mapping) else {'*': level}
    for name, value in wanted.items():
        if name != '*' and name not in highest:
            raise ConfigError(f'data.options: {task} has no curriculum attribute {name!r}; it has {", ".join(highest)}')
        top = max(highest.values()) if name == '*' else highest[name]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= top:
            raise ConfigError(f'data.options: level {value!r} of {task} ({name}): must be a number from 0 to {top}')
    for name, top in highest.items():
        value = wanted.get(name, wanted.get('*'))
        if value is not None:
            curriculum.set_attr_level(name, min(value, top))
    return curriculum.generate_configuration()


# JSON knows neither tuples nor keys that are no text, and some tasks compare their metadata with `==`: those are
# written as tagged objects.
def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {'__tuple__': [_plain(v) for v in value]}
    if isinstance(value, set | frozenset):
        return {'__set__': [_plain(v) for v in sorted(value, key=repr)]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(v) for key, v in value.items()}
        return {'__items__': [[_plain(k), _plain(v)] for k, v in value.items()]}
    return value


def read_metadata(text: str) -> dict[str, Any]:
    """The metadata of a record, with the types that the task gave it."""
    return json.loads(text, object_hook=_typed)


def _typed(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == '__tuple__':
            return tuple(content)
        if tag == '__set__':
            return set(content)
        if tag == '__items__':
            return {k: v for k, v in content}
    return value
