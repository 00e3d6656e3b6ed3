"""Attention of the sampler over a paged KV cache: one folder an operation, each with one public function.

Arrays, for one layer (key of the capitals in `sparrow_jax`): `pages_KPCE` holds the tokens of every physical page, a
token's key and value side by side (E = 2 A), so that one copy brings a page, and heads of 64 fill the 128 lanes of a
TPU; `table_BN` gives the physical page of each logical page of a sequence; `landmark_BKNA` is the mean key of each
filled page, per slot, in logical order. A sequence's `length` counts cached tokens; memory beyond it (the rest of the
last page, free pages, landmarks of unfilled pages) may hold anything, NaN included.

Each folder has `reference.py` in readable JAX, the definition that every kernel is tested against, and `cases.py`, the
shapes that tests and benches run through.
"""
