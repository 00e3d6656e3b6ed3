"""What tests of whole runs share: compiled functions and prepared data on disk, below pytest's temporary folder."""

import os
import pathlib
import signal

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

# What tests compile leaves nothing in the home folder.
os.environ.setdefault('SPARROW_JAX_COMPILE_CACHE', 'off')

# A job that a shell starts in the background ignores Ctrl-C, and so would every process that the tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope='session')
def shared_folder(tmp_path_factory) -> pathlib.Path:
    """One folder for all workers of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'whole_runs'
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope='module')
def compile_cache(shared_folder):
    """JAX's cache on disk: a whole run compiles for 20 seconds, so that runs, in this process or another, share it."""
    settings = {
        'jax_compilation_cache_dir': str(shared_folder / 'compiled'),
        'jax_persistent_cache_min_compile_time_secs': 0.0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # whether it is in use was decided at the first compilation
    yield shared_folder / 'compiled'
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope='module')
def in_the_repository(compile_cache):
    """Commands run from the repository's root, as their configurations' paths ask for."""
    del compile_cache  # in use from here on
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pathlib.Path(__file__).parents[1])
        yield


@pytest.fixture(scope='module')
def data_cache(shared_folder) -> str:
    return str(shared_folder / 'data')
