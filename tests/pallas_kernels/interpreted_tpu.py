"""Interpreted TPU kernels for tests: compiled once for many runs, and watched for races."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # the race detector's verdict has no public name

# Compiling an interpreted kernel takes longer than running it.
_QUICKLY = {'xla_backend_optimization_level': 0}


def interpreted(function, **arguments):
    """Compiles a function of arrays for arguments of these shapes; every run must be free of races."""
    compiled = jax.jit(function).lower(**arguments).compile(compiler_options=_QUICKLY)

    def run(**arguments):
        results = jax.block_until_ready(compiled(**arguments))
        assert not interpret_pallas_call.races.races_found
        return results

    return run
