"""The folder of one run: who may write into it, and where its files are.

A command opens it once with the validated configuration (`Workdir.open`), which writes `config.json` and holds a lock
until `close`; `metrics.py` and `checkpoint.py` write below it. Commands that only read (report, export) use
`Workdir.existing` and take no lock.

    config.json      the configuration of the run      checkpoints/   see checkpoint.py
    metrics.jsonl    one object per step               tensorboard/   the same numbers as events
    samples.jsonl    some answers of each step         report.html    see the report command
    alpha_histogram.jsonl    tokens in each cell of alpha, see sparsity/tail.py
"""

import errno
import fcntl
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from sparrow_jax.config import ConfigError, RunConfig, differing_fields, resolve, to_json, with_new_fields
from sparrow_jax.console import notice_once
from sparrow_jax.json_files import read_object

CONFIG_NAME = 'config.json'
METRICS_NAME = 'metrics.jsonl'
SAMPLES_NAME = 'samples.jsonl'
HISTOGRAM_NAME = 'alpha_histogram.jsonl'
REPORT_NAME = 'report.html'
CHECKPOINTS_NAME = 'checkpoints'
LOCK_NAME = '.lock'

# A resumed run may change these: how long it goes on and what ends it, what it writes, and where it computes, but never
# what a step computes (under an adaptive schedule the number of data shards decides which sequences are measured).
MAY_CHANGE_ON_RESUME = ('steps', 'guard', 'log', 'checkpoint', 'parallel', 'calibrate')

_held: set[Path] = set()  # folders locked by this process: POSIX locks do not exclude a process from itself


class Workdir:
    """An opened work directory; a context manager that gives the lock back.

    Attributes:
        path: the folder.
        resumed: True where `config.json` was there before, from an earlier start of the same run.
        primary: False on every process of a multi-host run but the first; such a process writes nothing.
    """

    def __init__(self, path: Path, *, resumed: bool, primary: bool, lock: int | None):
        self.path = path
        self.resumed = resumed
        self.primary = primary
        self._lock = lock

    @property
    def config_file(self) -> Path:
        return self.path / CONFIG_NAME

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS_NAME

    @property
    def samples_file(self) -> Path:
        return self.path / SAMPLES_NAME

    @property
    def histogram_file(self) -> Path:
        return self.path / HISTOGRAM_NAME

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS_NAME

    @property
    def tensorboard(self) -> Path:
        return self.path / 'tensorboard'

    @property
    def report_file(self) -> Path:
        return self.path / REPORT_NAME

    @classmethod
    def open(
        cls,
        path: str,
        run: RunConfig,
        command: str,
        *,
        may_change: Sequence[str] = MAY_CHANGE_ON_RESUME,
        primary: bool = True,
    ) -> Self:
        """Creates the folder of a run or takes up an earlier start of the same run.

        Args:
            path: a local or mounted folder; created with its parents where absent.
            run: the configuration, stored in `config.json`.
            command: name of the command, shown to whoever finds the folder in use.
            may_change: top-level fields and sections that may differ from the stored `config.json`. With the default
                the new values are stored; a command that passes its own list (evaluation with other sampling, say)
                leaves the stored ones.
            primary: `jax.process_index() == 0`; other processes check the configuration and write nothing.
        Raises:
            ConfigError: the path is a file, cannot be written, holds something else, holds results of another
                configuration, or is in use by another process. Nothing in the folder has been changed then.
        """
        folder = _local_folder(path)
        _refuse_foreign(folder)
        resumed = _check_same_run(folder, run, may_change)
        if not primary:
            return cls(folder, resumed=resumed, primary=False, lock=None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(folder, command)
        except OSError as error:
            raise ConfigError(
                f'--workdir={path}: cannot write there ({error.strerror}); choose another folder'
            ) from error
        try:
            # Again: another process may have begun between the check above and the lock.
            resumed = _check_same_run(folder, run, may_change)
            if not resumed or tuple(may_change) == MAY_CHANGE_ON_RESUME:
                write_atomically(folder / CONFIG_NAME, to_json(run))
        except BaseException:
            _release(folder, lock)
            raise
        return cls(folder, resumed=resumed, primary=True, lock=lock)

    @classmethod
    def existing(cls, path: str) -> tuple[Self, RunConfig]:
        """The folder and configuration of an earlier run, for reading only: no lock is taken, nothing is written.

        Raises ConfigError where there is no `config.json`.
        """
        folder = _local_folder(path)
        stored = _stored_config(folder)
        if stored is None:
            raise ConfigError(f'--workdir={path}: no {CONFIG_NAME} there; give the folder of an earlier run')
        try:
            run = resolve(stored)
        except ConfigError as error:  # written by another version, or edited
            raise ConfigError(f'{folder / CONFIG_NAME}: {error}') from error
        return cls(folder, resumed=True, primary=True, lock=None), run

    def close(self) -> None:
        """Gives the lock back; the folder can be opened again."""
        if self._lock is not None:
            _release(self.path, self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, so that a reader, or a crash, sees the old content or the new, never a part."""
    temporary = path.with_name(f'.{path.name}.{os.getpid()}')
    try:
        with open(temporary, 'wb') as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _local_folder(path: str) -> Path:
    if not path:
        raise ConfigError(
            '--workdir: missing; give the folder in which the run keeps its results, e.g. --workdir=runs/first'
        )
    if '://' in path:
        raise ConfigError(
            f'--workdir={path}: must be a local or mounted folder (mount the bucket, with gcsfuse for example)'
        )
    folder = _expanded(path, '--workdir').absolute()
    for part in (folder, *folder.parents):
        if part.exists():
            if not part.is_dir():
                raise ConfigError(f'--workdir={path}: {part} is a file; give a folder')
            break
    return folder


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists() or (folder / CONFIG_NAME).exists():
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ConfigError(f'--workdir={folder}: cannot be read ({error.strerror}); choose another folder') from error
    # A start that was killed before its config.json was complete leaves these two.
    foreign = [name for name in names if name != LOCK_NAME and not name.startswith(f'.{CONFIG_NAME}.')]
    if foreign:
        raise ConfigError(
            f'--workdir={folder}: holds something else ({foreign[0]}, no {CONFIG_NAME}); give a new or empty folder'
        )


def _stored_config(folder: Path, run: RunConfig | None = None) -> Mapping[str, Any] | None:
    """Of an earlier start, with `config.with_new_fields`."""
    file = folder / CONFIG_NAME
    if not file.exists():
        return None
    try:
        return with_new_fields(read_object(file), str(file), run)
    except ConfigError as error:
        raise ConfigError(f'{error}; give another --workdir') from error


def _check_same_run(folder: Path, run: RunConfig, may_change: Sequence[str]) -> bool:
    """Whether the folder holds an earlier start of `run`; raises ConfigError where it holds results of another run."""
    stored = _stored_config(folder, run)
    if stored is None:
        return False
    changed = differing_fields(stored, json.loads(to_json(run)))
    lines = [line for line in changed if line.split(':')[0].split('.')[0] not in may_change]
    if lines and not _has_results(folder):
        return False  # a start that failed on a setting, which is mended now
    if lines:
        raise ConfigError(
            f'--workdir={folder}: belongs to another configuration; give another --workdir, or undo these changes (a '
            'run goes on with the overrides that it began with; defaults may have changed since):\n  '
            + '\n  '.join(lines)
            + f'\nthese flags undo them: {" ".join(map(_flag_of, lines))}'
        )
    return True


def _flag_of(line: str) -> str:
    """That gives a field its old value, of a line of `differing_fields`."""
    field, change = line.split(': ', 1)
    return shlex.quote(f'--config.{field}={change.split(" -> ")[0].strip(chr(39))}')


def _has_results(folder: Path) -> bool:
    metrics, checkpoints = folder / METRICS_NAME, folder / CHECKPOINTS_NAME
    return (metrics.exists() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _take_lock(folder: Path, command: str) -> int | None:
    """Locks the folder for this process until it ends, however it ends; None where the file system has no locks.

    A POSIX lock (not flock): worker processes do not inherit it, so one that outlives a killed run does not block the
    resume.
    """
    in_use = '--workdir={}: in use by {}; wait for it, stop it, or give another --workdir'
    if folder in _held:
        raise ConfigError(in_use.format(folder, 'this process'))
    handle = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 200).decode(errors='replace').strip() or 'another process'
        os.close(handle)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise ConfigError(in_use.format(folder, holder)) from error
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        notice_once(
            f'The file system of {folder} has no locks: make sure that no second process runs in this work directory.'
        )
        return None
    os.ftruncate(handle, 0)
    os.write(handle, f'{command}, process {os.getpid()} on {os.uname().nodename}\n'.encode())
    _held.add(folder)
    return handle


def _release(folder: Path, lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
        _held.discard(folder)


def results_folder(path: str) -> Path:
    """A folder to add results to: that of a run, or one that is made; the run in it may still be training.

    Raises ConfigError where the path is a file or cannot be written, or the folder holds something else than a run or
    results.
    """
    folder = _local_folder(path)
    if not (folder / CONFIG_NAME).exists() and not (folder / 'evaluation.jsonl').exists():
        _refuse_foreign(folder)
    return _made(folder, f'--workdir={path}')


def empty_folder(path: str, flag: str) -> Path:
    """A folder to write into, made if absent. Raises ConfigError, naming the flag, unless it is absent or empty."""
    folder = _expanded(path, flag)
    if folder.is_file():
        raise ConfigError(f'{flag}={path}: is a file; give a folder')
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f'{flag}={path}: is not empty; give a new folder')
    return _made(folder, f'{flag}={path}')


def _made(folder: Path, what: str) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'{what}: cannot be written ({error.strerror}); choose another folder') from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f'{what}: cannot be written (no permission, or read-only); choose another folder')
    return folder


def _expanded(path: str, flag: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f'{flag}={path}: no such user; write the folder out') from error
