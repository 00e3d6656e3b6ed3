"""A script of this folder on 8 simulated devices, while its function runs on the one device here."""

import os
import pathlib
import subprocess
import sys

import numpy as np
from tiny_learner import quick_compile

ROOT = pathlib.Path(__file__).parents[2]


def many_and_single(script, run, meshes, folder):
    """({mesh: results of the script on it}, results of `run(data, fsdp, tensor)` on one device).

    Args:
        script: module that writes FOLDER/MESH.npz for each mesh, 'data,fsdp,tensor', of its command line.
    """
    environment = {
        **os.environ,
        'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
        'JAX_PLATFORMS': 'cpu',
        # Compiles in a third of the time; the partitioning is what is tested.
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
        'PYTHONPATH': str(ROOT),
    }
    command = [sys.executable, script.__file__, str(folder), *meshes]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            with quick_compile():
                single = run(-1, 1, 1)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    return {sizes: dict(np.load(folder / f'{sizes}.npz')) for sizes in meshes}, single
