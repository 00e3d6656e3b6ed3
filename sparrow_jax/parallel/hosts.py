"""The start of a run over several processes, before anything touches a device.

Every process runs the same command; JAX then shows each of them the devices of all. On TPU slices, under SLURM and in
Kubernetes jobs JAX finds the others by itself (`parallel.distributed='auto'`), elsewhere the configuration says where
the first process listens (`'address'`). The scripts in launch/ set these fields.
"""

import dataclasses
import json
import signal

import jax
from jax._src import distributed

from sparrow_jax.config import ConfigError, ParallelConfig, RunConfig, to_json
from sparrow_jax.parallel import failures, transfer

HEARTBEAT_TIMEOUT_S = 30  # of silence, after which a process counts as dead and all others end


def start(config: ParallelConfig) -> None:
    """Connects this process to the others of the run; returns at once where `distributed` is 'off'.

    Raises ConfigError when no cluster is found, or when the processes do not meet within JAX's five minutes.
    """
    if config.distributed == 'off':
        return
    try:
        if config.distributed == 'auto':
            jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S)
        else:
            # Without detection: a process of a SLURM job would otherwise be given one GPU alone.
            jax.distributed.initialize(
                config.coordinator,
                config.processes,
                config.process,
                cluster_detection_method='deactivate',
                heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
            )
    except ValueError as error:  # JAX's word for 'found nothing'
        raise ConfigError(
            f"parallel.distributed='{config.distributed}': no TPU slice, SLURM step or Kubernetes job was found "
            f"({_first_line(error)}); start through a script of launch/, or set it to 'address', or to 'off' for one "
            'process'
        ) from error
    except RuntimeError as error:
        where = f' at parallel.coordinator={config.coordinator}' if config.distributed == 'address' else ''
        raise ConfigError(
            f"parallel.distributed='{config.distributed}': the processes did not meet{where} ({_first_line(error)}); "
            'see that all of them run, and that the first can be reached'
        ) from error
    # JAX has begun to take note of SIGTERM for its own ends; until somebody listens for it, it ends the process.
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    runtime = distributed.global_state  # there is no public way to its key-value store
    failures.watch(runtime.client, runtime.process_id, runtime.num_processes)


def check_same(run: RunConfig) -> None:
    """Raises ConfigError where the processes were started with different configurations: they would wait for ever."""
    if run.parallel.distributed == 'off':
        return
    sections = json.loads(to_json(dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, process=-1))))
    others = [name for name, section in sections.items() if not transfer.same_in_all(json.dumps(section))]
    if others:
        raise ConfigError(f'{", ".join(others)}: not the same in all processes; start the same command everywhere')


def _first_line(error: Exception) -> str:
    return str(error).strip().partition('\n')[0]
