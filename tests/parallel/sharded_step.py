"""One step of a tiny learner on a mesh; run as a program it does so on simulated devices, one file a mesh.

python sharded_step.py FOLDER data,fsdp,tensor ...
"""

import json
import pathlib
import sys

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / 'learner'))
from tiny_learner import first_gradients, make_samples, make_tiny

from sparrow_jax.learner.rows import Counts

LENGTHS = [(3, 5), (4, 9), (10, 12), (2, 2), (6, 7), (1, 1), (5, 3), (9, 15), (8, 8), (7, 6), (12, 14)]


def step(data: int, fsdp: int, tensor: int) -> dict[str, np.ndarray]:
    """Log-probs of every place, metrics, gradients and updated weights of one step; `facts` says where things lie."""
    tiny = make_tiny(
        **{
            'parallel.data': data,
            'parallel.fsdp': fsdp,
            'parallel.tensor': tensor,
            'model.shape.vocab_size': 32,
            'model.shape.layers': 2,
            'learner.rows_per_microbatch': 4,
            'optimizer.learning_rate': 0.02,
            'optimizer.warmup_steps': 0,
            'optimizer.eps': 1e-3,  # large, so that a rounding of a tiny gradient does not decide a whole step
        }
    )
    start = list(map(np.array, jax.tree.leaves(tiny.params)))
    batches = tiny.batches(make_samples(LENGTHS))
    state, metrics = tiny.learner.update(tiny.state, batches, sum((b[0].counts for b in batches), Counts(0.0, 0.0)))
    names = ['.'.join(str(key.key) for key in path[:-1]) for path, _ in jax.tree.leaves_with_path(state.params)]
    weights, moments = jax.tree.leaves(state.params), jax.tree.leaves(state.optimizer[1][0].mu)
    facts = {
        'devices': jax.device_count(),
        'specs': {name: list(x.sharding.spec) for name, x in zip(names, weights, strict=True)},
        'moments_lie_with_weights': all(m.sharding == w.sharding for m, w in zip(moments, weights, strict=True)),
        'rows_a_device': batches[0][0].token_BT.sharding.shard_shape(batches[0][0].token_BT.shape)[0],
        'metrics': metrics,
    }
    out = {'facts': np.array(json.dumps(facts))}
    out |= {f'logp{i}': np.asarray(logp_BT) for i, (_, logp_BT, _) in enumerate(batches)}
    for kind, arrays in (('start', start), ('gradient', first_gradients(state, tiny.run)), ('weight', weights)):
        out |= {f'{kind} {name}': np.asarray(x) for name, x in zip(names, arrays, strict=True)}
    return out


if __name__ == '__main__':
    for sizes in sys.argv[2:]:
        np.savez(pathlib.Path(sys.argv[1]) / f'{sizes}.npz', **step(*map(int, sizes.split(','))))
