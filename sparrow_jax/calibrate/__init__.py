"""How much a model's sparse sampler may leave out, measured on it: the command `python -m sparrow_jax.calibrate`.

`contexts` has the sequences, `passes` measures alphas on them, `measured` goes through the points and keeps them in the
folder of `results`, `summary` makes figures and schedules of them, `plot` draws those.
"""
