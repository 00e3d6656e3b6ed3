"""Attention of the sampler over a paged KV cache: one folder an operation, each with one public function.

Arrays, for one layer (key of the capitals in `sparrow_jax`): `pages_KP2CA` holds keys (index 0) and values (index 1) of
every physical page side by side; `table_BN` gives the physical page of each logical page of a sequence; `landmark_BKNA`
is the mean key of each filled page, per slot, in logical order. A sequence's `length` counts cached tokens; memory
beyond it (the rest of the last page, free pages, landmarks of unfilled pages) may hold anything, NaN included.

Each folder has `reference.py` in readable JAX, the definition that every kernel is tested against, and `cases.py`, the
shapes that tests and benches run through.
"""
