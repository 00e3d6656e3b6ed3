"""Four data shards, each with slots and a pool of its own, give the samples that one gives; so do four tensor shards
over two KV heads, and two of each."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest
from sampler_setup import MIXED, Sampler, assert_same, make_model
from sharded_run import MESHES, REQUESTS

from sparrow_jax.rollout.engine import Response


def start(devices: int, *arguments: str) -> subprocess.Popen:
    here = pathlib.Path(__file__).parent
    root = here.parents[1]
    path = os.pathsep.join([str(root), os.environ.get('PYTHONPATH', '')])
    # Half the time is compilation, hence no optimization.
    flags = f'--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0'
    flags = f'{os.environ.get("XLA_FLAGS", "")} {flags}'
    return subprocess.Popen(
        [sys.executable, here / 'sharded_run.py', *arguments],
        env=os.environ | {'XLA_FLAGS': flags, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope='module')
def sharded():
    with start(4) as process:
        out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out)


@pytest.mark.parametrize(('mesh', 'shards'), [('data', 4), ('tensor', 1), ('both', 2)])
def test_four_devices_were_used_and_nothing_compiled_late(sharded, mesh, shards):
    assert (sharded[mesh]['devices'], sharded[mesh]['shards'], sharded[mesh]['late']) == (4, shards, [])


@pytest.mark.parametrize('mesh', MESHES)
def test_keys_are_distinct_and_the_same_whatever_the_sharding(sharded, sampler, mesh):
    keys = [tuple(key) for key in sharded[mesh]['keys']]
    assert len(set(keys)) == len(REQUESTS) == 32
    assert not set(keys) & {tuple(key) for key in sharded[mesh]['next_keys']}
    np.testing.assert_array_equal(keys, sampler.engine.request_keys(REQUESTS, jax.random.key(5), 3))


@pytest.mark.parametrize('mesh', MESHES)
def test_responses_are_the_same_whatever_the_sharding(sharded, sampler, mesh):
    fields = ('tokens', 'logp', 'pages_read', 'reasons')
    responses = [
        Response(np.asarray(tokens), np.asarray(logp), np.asarray(pages), None, reason)
        for tokens, logp, pages, reason in zip(*(sharded[mesh][field] for field in fields), strict=True)
    ]
    assert_same(responses, sampler(REQUESTS, budgets=MIXED))
    longer = [tuple(response.tokens.tolist()) for response in responses if len(response.tokens) > 3]
    assert len(set(longer)) == len(longer) > 16


def test_a_policy_that_looks_at_each_query_sees_the_whole_group_on_every_shard(sharded):
    alone = Sampler(make_model(), slots=8, policy='group_softmax')(REQUESTS, budgets=MIXED)
    assert sharded['groups'] == [response.tokens.tolist() for response in alone]
    assert sharded['groups'] != sharded['tensor']['tokens']


def test_every_shard_counts_the_probes_of_all(sharded, sampler):
    """Four probes at a time, one a shard; the controller is whole on every device, and changes no token."""
    found = sharded['adaptive']
    assert found['late'] == []
    assert len(found['copies']) == 4
    assert all(copy == found['copies'][0] for copy in found['copies'])
    assert [sum(row) for row in found['copies'][0]] == found['measured']
    assert max(found['sequences']) >= 4
    expected = [response.tokens.tolist() for response in sampler(REQUESTS, budgets=MIXED)]
    assert found['tokens'] == found['streamed'] == expected


@pytest.mark.slow
def test_two_processes_sample_what_one_does(sampler):
    """Each runs the host's decisions for the slots of both, and reads what is on the other's device."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        port = listener.getsockname()[1]
    processes = [start(1, str(port), str(process)) for process in range(2)]
    try:
        answers = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], answers
    found = [json.loads(out.splitlines()[-1]) for out, _ in answers]
    assert found[0] == found[1]
    assert found[0]['late'] == []
    assert found[0]['parks'] > 0
    expected = [response.tokens.tolist() for response in sampler(REQUESTS, budgets=MIXED)]
    assert found[0]['tokens'] == found[0]['streamed'] == expected
