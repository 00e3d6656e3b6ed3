"""The start of a run over several processes, before anything touches a device.

Every process runs the same command; JAX then shows each of them the devices of all. On TPU slices, under SLURM and in
Kubernetes jobs JAX finds the others by itself (`parallel.distributed='auto'`), elsewhere the configuration says where
the first process listens (`'address'`). The scripts in launch/ set these fields.
"""

import jax
import numpy as np
from jax.experimental import multihost_utils

from sparrow_jax.config import ConfigError, ParallelConfig


def start(config: ParallelConfig) -> None:
    """Connects this process to the others of the run; returns at once where `distributed` is 'off'.

    Raises ConfigError when no cluster is found, or when the processes do not meet within JAX's five minutes.
    """
    if config.distributed == 'off':
        return
    try:
        if config.distributed == 'auto':
            jax.distributed.initialize()
        else:
            # Without detection: a process of a SLURM job would otherwise be given one GPU alone.
            jax.distributed.initialize(
                config.coordinator, config.processes, config.process, cluster_detection_method='deactivate'
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


def of_the_first(array: np.ndarray) -> np.ndarray:
    """The first process's array (of the same shape and dtype in all), so that all go on with the same numbers."""
    return array if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(array))


def _first_line(error: Exception) -> str:
    return str(error).strip().partition('\n')[0]
