"""Data sets of problems: prepared once, read at random.

A source named by the configuration (a reasoning-gym task or a file) is written to data.cache_dir as a TFDS data set in
array_record format, in a folder named after everything that determines its content. Training reads single problems by
position; held-out problems are for evaluation. TensorFlow is not used, neither to write nor to read.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from sparrow_jax.config import ConfigError, DataConfig
from sparrow_jax.json_files import read_object
from sparrow_jax.tasks import files, generated
from sparrow_jax.tasks.generated import TASK_PREFIX

SPLITS = ('train', 'held_out')
_FORMAT = 1  # of the prepared data; counts in the folder's name
_COLUMNS = ('question', 'answer', 'source', 'metadata', 'options')
_EVAL_SEED = 1 << 31  # held-out problems of another generator are drawn this far from the training ones
_LOG_S = 30.0
_SUMMARY = 'prepared.json'


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem.

    Attributes:
      index: its place in its split.
      question: the text, without data.instruction.
      answer: the reference answer; '' where a task has none.
      source: 'reasoning_gym:<task>', or what the file says.
      metadata: of generated problems what the task's verifier needs; of files the further columns.
      options: of generated problems the JSON of the task's options.
    """

    index: int
    question: str
    answer: str
    source: str
    metadata: dict[str, Any]
    options: str = ''


class PreparedProblems(tfds.core.GeneratorBasedBuilder):
    """Writes problems that are already chosen and split."""

    VERSION = tfds.core.Version(f'{_FORMAT}.0.0')
    # TFDS looks beside it for download checksums; there are none, and looking needs a package that it does not install.
    code_path = None

    def __init__(self, *, splits: dict[str, list[dict[str, str]]], **kwargs: Any):
        self._splits = splits
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({name: tfds.features.Text() for name in _COLUMNS})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        del dl_manager  # nothing is downloaded
        return {name: self._generate_examples(rows) for name, rows in self._splits.items() if rows}

    def _generate_examples(self, rows: list[dict[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
        yield from enumerate(rows)


class ProblemSet:
    """The problems of one split, read from disk one by one.

    Attributes:
      fingerprint: a hash of the texts and answers of both splits; equal on all hosts if they prepared the same data.
    """

    def __init__(self, source: Any, seed: int, fingerprint: str):
        self._source = source
        self._seed = seed
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f'problem {index} of {len(self)}')
        record = {name: value.decode() for name, value in self._source[index].items()}
        metadata = generated.read_metadata(record.pop('metadata'))
        return Problem(index=index, metadata=metadata, **record)

    def __iter__(self) -> Iterator[Problem]:
        return (self[i] for i in range(len(self)))

    def at(self, position: int) -> Problem:
        """The problem at a position of the run's endless order: a function of data.seed and the position alone."""
        return self[order(self._seed, position, len(self))]


def order(seed: int, position: int, length: int) -> int:
    """Which of `length` problems stands at `position`: every epoch is a permutation of its own.

    Args:
      seed: data.seed.
      position: 0 is the run's first problem; epoch = position // length.
      length: problems of the split.
    """
    epoch, place = divmod(position, length)
    return int(_permutation(seed % 2**32, epoch, length)[place])


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    # RandomState's stream is frozen for all future versions of NumPy; a Generator's is not, and a resumed run must go
    # on alike.
    return np.random.RandomState([seed, epoch]).permutation(length)


def load_problems(data: DataConfig, split: str) -> ProblemSet:
    """Opens a split ('train' or 'held_out'), preparing the data first if no run has done so.

    Any number of processes may do this at once: each prepares in a folder of its own and the first to finish gives it
    its name. Held-out problems are, with an empty data.eval_source, the first of the generator (made with the options
    under `eval`, if there are any), or those of the file with the smallest hash of their text; else those of
    data.eval_source, whose layout is always found from its columns. No training problem has the text of a held-out one,
    spacing and case aside, and none stands there twice.

    Raises:
      ConfigError: no such task or file, bad options, a broken file (see `files.read_file`), or fewer distinct problems
      than asked for.
    """
    if split not in SPLITS:
        raise ValueError(f'{split!r}: must be one of {SPLITS}')
    key = _key(data)
    name = (
        data.source.removeprefix(TASK_PREFIX) if data.source.startswith(TASK_PREFIX) else pathlib.Path(data.source).stem
    )
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    folder = pathlib.Path(data.cache_dir).expanduser() / f'{name}-{digest}'
    if not (folder / _SUMMARY).exists():
        _prepare(data, key, folder)
    try:
        summary = read_object(folder / _SUMMARY)
        source = tfds.builder_from_directory(folder).as_data_source(split=split) if summary['problems'][split] else []
        problems = ProblemSet(source, data.seed, summary['fingerprint'])
        for index in {0, len(problems) - 1} if len(problems) else ():
            problems[index]  # a file that is gone or cut off shows at the first record that is read
    except Exception as error:  # tfds and array_record raise what a broken file makes them trip over
        raise ConfigError(
            f'{folder}: the prepared data is broken ({error}); remove the folder, it is made again'
        ) from error
    return problems


def _key(data: DataConfig) -> dict[str, Any]:
    """Everything that determines the prepared data."""
    key: dict[str, Any] = {
        'format': _FORMAT,
        'train_examples': data.train_examples,
        'eval_examples': data.eval_examples,
    }
    for field, source in (('source', data.source), ('eval_source', data.eval_source)):
        path = pathlib.Path(source).expanduser()
        if source.startswith(TASK_PREFIX):
            key[field] = source
            key |= {'seed': data.seed, 'options': _options(data)}
            key['reasoning_gym'] = importlib.metadata.version('reasoning_gym')
        elif source and path.is_file():
            with path.open('rb') as content:
                key[field] = hashlib.file_digest(content, 'sha256').hexdigest()
            key['layout'] = data.layout
            key[f'{field}_name'] = path.name  # the file's name is the problems' source where it states none
    return key


def _options(data: DataConfig) -> dict[str, Any]:
    options = json.loads(data.options or '{}')
    if not isinstance(options, dict):
        raise ConfigError(f'data.options={data.options!r}: must be a JSON object')
    return options


def _prepare(data: DataConfig, key: dict[str, Any], folder: pathlib.Path) -> None:
    start_s = time.monotonic()
    splits = _choose(data)
    digest = hashlib.sha256(json.dumps([[[r['question'], r['answer']] for r in splits[s]] for s in SPLITS]).encode())
    summary = {
        'key': key,
        'problems': {name: len(rows) for name, rows in splits.items()},
        'fingerprint': digest.hexdigest(),
    }
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(prefix='.preparing-', dir=folder.parent)
    except OSError as error:
        raise ConfigError(f'data.cache_dir={str(folder.parent)!r}: cannot be written ({error})') from error
    with work as work_dir:
        builder = PreparedProblems(splits=splits, data_dir=work_dir, file_format='array_record')
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):  # it announces a download
            try:
                builder.download_and_prepare()
            except OSError as error:
                raise ConfigError(f'data.cache_dir={str(folder.parent)!r}: cannot be written ({error})') from error
        prepared = pathlib.Path(builder.data_dir)
        (prepared / _SUMMARY).write_text(json.dumps(summary, indent=2, sort_keys=True) + '\n')
        try:
            os.rename(prepared, folder)
        except OSError:
            if not (folder / _SUMMARY).exists():
                raise
            return  # another process was first, with the same content
    logging.info('Prepared %s in %.1f s: %s.', folder, time.monotonic() - start_s, summary['problems'])


def _choose(data: DataConfig) -> dict[str, list[dict[str, str]]]:
    """The records of both splits."""
    options = _options(data) if data.source.startswith(TASK_PREFIX) or data.eval_source.startswith(TASK_PREFIX) else {}
    eval_options = options.pop('eval', None)
    if eval_options is not None and not isinstance(eval_options, dict):
        raise ConfigError(
            f'data.options: eval={eval_options!r} must be an object, the options of the held-out problems'
        )
    if min(data.train_examples, data.eval_examples) < 0:
        raise ConfigError('data.train_examples and data.eval_examples must not be negative')
    seen: set[str] = set()
    if not data.source.startswith(TASK_PREFIX):
        rows = _distinct_rows(files.read_file(data.source, data.layout))
        held_out = _held_out_elsewhere(data, options, eval_options, seen) if data.eval_source else _smallest(data, rows)
        taken = {_identity(row['question']) for row in held_out}
        rows = [row for row in rows if _identity(row['question']) not in taken]
        train = _first(
            rows, data.train_examples, 'data.train_examples', data.source, f' beside {len(held_out)} held-out ones'
        )
        return {'train': train, 'held_out': held_out}
    if data.train_examples == 0:
        raise ConfigError(f'data.train_examples=0: {data.source} has no end; say how many problems to generate')
    if data.eval_source or eval_options is not None:
        held_out = _held_out_elsewhere(data, options, eval_options, seen)
        train = _generate(data, data.source, options, data.seed, data.train_examples, seen)
        return {'train': train, 'held_out': held_out}
    both = _generate(data, data.source, options, data.seed, data.eval_examples + data.train_examples, seen)
    return {'train': both[data.eval_examples :], 'held_out': both[: data.eval_examples]}


def _held_out_elsewhere(
    data: DataConfig, options: dict, eval_options: dict | None, seen: set[str]
) -> list[dict[str, str]]:
    """Held-out problems of another stream or file than the training ones; their texts go to `seen`."""
    source = data.eval_source or data.source
    if source.startswith(TASK_PREFIX):
        if data.eval_source and data.eval_examples == 0:
            raise ConfigError(f'data.eval_examples=0: {source} has no end; say how many problems to generate')
        if eval_options is None:
            # Another task has other fields: without options of its own it gets its defaults.
            eval_options = options if source == data.source else {}
        return _generate(data, source, eval_options, data.seed + _EVAL_SEED, data.eval_examples, seen)
    rows = _distinct_rows(files.read_file(source, 'auto', 'data.eval_source'))
    rows = _first(rows, data.eval_examples, 'data.eval_examples', source, '')
    seen.update(_identity(row['question']) for row in rows)
    return rows


def _generate(
    data: DataConfig, source: str, options: dict, seed: int, count: int, seen: set[str]
) -> list[dict[str, str]]:
    """The first `count` generated problems whose texts are not in `seen`, to which they are added."""
    rows: list[dict[str, str]] = []
    if count == 0:
        return rows
    beside = f' beside {len(seen)} held-out ones' if seen else ''
    repeats, patience, tried, log_s = 0, max(1000, count), 0, time.monotonic() + _LOG_S
    with contextlib.closing(generated.stream(source.removeprefix(TASK_PREFIX), options, seed)) as stream:
        for record in stream:
            tried += 1
            identity = _identity(record['question'])
            if identity in seen:
                repeats += 1
                if repeats == patience:
                    raise ConfigError(
                        f'{source}: only {len(rows)} distinct problems in {tried} tries with options '
                        f'{json.dumps(options)}{beside}, of {count} wanted '
                        f'(data.train_examples={data.train_examples}, data.eval_examples={data.eval_examples}); '
                        'ask for fewer, or widen data.options'
                    )
                continue
            repeats = 0
            seen.add(identity)
            rows.append({**record, 'source': source})
            if len(rows) == count:
                break
            if time.monotonic() > log_s:
                logging.info('%s: %d of %d problems generated.', source, len(rows), count)
                log_s = time.monotonic() + _LOG_S
    return rows


def _smallest(data: DataConfig, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The eval_examples rows whose text has the smallest hash: rows added to a file later hardly move the choice."""
    if data.eval_examples >= len(rows):
        raise ConfigError(
            f'data.eval_examples={data.eval_examples}: {data.source} has only {len(rows)} distinct problems, and some '
            'must be left to train on; lower it, or set data.eval_source'
        )
    digests = [hashlib.sha256(_identity(row['question']).encode()).digest() for row in rows]
    chosen = sorted(sorted(range(len(rows)), key=digests.__getitem__)[: data.eval_examples])
    return [rows[i] for i in chosen]


def _first(rows: list[dict[str, str]], count: int, field: str, source: str, aside: str) -> list[dict[str, str]]:
    if count > len(rows) or not rows:
        raise ConfigError(f'{field}={count}: {source} has {len(rows)} distinct problems{aside}; 0 takes all')
    return rows[: count or None]


def _distinct_rows(rows: Iterable[files.Row]) -> list[dict[str, str]]:
    distinct: dict[str, dict[str, str]] = {}
    for row in rows:
        record = dataclasses.asdict(row) | {'metadata': json.dumps(row.metadata), 'options': ''}
        distinct.setdefault(_identity(row.question), record)
    return list(distinct.values())


def _identity(question: str) -> str:
    """What makes two problems the same: their text, spacing and case aside."""
    return ' '.join(question.casefold().split())
