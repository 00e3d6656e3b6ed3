"""Starts a command of sparrow_jax somewhere else; everything after `--` is that command's own."""
