"""What the benches of single steps and of whole rollouts share: decoder and weights of a configuration, facts."""

import dataclasses
import functools
import math
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from pallas_kernels.bench import CEILING, LEAST_BANDWIDTH, read_bandwidth
from sparrow_jax import memory
from sparrow_jax.assembly import model_shape, probing_of
from sparrow_jax.config import RolloutConfig, RunConfig
from sparrow_jax.console import Console
from sparrow_jax.models.decoder import abstract_decoder, init_decoder
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.engine import Engine
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule, load_schedule

GIGABYTES, CPU_GIGABYTES = 8, 1e-4  # read to measure the bandwidth; on a CPU it means nothing
NEVER = 1 << 30  # tokens of a length bin: no rollout measures as many


@dataclasses.dataclass(frozen=True)
class Setup:
    """The configuration, the decoder, the mesh, and the schedule that the configuration names."""

    run: RunConfig
    shape: DecoderShape
    mesh: Mesh
    schedule: Schedule

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(self.run.model.compute_dtype)

    @functools.cached_property
    def graphdef(self) -> nnx.GraphDef:
        return abstract_decoder(self.shape, param_dtype=self.dtype, compute_dtype=self.dtype)[0]

    def engine(self, rollout: RolloutConfig, schedule: Schedule) -> Engine:
        """Its sequences end at their limits only; under an adaptive schedule it has probes, and budgets never move."""
        never = self.shape.vocab_size  # as end token: it is never drawn
        held = dataclasses.replace(self.run.controller, min_count=NEVER, urgent_count=NEVER)
        probing = probing_of(held, schedule)
        return Engine(self.graphdef, self.shape, self.mesh, rollout, schedule, (never,), self.dtype.name, probing)

    def random_weights(self, engine: Engine) -> nnx.State:
        """In the compute dtype, made where the sampler wants them."""
        options = {'param_dtype': self.dtype, 'compute_dtype': self.dtype}
        return jax.jit(lambda: engine.weights(init_decoder(self.shape, self.run.seed, **options)[1]))()

    def memory(self, rollout: RolloutConfig) -> dict[str, int]:
        """Estimated bytes on each device by what holds them: no learner, and no hidden states are kept."""
        parts = memory.estimate(self.sampling_run(rollout), self.shape, self.mesh.shape, jax.devices()[0].platform)
        kept = lambda name: name == 'sampler weights' or name.startswith('rollout: ')
        return {name.removeprefix('rollout: '): size for name, size in parts.items() if kept(name)}

    def sampling_run(self, rollout: RolloutConfig) -> RunConfig:
        """The configuration of a bench, where nothing is learned or compared."""
        return dataclasses.replace(
            self.run,
            rollout=rollout,
            schedule=dataclasses.replace(self.run.schedule, kind='fixed'),
            mismatch=dataclasses.replace(self.run.mismatch, every_steps=0, floor_every_steps=0),
        )


def make_setup(run: RunConfig) -> Setup:
    """Reads no weights. Raises ConfigError as `assembly.model_shape` and `load_schedule` do."""
    shape = published_shape(run)
    return Setup(run, shape, meshes.make_mesh(run.parallel), load_schedule(run.schedule, run.rollout, shape.layers))


def published_shape(run: RunConfig) -> DecoderShape:
    """The decoder's shape; where the configuration states it, no checkpoint is needed."""
    model = run.model
    if model.shape.vocab_size and not model.random_weights:
        model = dataclasses.replace(model, random_weights=True)
    return model_shape(dataclasses.replace(run, model=model))


def dense_schedule(schedule: Schedule) -> Schedule:
    """Every layer reads every page."""
    return dataclasses.replace(schedule, kind='dense', budget_pages=(EVERY_PAGE,))


def measured_facts(setup: Setup, engine: Engine) -> dict[str, Any]:
    """What holds for all figures of a run; measures the read bandwidth."""
    device = jax.devices()[0]
    free = memory.available_bytes(device) or math.inf
    bandwidth = read_bandwidth(CPU_GIGABYTES if device.platform == 'cpu' else min(GIGABYTES, free / 4e9))
    return {
        'model': model_name(setup.shape),
        'device': device.device_kind,
        'devices': jax.device_count(),
        'jax': jax.__version__,
        'kernels': f'{engine.kernels} ({engine.why_kernels})',
        'read_bandwidth_tb_s': bandwidth / 1e12,
        'valid': bandwidth >= LEAST_BANDWIDTH or 'H200' not in device.device_kind,
        'limit_tb_s': CEILING / 1e12,
        'compute_dtype': setup.dtype.name,
        'page_tokens': setup.run.rollout.page_tokens,
        'segment_steps': setup.run.rollout.segment_steps,
        'dense_layers': list(setup.schedule.dense_layers),
        'reserved_pages': setup.schedule.reserved_pages,
        'command': f'python -m sparrow_jax.bench_rollout {shlex.join(sys.argv[1:])}',
    }


def start(console: Console, title: str, facts: dict[str, Any]) -> None:
    """Shows the facts, and what the figures are not good for."""
    console.start(title, {name: facts[name] for name in ('model', 'device', 'jax', 'kernels')})
    if not facts['valid']:
        console.warn(f'the read bandwidth is {facts["read_bandwidth_tb_s"]:.2f} TB/s: this run is NOT VALID')
    if jax.devices()[0].platform == 'cpu':
        console.warn('on a CPU the speeds mean nothing; this run shows that the command works')
    elif 'H200' not in facts['device']:
        console.warn(f'the limit is that of an H200, {facts["limit_tb_s"]} TB/s')


def mode_of(schedule: Schedule) -> str:
    return 'dense' if schedule.kind == 'dense' else 'sparse'


def model_name(shape: DecoderShape) -> str:
    """Family and parameters, 'qwen3 1.72B'."""
    count = shape.parameter_count()
    return f'{shape.family} {count / 1e9:.2f}B' if count >= 1e9 else f'{shape.family} {count / 1e6:.2f}M'
