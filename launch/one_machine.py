"""python -m launch.one_machine [flags] -- [arguments of the command]

Runs on this machine, or over ssh on another one that has the repository and its environment.
"""

import os
import shlex
import sys
from collections.abc import Sequence

from launch.command_line import Caller, Flags, Mistake, main, module


def launch(argv: Sequence[str]) -> None:
    """Runs one process, which sees all devices of the machine."""
    flags = Flags(__doc__)
    flags.add_argument('--host', default='', help='another machine, as ssh takes it')
    flags.add_argument('--folder', default='', help='with --host: where the repository is there')
    flags.add_argument(
        '--python', default='', help="interpreter: this one, or with --host the folder's .venv/bin/python"
    )
    given, rest = flags.read(argv)
    if bool(given.host) != bool(given.folder):
        raise Mistake('--host and --folder: give both, or neither to run on this machine')
    if given.host:
        there = shlex.join(module(given.python or '.venv/bin/python', given, rest))
        # A terminal (-t), so that Ctrl-C here reaches the run there, which then saves.
        Caller(given.dry_run).call(['ssh', '-t', given.host, f'cd {shlex.quote(given.folder)} && exec {there}'])
        return
    command = module(given.python or sys.executable, given, rest)
    if given.dry_run:
        Caller(dry_run=True).call(command)
        return
    try:
        os.execvp(command[0], command)  # signals then reach the run itself
    except OSError as error:
        raise Mistake(f'--python={command[0]}: cannot be started ({error.strerror})') from error


if __name__ == '__main__':
    main(launch)
