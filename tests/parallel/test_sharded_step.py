"""A step on 8 simulated devices is the step on one device."""

import json
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sharded_step
from simulated_devices import many_and_single

ROOT = pathlib.Path(__file__).parents[2]
# The second has more tensor shards than the model has KV heads (2).
MESHES = ['2,2,2', '1,2,4']


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    """(results by mesh from one process with 8 simulated devices, those of one device here)."""
    return many_and_single(sharded_step, sharded_step.step, MESHES, tmp_path_factory.mktemp('sharded'))


@pytest.mark.slow
@pytest.mark.parametrize('sizes', MESHES)
def test_a_sharded_step_is_the_step_of_one_device(results, sizes):
    many, single = results[0][sizes], results[1]
    assert set(many) == set(single)
    facts, single_facts = (json.loads(str(x['facts'])) for x in (many, single))
    assert facts['devices'] == 8
    assert facts['moments_lie_with_weights']
    assert facts['rows_a_device'] == (1 if sizes == '2,2,2' else 2)
    assert facts['metrics'] == pytest.approx(single_facts['metrics'], rel=1e-5, abs=1e-5)
    for name in set(many) - {'facts'}:
        np.testing.assert_allclose(many[name], single[name], rtol=0, atol=1e-5, err_msg=name)
        if name.startswith('gradient'):
            assert np.abs(many[name]).max() > 1e-3, name
        if name.startswith('start'):
            assert np.abs(many[name.replace('start', 'weight')] - many[name]).max() > 1e-3, name


@pytest.mark.slow
def test_weights_are_really_cut(results):
    specs = {sizes: json.loads(str(results[0][sizes]['facts']))['specs'] for sizes in MESHES}
    assert specs['2,2,2']['layers.0.k'] == ['fsdp', 'tensor', None]
    assert specs['1,2,4']['layers.0.k'] == ['fsdp', None, None]
    for spec in specs.values():
        assert spec['layers.1.q'] == ['fsdp', 'tensor', None]
        assert spec['layers.1.o'] == ['tensor', None, 'fsdp']
        assert spec['layers.1.down'] == ['tensor', 'fsdp']
        assert spec['embed'] == ['tensor', 'fsdp']
