"""An update of the adapter on 8 simulated devices is the update on one device."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import sharded_distill
from tiny_learner import quick_compile

ROOT = pathlib.Path(__file__).parents[2]
MESHES = ['4,2,1', '2,2,2']


@pytest.mark.slow
def test_a_sharded_update_is_the_update_of_one_device(tmp_path):
    environment = {
        **os.environ,
        'XLA_FLAGS': '--xla_force_host_platform_device_count=8',
        'JAX_PLATFORMS': 'cpu',
        'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',
        'PYTHONPATH': str(ROOT),
    }
    command = [sys.executable, sharded_distill.__file__, str(tmp_path), *MESHES]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            with quick_compile():
                single = sharded_distill.update(-1, 1, 1)
            _, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    single_facts = json.loads(str(single['facts']))
    for sizes in MESHES:
        many = dict(np.load(tmp_path / f'{sizes}.npz'))
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
