"""Samples over several meshes of this process's devices and prints what came out as JSON; `test_engine_sharding` starts
it with four simulated ones, or twice with one each:

python sharded_run.py [PORT PROCESS]
"""

import collections
import json
import sys

import jax
from sampler_setup import BIN_WIDTH, MIXED, PAGES, Sampler, make_model, make_requests

from sparrow_jax.config import ParallelConfig
from sparrow_jax.metrics import CompileCounter
from sparrow_jax.parallel import hosts
from sparrow_jax.rollout.engine import Probing, Sampling
from sparrow_jax.sparsity.controller import Control

REQUESTS = make_requests((24, 5, 16, 9), samples=8)
MESHES = {'data': (4, 1, 1), 'tensor': (1, 1, 4), 'both': (2, 1, 2)}  # (data, fsdp, tensor)


def run(mesh: tuple[int, int, int]) -> dict:
    sampler = Sampler(make_model(), mesh=mesh, slots=8, halvings=1)
    with CompileCounter() as counter:
        sampler.engine.warm_up(sampler.weights, [Sampling(1.0)])
        counter.warmed_up()
        responses = sampler(REQUESTS, budgets=MIXED)
    return {
        'devices': jax.device_count(),
        'shards': sampler.engine.shards,
        'late': counter.late,
        'keys': sampler.engine.request_keys(REQUESTS, jax.random.key(5), 3).tolist(),
        'next_keys': sampler.engine.request_keys(REQUESTS, jax.random.key(5), 4).tolist(),
        'tokens': [response.tokens.tolist() for response in responses],
        'logp': [response.logp.tolist() for response in responses],
        'pages_read': [response.pages_read.tolist() for response in responses],
        'reasons': [response.finish_reason for response in responses],
    }


def run_by_groups(mesh: tuple[int, int, int]) -> list[list[int]]:
    """Tokens under a policy that needs every query of a group by itself."""
    responses = Sampler(make_model(), mesh=mesh, slots=8, policy='group_softmax')(REQUESTS, budgets=MIXED)
    return [response.tokens.tolist() for response in responses]


def run_adaptively(mesh: tuple[int, int, int], **rollout) -> dict:
    """With a probe on every shard, and budgets that do not move."""
    control = Control(target=0.9, bin_width_tokens=BIN_WIDTH, min_count=10**9, urgent_count=10**9)
    sampler = Sampler(make_model(), MIXED, mesh=mesh, slots=8, probing=Probing(control, probes=1), **rollout)
    engine, settings = sampler.engine, {'run_key': jax.random.key(5), 'step': 3, 'sampling': Sampling(1.0)}
    with CompileCounter() as counter:
        engine.warm_up(sampler.weights, [Sampling(1.0)])
        controller = engine.start_controller()
        counter.warmed_up()
        responses, adapted = engine.generate_adaptively(sampler.weights, REQUESTS, controller, **settings)
    parks, streamed = engine.parks, collections.defaultdict(list)
    engine.generate(sampler.weights, REQUESTS, on_tokens=lambda i, new: streamed[i].extend(new.tolist()), **settings)
    histogram = adapted.controller.counts.histogram_ZX
    return {
        'late': counter.late,
        'parks': parks,
        'tokens': [response.tokens.tolist() for response in responses],
        'streamed': [streamed[i] for i in range(len(REQUESTS))],
        'sequences': adapted.controller.counts.sequences_Z.tolist(),
        'measured': adapted.controller.counts.tokens_Z.tolist(),
        'copies': [shard.data.tolist() for shard in histogram.addressable_shards],
    }


def run_as_one_of_two(port: str, process: int) -> dict:
    """One data shard a process, and so few pages that sequences leave for host memory."""
    hosts.start(ParallelConfig(-1, 1, 1, 'address', f'127.0.0.1:{port}', 2, process))
    return run_adaptively((2, 1, 1), pool_pages=2 * PAGES + 4)


if __name__ == '__main__' and len(sys.argv) > 1:
    json.dump(run_as_one_of_two(sys.argv[1], int(sys.argv[2])), sys.stdout)
elif __name__ == '__main__':
    results = {name: run(mesh) for name, mesh in MESHES.items()}
    results['adaptive'] = run_adaptively(MESHES['data'])
    results['groups'] = run_by_groups(MESHES['tensor'])
    json.dump(results, sys.stdout)
