"""Samples over several meshes of this process's devices and prints what came out as JSON; `test_engine_sharding` starts
it with four simulated ones."""

import json
import sys

import jax
from sampler_setup import MIXED, Sampler, make_model, make_requests

from sparrow_jax.metrics import CompileCounter
from sparrow_jax.rollout.engine import Sampling

REQUESTS = make_requests((24, 5, 16, 9), samples=8)
MESHES = {'data': (4, 1, 1), 'tensor': (1, 1, 4)}  # (data, fsdp, tensor)


def run(mesh: tuple[int, int, int]) -> dict:
    sampler = Sampler(make_model(), mesh=mesh, slots=8)
    with CompileCounter() as counter:
        sampler.engine.warm_up(sampler.weights, [Sampling(1.0)])
        counter.warmed_up()
        responses = sampler(REQUESTS, budgets=MIXED)
    return {
        'devices': jax.device_count(),
        'shards': sampler.engine.shards,
        'late': counter.late,
        'keys': sampler.engine._request_keys(REQUESTS, jax.random.key(5), 3).tolist(),
        'next_keys': sampler.engine._request_keys(REQUESTS, jax.random.key(5), 4).tolist(),
        'tokens': [response.tokens.tolist() for response in responses],
        'logp': [response.logp.tolist() for response in responses],
        'pages_read': [response.pages_read.tolist() for response in responses],
        'reasons': [response.finish_reason for response in responses],
    }


if __name__ == '__main__':
    json.dump({name: run(mesh) for name, mesh in MESHES.items()}, sys.stdout)
