"""python -m launch.slurm --partition=P [flags] -- [arguments of the command]

Submits a SLURM job with GPUs: one process a node, which sees all of the node's GPUs. The repository, its environment
and the work directory must be on a file system that all nodes share. At its time limit the run saves and ends; the same
command submitted again goes on from there.
"""

import argparse
import shlex
from collections.abc import Sequence

from launch.command_line import DISTRIBUTED, ROOT, Caller, Flags, check_name, main, module

SECONDS_TO_SAVE = 300  # a step may have to end before the checkpoint is written


def launch(argv: Sequence[str]) -> None:
    """Submits the job."""
    flags = Flags(__doc__)
    flags.need('--partition', 'partition that has the GPUs')
    flags.number('--nodes', 1, 'how many; 1 by default')
    flags.number('--gpus', 1, 'of each node; 1 by default')
    flags.add_argument('--name', default='sparrow', help='of the job')
    flags.add_argument('--python', default='.venv/bin/python', help='interpreter; .venv/bin/python by default')
    flags.add_argument('--folder', default=str(ROOT), help='where the nodes find the repository; this one by default')
    flags.add_argument(
        '--sbatch',
        action='append',
        default=[],
        help='further option of sbatch, e.g. --sbatch=--time=24:00:00; repeatable',
    )
    given, rest = flags.read(argv)
    check_name(given.name)
    options = [
        f'--job-name={given.name}',
        f'--partition={given.partition}',
        f'--nodes={given.nodes}',
        '--ntasks-per-node=1',
        f'--gpus-per-node={given.gpus}',
        f'--chdir={given.folder}',
        f'--signal=TERM@{SECONDS_TO_SAVE}',
        *given.sbatch,
    ]
    Caller(given.dry_run).call(['sbatch', *options], stdin=_script(given, rest))


def _script(given: argparse.Namespace, rest: Sequence[str]) -> str:
    start = [f'{DISTRIBUTED}=auto'] if given.nodes > 1 else []
    run = ['srun', '--kill-on-bad-exit=1', *module(given.python, given, rest, start)]
    lines = ['#!/bin/sh']
    if start:
        lines += [
            '# Without it JAX gives each process of a SLURM step one GPU.',
            f'export JAX_LOCAL_DEVICE_IDS={",".join(map(str, range(given.gpus)))}',
        ]
    return '\n'.join([*lines, f'exec {shlex.join(run)}', ''])


if __name__ == '__main__':
    main(launch)
