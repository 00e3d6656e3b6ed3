"""An update of a tiny adapter on a mesh; run as a program it does so on simulated devices, one file a mesh.

python sharded_distill.py FOLDER data,fsdp,tensor ...
"""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'learner'))
from tiny_distill import make_distiller, with_pages
from tiny_learner import first_gradients, make_samples

LENGTHS = [(3, 38), (8, 40), (2, 2), (6, 31), (5, 17), (8, 9)]


def update(data: int, fsdp: int, tensor: int) -> dict[str, np.ndarray]:
    """Gradients, metrics and log-probs of one update; `facts` says where things lie."""
    made = make_distiller(
        **{
            'parallel.data': data,
            'parallel.fsdp': fsdp,
            'parallel.tensor': tensor,
            'model.shape.vocab_size': 32,
            'learner.rows_per_microbatch': 8,
            'distill.max_grad_norm': 1e9,
        }
    )
    distiller, rng = made.distiller, np.random.default_rng(3)
    state = distiller.init(0)
    for layer in state.params:
        for pair in layer.values():
            values = jnp.asarray(0.2 * rng.standard_normal(pair['b'].shape), jnp.float32)
            pair['b'] = jax.device_put(values, pair['b'].sharding)
    [rows] = distiller.rows(with_pages(make_samples(LENGTHS, vocab=32), budget=1))
    logp_BT = np.asarray(distiller.score(made.params, state.params, distiller.device(rows)))
    copy = distiller.for_sampler(state)
    specs = [str(x.sharding.spec) for x in jax.tree.leaves(state.params)]
    state, metrics = distiller.update(made.params, state, [rows])
    facts = {
        'devices': jax.device_count(),
        'specs': specs,
        'kept': [str(x.sharding.spec) for x in jax.tree.leaves(state.params)],
        'whole_on_data_shards': all('fsdp' not in str(x.sharding.spec) for x in jax.tree.leaves(copy.factors)),
        'metrics': metrics,
    }
    out = {'facts': np.array(json.dumps(facts)), 'logp': logp_BT * rows.mask_BT}
    return out | {f'gradient {i}': x for i, x in enumerate(first_gradients(state, made.tiny.run))}


if __name__ == '__main__':
    for sizes in sys.argv[2:]:
        np.savez(pathlib.Path(sys.argv[1]) / f'{sizes}.npz', **update(*map(int, sizes.split(','))))
