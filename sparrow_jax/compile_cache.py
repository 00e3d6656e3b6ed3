"""Compiled code on disk, so that the second start of a run does not compile again.

JAX keeps it; here it gets a folder of its own below ~/.cache. The environment variable SPARROW_JAX_COMPILE_CACHE names
another folder, or 'off'; where JAX_COMPILATION_CACHE_DIR is set, JAX's own choice stands.
"""

import os
import platform
import zlib
from pathlib import Path

import jax

from sparrow_jax.config import ConfigError

VARIABLE = 'SPARROW_JAX_COMPILE_CACHE'
_FOLDER, _ENABLED = 'jax_compilation_cache_dir', 'jax_enable_compilation_cache'  # of jax.config


def turn_on() -> None:
    """Gives JAX the folder, unless it has one or is to have none. Raises ConfigError where it cannot be made."""
    chosen = os.environ.get(VARIABLE, '')
    if chosen == 'off' or getattr(jax.config, _FOLDER) or not getattr(jax.config, _ENABLED):
        return
    folder = Path(chosen).expanduser() if chosen else Path.home() / '.cache/sparrow_jax/compiled' / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f'{folder}: compiled code cannot be kept there ({error.strerror}); set {VARIABLE} to another folder, or off'
        ) from error
    jax.config.update(_FOLDER, str(folder))


def describe() -> str:
    """Where compiled code is kept, for the start of a run."""
    folder = getattr(jax.config, _FOLDER) if getattr(jax.config, _ENABLED) else None
    return f'kept in {folder} ({VARIABLE}=off: not kept)' if folder else 'not kept'


def _processor() -> str:
    """Code for a CPU is compiled for its exact type, and a home folder may be shared by several."""
    try:
        lines = Path('/proc/cpuinfo').read_text(encoding='utf-8').splitlines()
    except OSError:
        lines = [platform.processor()]
    features = next((line for line in lines if line.startswith(('flags', 'Features'))), platform.processor())
    return f'{platform.machine()}-{zlib.crc32(features.encode()):08x}'
