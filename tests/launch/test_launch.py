"""Every launch script: a dry run prints a shell script and calls nothing, a real one calls the same.

gcloud, kubectl, sbatch, ssh and git are the test's own, first on PATH, and write down how they were called.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from launch.yaml_text import to_yaml

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ('gcloud', 'kubectl', 'sbatch', 'ssh', 'git')
# Whatever a shell, SLURM or Kubernetes could take for something of their own.
ARGUMENTS = [
    '--config=configs/tiny.py:smoke',
    '--config.data.options={"a": 1, "b": "it\'s $HOME $(HOSTNAME) $$"}',
    '--workdir=/data/two words',
    '--',
    '',
    'line\nbreak * `id` \\ é',
]
WHERE = ['--name=first-run', '--zone=some-zone', '--project=some-project']
TPU = ['--tpus=4', '--topology=4x4', '--accelerator=tpu-v5-lite-podslice']
GPU = ['--gpus=8', '--accelerator=nvidia-h200-141gb']
JOB = ['--name=first-run', '--image=some/image:1']
CASES = {
    'tpu create': ['tpu_vm', 'create', *WHERE, '--accelerator=v5litepod-16', '--runtime=v2-alpha', '--spot'],
    'tpu run': ['tpu_vm', 'run', *WHERE, '--prepare=echo "a b" # word', '--', *ARGUMENTS],
    'tpu delete': ['tpu_vm', 'delete', *WHERE],
    'gke tpu': ['gke', *JOB, *TPU, '--hosts=4', '--claim=disk:/data', '--', *ARGUMENTS],
    'gke gpu': ['gke', *JOB, *GPU, '--hosts=2', '--namespace=team', '--context=lab', '--', *ARGUMENTS],
    'slurm': ['slurm', '--partition=gpu', '--nodes=2', '--gpus=4', '--sbatch=--time=1:00:00', '--', *ARGUMENTS],
    'slurm one': ['slurm', '--partition=gpu', '--folder=/home/me/my code', '--', *ARGUMENTS],
    'ssh': ['one_machine', '--host=me@box', '--folder=my code', '--command=evaluate', '--', *ARGUMENTS],
}


class Launcher:
    """Runs a script with the test's programs; `calls` are theirs: [program, *arguments], and standard input."""

    def __init__(self, folder, state='ACTIVE'):
        self.record, self.bin = folder / 'calls', folder / 'bin'
        self.bin.mkdir()
        for name in PROGRAMS:
            program = self.bin / name
            program.write_text(
                f'#!{sys.executable} -I\nimport json, sys\n'
                'stdin = sys.stdin.read() if sys.argv[-1] == "-" or sys.argv[0].endswith("sbatch") else ""\n'
                f'open({str(self.record)!r}, "a").write(json.dumps([[{name!r}, *sys.argv[1:]], stdin]) + "\\n")\n'
                f'print({state!r} if "describe" in sys.argv else "")\n'
            )
            program.chmod(0o755)

    def run(self, arguments):
        return subprocess.run(
            [sys.executable, '-m', f'launch.{arguments[0]}', *arguments[1:]],
            cwd=ROOT,
            env=os.environ | {'PATH': f'{self.bin}:/usr/bin:/bin'},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def calls(self):
        return [json.loads(line) for line in self.record.read_text().splitlines()] if self.record.exists() else []


@pytest.fixture
def launcher(tmp_path):
    return Launcher(tmp_path)


def dry(launcher, arguments):
    """What the script prints with --dry-run."""
    done = launcher.run([arguments[0], '--dry-run', *arguments[1:]])
    assert (done.returncode, done.stderr, launcher.calls) == (0, '', [])
    return done.stdout


@pytest.mark.parametrize('name', CASES)
def test_what_a_dry_run_prints_does_in_a_shell_what_the_script_does(name, launcher):
    script = dry(launcher, CASES[name])
    subprocess.run(['/bin/sh', '-n'], input=script, text=True, check=True)
    subprocess.run(
        ['/bin/sh', '-e'],
        input=script,
        text=True,
        check=True,
        env={'PATH': str(launcher.bin)},
        stdout=subprocess.DEVNULL,
    )
    printed = launcher.calls
    launcher.record.unlink()
    done = launcher.run(CASES[name])
    assert (done.returncode, done.stderr) == (0, '')
    # The archive that is sent lies in a temporary folder.
    plain = lambda calls: [
        (
            [
                argument.rpartition('/')[2] if 'tar.gz' in argument and argument[0] in '/-' else argument
                for argument in argv
            ],
            stdin,
        )
        for argv, stdin in calls
    ]
    shorten = lambda calls: [([a.removeprefix('--output=') for a in argv], stdin) for argv, stdin in plain(calls)]
    assert shorten(launcher.calls) == shorten(printed)
    assert printed


def words_of_shell(text):
    """The words of the simple command that runs the module."""
    words = shlex.split(text)
    return words[words.index('-m') + 1 :]


def test_slurm_passes_arguments_on(launcher):
    assert launcher.run(CASES['slurm']).returncode == 0
    [(argv, script)] = launcher.calls
    assert argv[0] == 'sbatch'
    assert {'--partition=gpu', '--nodes=2', '--gpus-per-node=4', '--ntasks-per-node=1', '--time=1:00:00'} < set(argv)
    assert script.startswith('#!/bin/sh\n')
    assert 'export JAX_LOCAL_DEVICE_IDS=0,1,2,3\n' in script
    assert words_of_shell(script) == ['sparrow_jax.train', '--config.parallel.distributed=auto', *ARGUMENTS]


def test_one_node_or_machine_starts_one_process(launcher):
    assert words_of_shell(dry(launcher, CASES['slurm one']).partition('\n')[2].rpartition('END')[0]) == [
        'sparrow_jax.train',
        *ARGUMENTS,
    ]
    assert launcher.run(CASES['ssh']).returncode == 0
    [(argv, _)] = launcher.calls
    assert argv[:3] == ['ssh', '-t', 'me@box']
    assert argv[3].startswith("cd 'my code' && exec .venv/bin/python -m ")
    assert words_of_shell(argv[3]) == ['sparrow_jax.evaluate', *ARGUMENTS]


def test_this_machine_runs_the_command_itself(launcher):
    program = launcher.bin / 'sbatch'  # any that writes down how it was called
    command = ['one_machine', f'--python={program}', '--', *ARGUMENTS]
    assert shlex.split(dry(launcher, command)) == [str(program), '-m', 'sparrow_jax.train', *ARGUMENTS]
    assert launcher.run(command).returncode == 0
    assert launcher.calls == [[['sbatch', '-m', 'sparrow_jax.train', *ARGUMENTS], '']]


def test_a_slice_runs_the_command_on_every_host(launcher):
    assert launcher.run(CASES['tpu run']).returncode == 0
    archive, send, install, start, follow = (argv for argv, _ in launcher.calls)
    assert archive[0] == 'git'
    assert 'archive' in archive
    assert send[:5] == ['gcloud', 'compute', 'tpus', 'tpu-vm', 'scp']
    for argv in (send, install, start):
        assert {'--worker=all', '--zone=some-zone', '--project=some-project'} < set(argv)
    assert '--worker=0' in follow
    shell = start[-1].removeprefix('--command=')
    end = shell.index(' > ~/')
    assert words_of_shell(shell[:end]) == ['sparrow_jax.train', '--config.parallel.distributed=auto', *ARGUMENTS]
    for argv in (install, start, follow):
        subprocess.run(['sh', '-n'], input=argv[-1].removeprefix('--command='), text=True, check=True)
    assert 'echo "a b" # word\n}' in install[-1]


def kubernetes_reads(argument, environment):
    """A container's argument as Kubernetes gives it to the program."""
    parts = argument.split('$$')
    for name, value in environment.items():
        parts = [part.replace(f'$({name})', value) for part in parts]
    return '$'.join(parts)


@pytest.mark.parametrize(
    ('case', 'start', 'chips'),
    [
        ('gke tpu', ['--config.parallel.distributed=auto'], {'google.com/tpu': 4}),
        (
            'gke gpu',
            [
                '--config.parallel.distributed=address',
                '--config.parallel.coordinator=first-run-hosts-0-0.first-run:8476',
                '--config.parallel.processes=2',
                '--config.parallel.process=1',
            ],
            {'nvidia.com/gpu': 8},
        ),
    ],
)
def test_a_job_set_has_one_pod_a_host(case, start, chips, launcher):
    assert launcher.run(CASES[case]).returncode == 0
    [(argv, stdin)] = launcher.calls
    assert argv[-3:] == ['apply', '-f', '-']
    assert ('--namespace=team' in argv) == ('--context=lab' in argv) == (case == 'gke gpu')
    job_set = yaml.safe_load(stdin)
    assert (job_set['kind'], job_set['metadata']['name']) == ('JobSet', 'first-run')
    [group] = job_set['spec']['replicatedJobs']
    job = group['template']['spec']
    hosts = 4 if case == 'gke tpu' else 2
    assert (job['parallelism'], job['completions'], job['completionMode']) == (hosts, hosts, 'Indexed')
    pod = job['template']['spec']
    [container] = pod['containers']
    assert container['image'] == 'some/image:1'
    assert container['resources']['limits'] == chips
    seen = {'HOSTNAME': 'replaced', 'JOB_COMPLETION_INDEX': '1'}
    command = [kubernetes_reads(argument, seen) for argument in container['command']]
    assert command == ['python', '-m', 'sparrow_jax.train', *start, *ARGUMENTS]
    mounts = {mount['mountPath'] for mount in container['volumeMounts']}
    assert mounts == ({'/dev/shm', '/data'} if case == 'gke tpu' else {'/dev/shm'})


def test_yaml_is_read_as_it_was_meant():
    value = {
        'a': {'b/c.d': [{'e': 'no', 'f': []}, ['1e3', 'x: # y', '"', 'é\n\t'], [], 'null']},
        'g': {},
        'h': [True, 2],
    }
    assert yaml.safe_load(to_yaml(value)) == value


GKE = ['gke', *JOB]


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['slurm'], '--partition: missing'),
        (['slurm', '--partition='], '--partition: missing'),
        (['slurm', '--partition=p', '--node=2'], '--node=2: no such flag'),
        (['slurm', '--partition=p', '--config=configs/tiny.py'], 'arguments of the command stand after --'),
        (['slurm', '--partition=p', '--nodes=0'], "--nodes: '0' must be a positive number"),
        (['slurm', '--partition=p', '--command=trian'], '--command=trian: no such command'),
        (['slurm', '--partition=p', '--command=../train'], 'no such command'),
        (['slurm', '--partition=p', '--name=My Run'], '--name=My Run: must be'),
        (['tpu_vm', 'run', '--name=a', '--project=p'], '--zone: missing'),
        (['tpu_vm', 'run', '--name=a', '--zone=z'], '--project: missing'),
        (['tpu_vm', *WHERE], 'say what to do first: create, run, delete'),
        (['tpu_vm', 'stop', *WHERE], 'stop: say what to do first'),
        (['tpu_vm', 'create', *WHERE, '--runtime=r'], '--accelerator: missing'),
        (['tpu_vm', 'create', *WHERE, '--accelerator=a'], '--runtime: missing'),
        (['tpu_vm', 'delete', *WHERE, '--', '--config=x'], 'delete: takes no arguments'),
        (['gke', '--name=a', *TPU], '--image: missing'),
        (['gke', '--image=i', *TPU], '--name: missing'),
        ([*GKE, '--tpus=4', '--topology=2x2'], '--accelerator: missing'),
        ([*GKE, '--accelerator=a'], '--tpus and --gpus: give one'),
        ([*GKE, *TPU, '--gpus=8'], '--tpus and --gpus: give one'),
        ([*GKE, *GPU, '--topology=2x2'], '--topology: goes with --tpus'),
        ([*GKE, '--accelerator=a', '--tpus=4'], '--topology: goes with --tpus'),
        ([*GKE, *TPU, '--claim=disk'], '--claim=disk: must be'),
        (['one_machine', '--host=box'], '--host and --folder'),
        (['one_machine', '--python=/no/such/python'], '--python=/no/such/python: cannot be started'),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_called(arguments, words, launcher):
    done = launcher.run(arguments)
    assert (done.returncode, done.stdout) == (2, '')
    assert done.stderr.startswith('error: ')
    assert done.stderr.count('\n') == 1
    assert words in done.stderr
    assert launcher.calls == []


def shown(name):
    """The launch commands of a document, as lists of words."""
    text = (ROOT / name).read_text().replace('\\\n', ' ')
    return [shlex.split(line, comments=True) for line in re.findall(r'python -m launch\.([^`\n]*)', text)]


@pytest.mark.parametrize(('name', 'count'), [('README.md', 8), ('docs/pods.md', 5)])
def test_what_the_documents_show_is_taken(name, count, launcher):
    commands = shown(name)
    assert len(commands) == count
    for command in commands:
        assert dry(launcher, command)


def test_a_missing_program_is_named(launcher):
    (launcher.bin / 'sbatch').unlink()
    done = launcher.run(CASES['slurm'])
    assert done.returncode == 2
    assert done.stderr.startswith('error: sbatch: not found')


def test_a_program_s_exit_code_is_the_script_s(launcher):
    (launcher.bin / 'kubectl').write_text('#!/bin/sh\nexit 7\n')
    assert launcher.run(CASES['gke tpu']).returncode == 7


def test_a_slice_that_will_not_come_is_said(tmp_path):
    done = Launcher(tmp_path, state='FAILED').run(CASES['tpu create'])
    assert (done.returncode, done.stderr) == (1, 'error: first-run is FAILED; delete it and create it again\n')
