"""python -m launch.gke --name=N --image=I --accelerator=A (--tpus=C --topology=T | --gpus=C) [flags] -- [arguments]

Applies a JobSet (which the cluster must have installed): one pod a host. The image holds the repository, installed, as
its working folder. `--claim` mounts a volume for the work directory and the data. When a pod fails, or its node is
taken away, all pods are started again, and the run goes on from its last checkpoint.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from launch.command_line import DISTRIBUTED, Caller, Flags, Mistake, check_name, main, module
from launch.yaml_text import to_yaml

COORDINATOR_PORT = 8476
TPU_PORTS = (8471, COORDINATOR_PORT)  # 8471: the TPU runtime of the hosts with each other
GROUP = 'hosts'  # of pods; a part of their names
SECONDS_TO_SAVE = 300  # a step may have to end before the checkpoint is written


def launch(argv: Sequence[str]) -> None:
    """Applies the JobSet."""
    flags = Flags(__doc__)
    flags.need('--name', 'name of the job')
    flags.need('--image', 'container image that holds the repository')
    flags.need('--accelerator', 'type of accelerator, as the label of the nodes has it, e.g. tpu-v5-lite-podslice')
    flags.number('--hosts', 1, 'pods, one for each host of the slice or GPU node; 1 by default')
    flags.number('--tpus', 0, 'TPU chips of each host')
    flags.number('--gpus', 0, 'GPUs of each host')
    flags.add_argument('--topology', default='', help='of the TPU slice, e.g. 4x4')
    flags.add_argument('--claim', default='', help='volume: NAME_OF_CLAIM:/folder')
    flags.number('--restarts', 10, 'how often a failed job is started again; 10 by default')
    flags.add_argument('--namespace', default='', help='of kubectl')
    flags.add_argument('--context', default='', help='of kubectl')
    flags.add_argument('--python', default='python', help='interpreter in the image; python by default')
    given, rest = flags.read(argv)
    check_name(given.name)
    if bool(given.tpus) == bool(given.gpus):
        raise Mistake('--tpus and --gpus: give one of them, the number of chips of each host')
    if bool(given.tpus) != bool(given.topology):
        raise Mistake('--topology: goes with --tpus, and only with it, e.g. --tpus=4 --topology=4x4')
    where = [f'--{name}={value}' for name in ('context', 'namespace') if (value := getattr(given, name))]
    Caller(given.dry_run).call(['kubectl', *where, 'apply', '-f', '-'], stdin=to_yaml(_job_set(given, rest)))


def _job_set(given: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    job = {
        'parallelism': given.hosts,
        'completions': given.hosts,
        'completionMode': 'Indexed',
        'backoffLimit': 0,  # one failed host fails the job, and JobSet starts all again
        'template': {'spec': _pod(given, rest)},
    }
    metadata: dict[str, Any] = {'name': given.name}
    if given.tpus:  # a slice is a node pool: pods on two of them could not reach each other's chips
        metadata['annotations'] = {'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'}
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': metadata,
        'spec': {
            'failurePolicy': {'maxRestarts': given.restarts},
            'replicatedJobs': [{'name': GROUP, 'replicas': 1, 'template': {'spec': job}}],
        },
    }


def _pod(given: argparse.Namespace, rest: Sequence[str]) -> dict[str, Any]:
    chips = {'google.com/tpu': given.tpus} if given.tpus else {'nvidia.com/gpu': given.gpus}
    volumes: list[dict[str, Any]] = [{'name': 'shared-memory', 'emptyDir': {'medium': 'Memory'}}]
    mounts = [{'name': 'shared-memory', 'mountPath': '/dev/shm'}]
    if given.claim:
        claim, _, folder = given.claim.partition(':')
        if not claim or not folder.startswith('/'):
            raise Mistake(f'--claim={given.claim}: must be NAME_OF_CLAIM:/folder')
        volumes.append({'name': 'data', 'persistentVolumeClaim': {'claimName': claim}})
        mounts.append({'name': 'data', 'mountPath': folder})
    start = _start(given)
    # In a container's arguments Kubernetes replaces $(NAME), and $$ by $.
    command = module(given.python, given, [argument.replace('$', '$$') for argument in rest], start)
    container: dict[str, Any] = {
        'name': 'sparrow',
        'image': given.image,
        'command': command,
        'resources': {'requests': chips, 'limits': chips},
        'volumeMounts': mounts,
        'ports': [{'containerPort': port} for port in (TPU_PORTS if given.tpus else (COORDINATOR_PORT,))],
    }
    selector = {'cloud.google.com/gke-accelerator': given.accelerator}
    if given.tpus:
        selector = {
            'cloud.google.com/gke-tpu-accelerator': given.accelerator,
            'cloud.google.com/gke-tpu-topology': given.topology,
        }
    return {
        'restartPolicy': 'Never',
        'terminationGracePeriodSeconds': SECONDS_TO_SAVE,
        'nodeSelector': selector,
        'containers': [container],
        'volumes': volumes,
    }


def _start(given: argparse.Namespace) -> list[str]:
    """TPU pods find each other by variables that GKE sets.

    For GPUs JAX would ask the Kubernetes API, which takes a package and a permission; the names of the pods of a JobSet
    are known beforehand.
    """
    if given.hosts == 1:
        return []
    if given.tpus:
        return [f'{DISTRIBUTED}=auto']
    section = DISTRIBUTED.rpartition('.')[0]
    return [
        f'{DISTRIBUTED}=address',
        f'{section}.coordinator={given.name}-{GROUP}-0-0.{given.name}:{COORDINATOR_PORT}',
        f'{section}.processes={given.hosts}',
        f'{section}.process=$(JOB_COMPLETION_INDEX)',
    ]


if __name__ == '__main__':
    main(launch)
