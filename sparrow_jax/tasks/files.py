"""Problems from JSONL and Parquet files, in the layouts that public mathematics sets come in.

`problems` calls `read_file` with a path from the configuration. Nothing is repaired silently: a row that cannot be used
is an error that names it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks.generated import TASK_PREFIX

# DAPO-Math wraps every problem in these; the run's own data.instruction takes their place.
_DAPO_OPENING = 'Solve the following math problem step by step.'
_DAPO_CLOSING = 'Remember to put your answer on its own line after "Answer:".'


@dataclasses.dataclass(frozen=True)
class Layout:
    """Columns of a layout: of `question` and of `answer` the first that a file has; `mark` tells it from the others."""

    question: tuple[str, ...]
    answer: tuple[str, ...]
    mark: tuple[str, ...]


# In the order in which 'auto' tries them.
LAYOUTS = {
    'dapo_math': Layout(('prompt',), ('reward_model', 'solution'), ()),
    'math500': Layout(('problem',), ('answer',), ('subject', 'level')),
    'polaris': Layout(('problem', 'prompt'), ('answer', 'reward_model'), ('difficulty',)),
    'aime': Layout(('problem', 'Problem', 'question'), ('answer', 'Answer'), ('year',)),
    'amc': Layout(('problem', 'question'), ('answer',), ('url',)),
    'gsm8k': Layout(('question',), ('answer',), ()),
    'problem_answer': Layout(('problem', 'Problem', 'question'), ('answer', 'Answer'), ()),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One problem of a file; `metadata` holds its further columns, as far as they are text or numbers."""

    question: str
    answer: str
    source: str
    metadata: dict[str, Any]


def read_file(path: str | pathlib.Path, layout: str, field: str = 'data.source') -> list[Row]:
    """Reads every problem of a file, in its order.

    Args:
      path: a .jsonl or .parquet file.
      layout: a key of LAYOUTS, or 'auto': decided from the columns of the first row.
      field: the setting that named the file, for errors.

    Raises:
      ConfigError: no such file, another kind of file, no rows, a broken row (with its number), a missing column, an
      empty question or answer.
    """
    path = pathlib.Path(path).expanduser()
    if not path.is_file():
        raise ConfigError(f"{field}={str(path)!r}: no such file (a generated task is written '{TASK_PREFIX}<task>')")
    readers = {'.jsonl': _jsonl, '.parquet': _parquet}
    if path.suffix not in readers:
        raise ConfigError(f'{field}={str(path)!r}: must end in .jsonl or .parquet')
    rows = []
    for where, values in readers[path.suffix](path):
        if layout == 'auto':
            layout = detect(values, str(path))
        rows.append(_row(where, values, layout, path.stem))
    if not rows:
        raise ConfigError(f'{field}={str(path)!r}: holds no problems')
    return rows


def detect(row: Mapping[str, Any], path: str) -> str:
    """The layout of a file, from its first row."""
    for name, layout in LAYOUTS.items():
        if not (set(layout.question) & set(row) and set(layout.answer) & set(row) and set(layout.mark) <= set(row)):
            continue
        if name == 'gsm8k' and '####' not in str(row['answer']):
            continue
        return name
    raise ConfigError(
        f'{path}: columns {", ".join(row)} fit no known layout; name them problem and answer (and source)'
    )


def _jsonl(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open('rb') as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f'{path}:{number}'
            try:
                values = json.loads(line)
            except UnicodeDecodeError as error:
                raise ConfigError(f'{where}: not UTF-8 text ({error.reason})') from error
            except (ValueError, RecursionError) as error:  # ValueError: also a number of too many digits
                raise ConfigError(f'{where}: not valid JSON ({error})') from error
            if not isinstance(values, dict):
                raise ConfigError(f'{where}: must be a JSON object, not {type(values).__name__}')
            yield where, values


def _parquet(path: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield f'{path}: row {number}', values
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f'{path}: cannot be read as Parquet ({error})') from error


def _row(where: str, values: Mapping[str, Any], layout_name: str, stem: str) -> Row:
    layout = LAYOUTS[layout_name]
    question_column = _column(where, values, layout.question, layout_name)
    answer_column = _column(where, values, layout.answer, layout_name)
    question = _question(where, question_column, values[question_column])
    answer, extra = values[answer_column], {}
    if answer_column == 'reward_model':
        answer = answer.get('ground_truth') if isinstance(answer, Mapping) else None
    if layout_name == 'gsm8k':
        working, found, answer = str(answer).rpartition('####')
        if not found:
            raise ConfigError(f"{where}: {answer_column!r} has no final answer after '####', as the layout gsm8k has")
        extra = {'solution': working.strip()}
        answer = answer.strip().replace(',', '')
    answer = _answer(where, answer_column, answer)
    source = (
        values.get('source') or values.get('data_source') or (stem if layout_name == 'problem_answer' else layout_name)
    )
    if not isinstance(source, str) or source.startswith(TASK_PREFIX):
        raise ConfigError(f'{where}: source={source!r} must be text that does not begin with {TASK_PREFIX!r}')
    used = (question_column, answer_column, 'source', 'data_source')
    kept = {k: v for k, v in values.items() if k not in used and isinstance(v, str | int | float)}
    for text in (question, answer, source, *(v for v in kept.values() if isinstance(v, str))):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f'{where}: holds half a surrogate pair, which is no text') from error
    return Row(question, answer, source, {**kept, **extra})


def _column(where: str, values: Mapping[str, Any], names: Iterable[str], layout: str) -> str:
    for name in names:
        if name in values:
            return name
    raise ConfigError(
        f'{where}: no column {" or ".join(names)}, which the layout {layout} needs; it has {", ".join(values)}'
    )


def _question(where: str, column: str, value: Any) -> str:
    if isinstance(value, list):  # chat messages
        contents = [m.get('content') for m in value if isinstance(m, Mapping) and m.get('role') == 'user']
        value = contents[-1] if contents else None
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f'{where}: {column!r} must be text or chat messages, and not empty, not {value!r:.80}')
    value = value.strip()
    if value.startswith(_DAPO_OPENING) and '\n\n' in value:
        value = value.split('\n\n', 1)[1].removesuffix(_DAPO_CLOSING).strip()
    return value


def _answer(where: str, column: str, value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip() or value != value:
        raise ConfigError(f'{where}: {column!r} must hold the answer as text or a number, not {value!r:.80}')
    return str(value).strip()
