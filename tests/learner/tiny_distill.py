"""A tiny float32 distiller for the tests."""

import dataclasses

import numpy as np
from tiny_learner import make_tiny

from pallas_kernels.implementation import Implementation
from sparrow_jax.learner.distill import Distiller
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.sparsity.schedules import load_schedule

LAYERS, PAGE, DENSE_LAYERS = 2, 8, (0,)
CHANGES = {
    'model.shape.layers': LAYERS,
    'schedule.dense_layers': DENSE_LAYERS,
    'schedule.reserved_last_pages': 1,
    'rollout.page_tokens': PAGE,
    'rollout.max_prompt_tokens': 8,
    'rollout.max_response_tokens': 40,
    'learner.row_tokens': 128,
    'distill.enabled': True,
    'distill.rank': 3,
    'distill.alpha': 4.5,
    'distill.targets': ('q', 'v', 'down'),
}


@dataclasses.dataclass(frozen=True)
class TinyDistiller:
    """A distiller beside the learner whose policy it takes."""

    tiny: object
    distiller: Distiller

    @property
    def params(self):
        return self.tiny.params


def distiller_of(run, learner) -> Distiller:
    shape = DecoderShape(**dataclasses.asdict(run.model.shape))
    schedule = load_schedule(run.schedule, run.rollout, shape.layers)
    params = learner.abstract_state.params
    return Distiller(shape, params, learner.mesh, run, schedule, Implementation.REFERENCE, learner.attention)


def make_distiller(mesh=None, **changes) -> TinyDistiller:
    tiny = make_tiny(mesh, **CHANGES | changes)
    return TinyDistiller(tiny, distiller_of(tiny.run, tiny.learner))


def with_pages(samples, budget):
    """As a sampler with one page reserved at either end records them."""
    found = []
    for sample in samples:
        length = len(sample.prompt_ids) + np.arange(len(sample.response_ids))  # cached, its input too
        pages = np.minimum(-(-length // PAGE), budget + 2)
        pages[:1] = 0
        found.append(dataclasses.replace(sample, pages_read=pages.astype(np.int32)))
    return found
