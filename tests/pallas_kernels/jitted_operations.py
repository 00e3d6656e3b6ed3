"""The operations under jit, shared by the test files so that each case compiles once."""

import jax
import pytest

from pallas_kernels import dense_decode as dense
from pallas_kernels import landmark_update as landmark
from pallas_kernels import page_select as select
from pallas_kernels import sparse_decode as sparse

dense_decode = jax.jit(dense.dense_decode, static_argnames=('implementation', 'out_dtype'))
sparse_decode = jax.jit(sparse.sparse_decode, static_argnames=('implementation', 'out_dtype'))
landmark_update = jax.jit(landmark.landmark_update, static_argnames='implementation')
page_select = jax.jit(
    select.page_select,
    static_argnames=('page_tokens', 'max_pages', 'reserved_first', 'reserved_last', 'implementation'),
)


def over(cases):
    """Runs a test once for each entry of a case list."""
    return pytest.mark.parametrize('case', cases, ids=lambda case: case.name)
