"""What the launch scripts share: their flags, the command they start, and how they call other programs.

`python -m launch.<place> [flags] -- [arguments of the command]`. Arguments after `--` reach the command as they are. A
mistake in the flags is one sentence and exit code 2, before anything is called.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).parents[1]
EXIT_MISTAKE = 2
DISTRIBUTED = '--config.parallel.distributed'
# As both Kubernetes and gcloud take them; 40 leaves room for what JobSet appends within the 63 of a host name.
_NAME = re.compile(r'[a-z]([a-z0-9-]{0,38}[a-z0-9])?')


class Mistake(Exception):
    """Flags that the user can mend."""


class Flags(argparse.ArgumentParser):
    """Flags of a launch script; those that every script has are there from the start."""

    def __init__(self, description: str):
        super().__init__(
            description=description,
            usage='%(prog)s [flags] -- [arguments of the command]',
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._needed: dict[str, str] = {}
        self.add_argument('--command', default='train', help='command of sparrow_jax; train by default')
        self.add_argument('--dry-run', action='store_true', help='print what would be done; call nothing')

    def need(self, flag: str, what: str) -> None:
        """A flag without which nothing starts."""
        self.add_argument(flag, help=f'{what} (required)')
        self._needed[flag] = what

    def number(self, flag: str, default: int, what: str) -> None:
        """A flag that is a positive number; a default of 0 says 'not given'."""
        self.add_argument(flag, type=_positive, default=default, help=what)

    def read(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The flags before the first `--`, and what follows it. Raises Mistake."""
        own, rest = list(argv), []
        if '--' in own:
            at = own.index('--')
            own, rest = own[:at], own[at + 1 :]
        flags, unknown = self.parse_known_args(own)
        if unknown:
            raise Mistake(f'{unknown[0]}: no such flag (--help lists them); arguments of the command stand after --')
        for flag, what in self._needed.items():
            if not getattr(flags, flag.removeprefix('--').replace('-', '_')):
                raise Mistake(f'{flag}: missing; give the {what}')
        if not flags.command.isidentifier() or not (ROOT / f'sparrow_jax/{flags.command}.py').is_file():
            raise Mistake(f'--command={flags.command}: no such command; python -m sparrow_jax.<command>')
        return flags, rest

    def error(self, message: str) -> NoReturn:
        raise Mistake(message.removeprefix('argument '))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'{text!r} must be a positive number')
    return int(text)


def check_name(name: str) -> None:
    """Raises Mistake unless clusters take the name."""
    if not _NAME.fullmatch(name):
        raise Mistake(f'--name={name}: must be at most 40 small letters, digits and hyphens, a letter first')


def module(python: str, flags: argparse.Namespace, rest: Sequence[str], start: Sequence[str] = ()) -> list[str]:
    """The command to run: `start` are the arguments that connect its processes; those of the user come last."""
    return [python, '-m', f'sparrow_jax.{flags.command}', *start, *rest]


class Caller:
    """Calls programs, or in a dry run prints a shell script that would."""

    def __init__(self, dry_run: bool):
        self.dry_run = dry_run

    def call(self, argv: Sequence[str], stdin: str = '') -> None:
        """Ends this process with the program's exit code where that is not 0."""
        if self.dry_run:
            print(shlex.join(argv) + (f" <<'END_OF_INPUT'\n{stdin}END_OF_INPUT" if stdin else ''), flush=True)
            return
        code = subprocess.run(_found(argv), input=stdin or None, text=True, check=False).returncode
        if code:
            sys.exit(code)

    def ask(self, argv: Sequence[str]) -> str:
        """What a program says on standard output."""
        answer = subprocess.run(_found(argv), stdout=subprocess.PIPE, text=True, check=False)
        if answer.returncode:
            sys.exit(answer.returncode)
        return answer.stdout.strip()


def _found(argv: Sequence[str]) -> Sequence[str]:
    if shutil.which(argv[0]) is None:
        raise Mistake(f'{argv[0]}: not found; install it here, or look with --dry-run at what would be called')
    return argv


def main(launch: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> NoReturn:
    """Runs `launch(argv)` and ends the process."""
    try:
        launch(sys.argv[1:] if argv is None else argv)
    except Mistake as mistake:
        print(f'error: {mistake}', file=sys.stderr)
        sys.exit(EXIT_MISTAKE)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
