"""The shared entry of every `python -m sparrow_jax.<command>`.

Reads `--config=configs/x.py[:argument]`, overrides `--config.section.field=value` and `--workdir`, gives the command
a validated `RunConfig`, and turns what the user can mend into one sentence on standard error. Nothing is written
here.

Exit codes: what the command returns (None is 0); 2 for a mistake in flags, settings, files or folders (`ConfigError`);
130 after Ctrl-C; 1 for other exceptions, which keep their traceback: they are faults of the code. Over several
processes, all end with the sentence and the code of the first that fails.
"""

import difflib
import errno
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import absl.logging
from absl import flags
from ml_collections import ConfigDict, config_flags

from sparrow_jax.config import ConfigError, RunConfig, resolve
from sparrow_jax.parallel import failures

EXIT_FAULT = 1  # of the code
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
# Full, read-only or failing: no fault of the code, wherever it is met.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG)


def run(
    main: Callable[..., int | None],
    *,
    workdir_required: bool = True,
    config_required: bool = True,
    uses_devices: bool = True,
    uses_jax: bool = True,
    define_flags: Callable[[flags.FlagValues], None] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Parses the command line, calls `main` and exits the process.

    Args:
        main: called as `main(run: RunConfig, workdir: str, **more)`; `workdir` is '' where it is not required and not
            given. With `config_required=False` (commands that read a work directory) it is called as `main(workdir,
            **more)`.
        workdir_required, config_required: whether the command works without the flag.
        uses_devices: whether the command runs on the devices of the configuration, with all processes that it names.
        uses_jax: whether it uses JAX at all; if not, its import is spared.
        define_flags: defines further flags on the given `FlagValues`, for example
            `flags.DEFINE_string('prompt', None, 'the question', flag_values=values)`; `main` gets them as keyword
            arguments. A flag whose default is None must be given.
        argv: command line, `sys.argv` by default.
    """
    quiet_logging()
    with_default = list(sys.argv if argv is None else argv)
    try:
        if {'--help', '-h', '-help'} & set(with_default[1:]):
            print(_help(main, workdir_required, config_required, define_flags))
            sys.exit(0)
        values, config = _parse(with_default, config_required, define_flags)
        more = {name: values[name].value for name in values if name not in ('workdir', 'config') and '.' not in name}
        for name, value in more.items():
            if value is None:
                raise ConfigError(f'--{name}: missing; {values[name].help}')
        if workdir_required and not values.workdir:
            raise ConfigError('--workdir: missing; give the folder of the run, e.g. --workdir=runs/first')
        run_config = resolve(config) if config_required else None
        if uses_jax:
            _prepare_jax(run_config if uses_devices else None)
        arguments = (values.workdir,) if run_config is None else (run_config, values.workdir)
        code = main(*arguments, **more)
    except Exception as error:
        tell_others(error)
        sentence, code = _sentence(error)
        if code == EXIT_FAULT and not failures.listening():
            raise
        sys.stdout.flush()
        if code == EXIT_FAULT:
            traceback.print_exc()
        else:
            print(f'error: {sentence}', file=sys.stderr, flush=True)
        failures.leave(code)
    except KeyboardInterrupt as error:
        tell_others(error)
        failures.leave(EXIT_INTERRUPTED)
    failures.leave(code or 0)


def tell_others(error: BaseException) -> None:
    """Ends the other processes of the run with this one's error. For failures that would unwind through what waits for
    the others; those that reach `run` are told there.
    """
    failures.tell(*_sentence(error))


def _sentence(error: BaseException) -> tuple[str, int]:
    """What can be said of an error in one sentence, and the exit code it has."""
    if isinstance(error, ConfigError):
        return str(error), EXIT_MISTAKE
    if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
        return f'{error.filename}: {error.strerror}' if error.filename else str(error.strerror), EXIT_MISTAKE
    if isinstance(error, KeyboardInterrupt):
        return 'interrupted', EXIT_INTERRUPTED
    return f'{type(error).__name__}: {error} (its own messages have the traceback)', EXIT_FAULT


def _prepare_jax(run: RunConfig | None) -> None:
    from sparrow_jax import compile_cache  # these import JAX, for which a mistake in the flags need not wait
    from sparrow_jax.parallel import hosts

    compile_cache.turn_on()
    if run is not None:
        hosts.start(run.parallel)
        hosts.check_same(run)


def load_config(path: str, overrides: Sequence[str] = ()) -> ConfigDict:
    """The ConfigDict of a config file.

    Args:
        path: 'configs/x.py', or 'configs/x.py:argument' for the argument of its `get_config`.
        overrides: command-line flags '--config.section.field=value'.
    Raises:
        ConfigError: no such file, function, argument or field, or a value of the wrong type.
    """
    config = _call_get_config(path)
    config.lock()
    _check_override_names(config, overrides)
    values = flags.FlagValues()
    argv = ['command', *overrides]
    try:
        config_flags.DEFINE_config_dict('config', config, flag_values=values, sys_argv=argv)
        values(argv)
    except flags.IllegalFlagValueError as error:
        raise ConfigError(_wrong_type(config, str(error))) from error
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    return config


def quiet_logging() -> None:
    """Leaves to the libraries' loggers only what a user should act on, and keeps every library off the network."""
    for name, value in {
        'TF_CPP_MIN_LOG_LEVEL': '2',
        'GRPC_VERBOSITY': 'ERROR',
        'TOKENIZERS_PARALLELISM': 'false',  # its threads and the verifiers' processes warn about each other
        'TRANSFORMERS_VERBOSITY': 'error',
        'TRANSFORMERS_NO_ADVISORY_WARNINGS': '1',  # that torch is absent
        'HF_HUB_OFFLINE': '1',
        'HF_HUB_DISABLE_PROGRESS_BARS': '1',
    }.items():
        os.environ.setdefault(name, value)
    # orbax and tensorflow-datasets report each file, and with a traceback each error that they then raise.
    absl.logging.set_verbosity(absl.logging.FATAL)
    absl.logging.use_absl_handler()
    for logger in ('jax', 'orbax', 'tensorflow_datasets'):
        logging.getLogger(logger).setLevel(logging.WARNING)


def _parse(
    argv: Sequence[str], config_required: bool, define_flags: Callable[[flags.FlagValues], None] | None
) -> tuple[flags.FlagValues, ConfigDict]:
    """The flags' values, and the configuration (empty where the command takes none)."""
    rest, overrides, paths = [argv[0]], [], []
    arguments = iter(argv[1:])
    for argument in arguments:
        plain = '--' + argument.lstrip('-') if argument.startswith('-') else argument
        if plain == '--config':
            paths.append(next(arguments, ''))
        elif plain.startswith('--config='):
            paths.append(plain.removeprefix('--config='))
        elif plain.startswith(('--config.', '--noconfig.')):
            overrides.append(plain)
            if '=' not in plain and plain.startswith('--config.'):
                following = next(arguments, None)
                if following is None:
                    raise ConfigError(f'{plain}: give a value, {plain}=...')
                overrides[-1] = f'{plain}={following}'
        else:
            rest.append(argument)
    values = _flag_values(define_flags)
    try:
        left = values(rest)[1:]
    except flags.Error as error:
        raise ConfigError(f'{str(error).rstrip()} (--help lists the flags)') from error
    if left:
        raise ConfigError(f'{left[0]!r} is not a flag; write --name=value')
    if not config_required:
        if paths or overrides:
            raise ConfigError('--config: this command reads the configuration of --workdir; leave the flag out')
        return values, ConfigDict()
    if not paths or not paths[-1]:
        raise ConfigError(
            f'--config: missing; give a config file, e.g. --config=configs/tiny.py{_config_files(Path("configs"))}'
        )
    return values, load_config(paths[-1], overrides)


def _flag_values(define_flags: Callable[[flags.FlagValues], None] | None) -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', '', 'folder of the run: its settings, metrics, checkpoints', flag_values=values)
    if define_flags is not None:
        define_flags(values)
    return values


def _call_get_config(path: str) -> ConfigDict:
    name, _, argument = path.partition(':')
    file = Path(name)
    if not file.is_file():
        kind = 'is a folder' if file.is_dir() else 'no such file'
        raise ConfigError(f'--config={path}: {kind}{_config_files(file if file.is_dir() else file.parent)}')
    spec = importlib.util.spec_from_file_location('run_config', file)
    if spec is None or spec.loader is None:
        raise ConfigError(f'--config={path}: must be a Python file (.py) with a function get_config')
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        where = '' if Path(error.filename or '').name == file.name else f' of {error.filename}'
        raise ConfigError(f'--config={path}: line {error.lineno}{where} is not Python ({error.msg})') from error
    except ImportError as error:
        raise ConfigError(
            f'--config={path}: cannot be imported ({error}); start the command in the repository'
        ) from error
    except Exception as error:
        raise ConfigError(_raised(path, error)) from error
    get_config = getattr(module, 'get_config', None)
    if not callable(get_config):
        raise ConfigError(f'--config={path}: has no function get_config')
    if argument and not inspect.signature(get_config).parameters:
        raise ConfigError(f'--config={path}: its get_config takes no argument; leave out :{argument}')
    try:
        config = get_config(argument) if argument else get_config()
    except ValueError as error:  # ConfigError too: a config's own word on its argument
        raise ConfigError(f'--config={path}: {error}') from error
    except Exception as error:
        raise ConfigError(_raised(path, error)) from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f'--config={path}: get_config returned {type(config).__name__}, not a ConfigDict')
    return config


def _raised(path: str, error: Exception) -> str:
    """What a config file's own code raised, and where: a misspelt section, say."""
    last = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in last if Path(frame.filename).name == Path(path.partition(':')[0]).name] or last
    said = str(error).strip().partition('\n')[0]
    return f'--config={path}: line {inside[-1].lineno} ({inside[-1].line}) raised {type(error).__name__}: {said}'


def _check_override_names(config: ConfigDict, overrides: Sequence[str]) -> None:
    for override in overrides:
        name = override.split('=')[0].removeprefix('--').removeprefix('no').removeprefix('config.')
        here: Any = config
        for i, part in enumerate(name.split('.')):
            if not isinstance(here, ConfigDict) or part not in here:
                raise ConfigError(
                    f'--config.{name}: no such field{_did_you_mean(config, name)}; configs/base.py lists them all'
                )
            here = here[part]
            if i == name.count('.') and isinstance(here, ConfigDict):
                raise ConfigError(f'--config.{name}: is a section; set one of its fields: {", ".join(here)}')


def _did_you_mean(config: ConfigDict, name: str) -> str:
    fields = list(_fields(config))
    same_end = [field for field in fields if field.split('.')[-1] == name.split('.')[-1]]
    near = same_end or difflib.get_close_matches(name, fields, n=1, cutoff=0.75)
    return f', did you mean {" or ".join(f"--config.{field}" for field in near)}?' if near else ''


def _fields(config: ConfigDict, prefix: str = '') -> list[str]:
    names = []
    for key, value in config.items():
        names += _fields(value, f'{prefix}{key}.') if isinstance(value, ConfigDict) else [f'{prefix}{key}']
    return names


def _wrong_type(config: ConfigDict, message: str) -> str:
    """From absl's 'flag --config.steps=abc: reason' to a sentence about the field."""
    flag = message.removeprefix('flag ').split(': ')[0]
    here: Any = config
    for part in flag.split('=')[0].removeprefix('--config.').split('.'):
        here = here[part]
    return f'{flag}: must be of type {type(here).__name__}, like {here!r}'


def _config_files(folder: Path) -> str:
    files = sorted(
        file.name
        for file in folder.glob('*.py')
        if file.name != 'base.py' and 'def get_config' in file.read_text(encoding='utf-8', errors='ignore')
    )
    return f' ({folder}/ has {", ".join(files)})' if files else ''


def _help(
    main: Callable[..., int | None],
    workdir_required: bool,
    config_required: bool,
    define_flags: Callable[[flags.FlagValues], None] | None,
) -> str:
    module = sys.modules[main.__module__]
    lines = [(module.__doc__ or '').strip(), '', 'Flags:']
    if config_required:
        lines.append('  --config=FILE.py[:ARG]           configuration of the run')
        lines.append('  --config.section.field=value     overrides one field; configs/base.py lists them all')
    values = _flag_values(define_flags)
    for name in sorted(values, key=lambda name: name != 'workdir'):
        flag = values[name]
        optional = not workdir_required if name == 'workdir' else flag.default is not None
        default = f' (default {flag.default!r})' if optional and flag.default not in ('', None) else ''
        lines.append(f'  {f"--{name}=...":<31}  {flag.help}{default}{"" if optional else " (required)"}')
    return '\n'.join(lines)
