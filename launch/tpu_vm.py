"""python -m launch.tpu_vm (create | run | delete) --name=N --zone=Z --project=P [flags] -- [arguments of the command]

A TPU slice of its own, by gcloud. `create` queues it and waits until it is there; `run` sends the last commit to all
its hosts, installs it and starts the command on each, detached, with its output in a log that is then shown; `delete`
gives the slice back. The work directory must be on storage that all hosts have mounted (`--prepare` can mount it).
"""

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from launch.command_line import DISTRIBUTED, ROOT, Caller, Flags, Mistake, check_name, main, module

ACTIONS = ('create', 'run', 'delete')
LOST = ('FAILED', 'SUSPENDED')  # states of a queued resource that do not become ACTIVE
SECONDS_BETWEEN_LOOKS = 30
FOLDER, ARCHIVE, LOG = 'sparrow_jax', 'sparrow_jax.tar.gz', 'sparrow_jax.log'  # in the home folder of each host


def launch(argv: Sequence[str]) -> None:
    """Does one of the three actions."""
    flags = Flags(__doc__)
    flags.add_argument('action', nargs='?', default='', help=' | '.join(ACTIONS))
    flags.need('--name', 'name of the slice')
    flags.need('--zone', 'zone')
    flags.need('--project', 'Google Cloud project')
    flags.add_argument('--accelerator', default='', help='create: type of the slice, e.g. v5litepod-16')
    flags.add_argument('--runtime', default='', help='create: runtime version, e.g. v2-alpha-tpuv5-lite')
    flags.add_argument('--spot', action='store_true', help='create: cheaper, and may be taken away')
    flags.add_argument('--prepare', default='', help='run: shell command for each host, before the installation')
    flags.add_argument('--python', default='python3', help='run: interpreter to install with; python3 by default')
    given, rest = flags.read(argv)
    if given.action not in ACTIONS:
        raise Mistake(f'{given.action or "action"}: say what to do first: {", ".join(ACTIONS)}')
    check_name(given.name)
    if given.action != 'run' and rest:
        raise Mistake(f'{given.action}: takes no arguments after --; they belong to run')
    {'create': _create, 'run': _run, 'delete': _delete}[given.action](given, rest)


def _create(given: argparse.Namespace, _: Sequence[str]) -> None:
    for flag, what in (('accelerator', 'type of the slice, e.g. v5litepod-16'), ('runtime', 'runtime version of it')):
        if not getattr(given, flag):
            raise Mistake(f'--{flag}: missing; give the {what}')
    caller = Caller(given.dry_run)
    queued = ['gcloud', 'compute', 'tpus', 'queued-resources']
    caller.call(
        [
            *queued,
            'create',
            given.name,
            f'--node-id={given.name}',
            *_where(given),
            f'--accelerator-type={given.accelerator}',
            f'--runtime-version={given.runtime}',
            *(['--spot'] if given.spot else []),
        ]
    )
    look = [*queued, 'describe', given.name, *_where(given), '--format=value(state.state)']
    if given.dry_run:
        print('# until it is ACTIVE:')
        caller.call(look)
        return
    shown = ''
    while (state := caller.ask(look)) != 'ACTIVE':
        if state in LOST:
            sys.exit(f'error: {given.name} is {state}; delete it and create it again')
        if state != shown:
            print(f'{given.name} is {state}', flush=True)
            shown = state
        time.sleep(SECONDS_BETWEEN_LOOKS)
    print(f'{given.name} is ACTIVE')


def _run(given: argparse.Namespace, rest: Sequence[str]) -> None:
    caller = Caller(given.dry_run)
    vm = ['gcloud', 'compute', 'tpus', 'tpu-vm']
    on_all = [*_where(given), '--worker=all']
    with tempfile.TemporaryDirectory() as folder:
        archive = ARCHIVE if given.dry_run else str(Path(folder) / ARCHIVE)
        caller.call(['git', '-C', str(ROOT), 'archive', '--format=tar.gz', f'--output={archive}', 'HEAD'])
        caller.call([*vm, 'scp', archive, f'{given.name}:{ARCHIVE}', *on_all])
    caller.call([*vm, 'ssh', given.name, *on_all, f'--command={_install(given)}'])
    command = shlex.join(module('.venv/bin/python', given, rest, [f'{DISTRIBUTED}=auto']))
    # Detached, so that the run outlives the connection.
    started = f'cd {FOLDER} && {{ nohup {command} > ~/{LOG} 2>&1 < /dev/null & }}'
    caller.call([*vm, 'ssh', given.name, *on_all, f'--command={started}'])
    caller.call([*vm, 'ssh', given.name, *_where(given), '--worker=0', f'--command=tail -n +1 -F {LOG}'])


def _install(given: argparse.Namespace) -> str:
    steps = [
        *([f'{{ {given.prepare}\n}}'] if given.prepare else []),
        f'mkdir -p {FOLDER}',
        f'tar -xzf {ARCHIVE} -C {FOLDER}',
        f'cd {FOLDER}',
        f'{shlex.quote(given.python)} -m venv .venv',
        ".venv/bin/pip install --quiet -e '.[tpu]'",
    ]
    return ' && '.join(steps)


def _delete(given: argparse.Namespace, _: Sequence[str]) -> None:
    queued = ['gcloud', 'compute', 'tpus', 'queued-resources', 'delete', given.name, *_where(given)]
    Caller(given.dry_run).call([*queued, '--force', '--quiet'])


def _where(given: argparse.Namespace) -> list[str]:
    return [f'--zone={given.zone}', f'--project={given.project}']


if __name__ == '__main__':
    main(launch)
