"""Where compiled code is kept, and that a second process finds it."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
COMPILE = """
import jax
from sparrow_jax import compile_cache
compile_cache.turn_on()
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
found = []
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition('/')[2]))
jax.jit(lambda x: x * 3 + 1)(2.0)
print(found.count('cache_hits') > 0)
print(compile_cache.describe())
"""


def compile_with(home, **variables):
    """(whether the function was found on disk, what the start of a run says)."""
    names = ('SPARROW_JAX_COMPILE_CACHE', 'JAX_COMPILATION_CACHE_DIR', 'JAX_ENABLE_COMPILATION_CACHE')
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {'HOME': str(home), 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)} | variables
    done = subprocess.run([sys.executable, '-c', COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, said = done.stdout.splitlines()
    return found == 'True', said


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    found, said = compile_with(tmp_path)
    assert not found
    assert said.startswith(f'kept in {tmp_path}/.cache/sparrow_jax/compiled/')
    assert compile_with(tmp_path) == (True, said)


def test_it_can_be_elsewhere_or_off(tmp_path):
    other = tmp_path / 'other'
    assert compile_with(tmp_path, SPARROW_JAX_COMPILE_CACHE='off') == (False, 'not kept')
    assert compile_with(tmp_path, SPARROW_JAX_COMPILE_CACHE=str(other))[1].startswith(f'kept in {other} ')
    assert any(other.iterdir())
    assert not (tmp_path / '.cache').exists()
