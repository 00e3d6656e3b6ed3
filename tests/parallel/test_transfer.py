"""Arrays onto a mesh and back; what several processes do is in test_hosts.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparrow_jax.config import ParallelConfig
from sparrow_jax.parallel import transfer
from sparrow_jax.parallel.mesh import batch_sharding, make_mesh


@pytest.fixture
def two_processes(monkeypatch):
    """The other process has the same array plus one."""
    monkeypatch.setattr(jax, 'process_count', lambda: 2)

    def allgather(bits):
        other = (bits.view(allgather.dtype) + 1).astype(allgather.dtype).view(np.uint8)
        return np.stack([bits, other])

    monkeypatch.setattr(transfer.multihost_utils, 'process_allgather', allgather)
    return allgather


def test_arrays_go_onto_the_mesh_and_come_back():
    tree = {'a': np.arange(6, dtype=np.int32).reshape(2, 3), 'b': jnp.ones((4, 0), jnp.bfloat16)}
    sharding = batch_sharding(make_mesh(ParallelConfig(-1, 1, 1)))
    placed = transfer.place(tree, sharding)
    assert all(array.sharding == sharding for array in placed.values())
    back = transfer.read(placed | {'c': 3})
    assert isinstance(back['a'], np.ndarray)
    np.testing.assert_array_equal(back['a'], tree['a'])
    assert (back['b'].shape, back['c']) == ((4, 0), 3)


@pytest.mark.parametrize('array', [np.asarray([[0.1, np.nan, -3e300]]), np.zeros((2, 0)), np.float64(0.7)])
def test_one_process_is_all(array):
    gathered = transfer.of_all(np.asarray(array))
    np.testing.assert_array_equal(gathered, np.asarray(array)[None])
    assert gathered.dtype == np.asarray(array).dtype


@pytest.mark.parametrize('array', [np.asarray([[0.1, 1 / 3], [1e300, 2.0]]), np.float64(0.1), np.arange(3)])
def test_arrays_of_two_processes_come_in_their_order_and_bit_for_bit(array, two_processes):
    two_processes.dtype = np.asarray(array).dtype
    gathered = transfer.of_all(np.asarray(array))
    np.testing.assert_array_equal(gathered, np.stack([array, array + 1]))
    assert gathered.dtype == two_processes.dtype


def test_a_text_is_the_same_in_one_process():
    assert transfer.same_in_all('alone')


def test_texts_of_two_processes_are_compared(two_processes):
    two_processes.dtype = np.dtype(np.uint8)  # the other's digest differs
    assert not transfer.same_in_all('with another')


def test_the_least_of_all_is_unknown_where_one_does_not_know(two_processes):
    two_processes.dtype = np.dtype(np.int64)
    assert transfer.least(7) == 7
    assert transfer.least(None) is None
    two_processes.dtype = np.dtype(bool)
    assert transfer.any_of_all(False)  # the other's is True
