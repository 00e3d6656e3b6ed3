"""An update of the adapter on 8 simulated devices is the update on one device."""

import json
import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sharded_distill
from simulated_devices import many_and_single

MESHES = ['4,2,1', '2,2,2']


@pytest.mark.slow
def test_a_sharded_update_is_the_update_of_one_device(tmp_path):
    by_mesh, single = many_and_single(sharded_distill, sharded_distill.update, MESHES, tmp_path)
    single_facts = json.loads(str(single['facts']))
    for sizes in MESHES:
        many = by_mesh[sizes]
        facts = json.loads(str(many['facts']))
        assert facts['devices'] == 8
        assert facts['specs'] == facts['kept']
        assert any('fsdp' in spec for spec in facts['specs'])
        assert facts['whole_on_data_shards']
        assert facts['metrics'] == pytest.approx(single_facts['metrics'], rel=1e-4, abs=1e-5)
        assert set(many) == set(single)
        for name in set(many) - {'facts'}:
            np.testing.assert_allclose(many[name], single[name], rtol=0, atol=1e-5, err_msg=name)
        assert max(np.abs(many[name]).max() for name in many if name.startswith('gradient')) > 0.01
