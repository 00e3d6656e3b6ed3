"""Prints the requirement on libtpu, the TPU compiler, of the installed JAX: the one that `jax[tpu]` would bring."""

from importlib import metadata

print(next(r.split(';')[0].strip() for r in metadata.requires('jax') or () if r.startswith('libtpu')))
