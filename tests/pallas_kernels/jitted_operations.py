"""The operations under jit, shared by the test files so that each case compiles once."""

import functools

import jax
import pytest

from pallas_kernels import dense_decode as dense
from pallas_kernels import landmark_update as landmark
from pallas_kernels import page_select as select
from pallas_kernels import sparse_decode as sparse

# Compiling takes longer than running.
_jit = functools.partial(jax.jit, compiler_options={'xla_backend_optimization_level': 0})

dense_decode = _jit(dense.dense_decode, static_argnames=('implementation', 'out_dtype'))
sparse_decode = _jit(sparse.sparse_decode, static_argnames=('implementation', 'out_dtype'))
landmark_update = _jit(landmark.landmark_update, static_argnames=('policy', 'implementation'))
page_select = _jit(
    select.page_select,
    static_argnames=('page_tokens', 'max_pages', 'reserved_first', 'reserved_last', 'policy', 'implementation'),
)


def over(cases, repetitions=()):
    """Runs a test once for each entry of a case list; those named repeat others and run with `make verify`."""
    marks = {True: [pytest.mark.verify], False: []}
    return pytest.mark.parametrize(
        'case', [pytest.param(case, id=case.name, marks=marks[case.name in repetitions]) for case in cases]
    )
