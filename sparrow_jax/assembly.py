"""The parts of a run, made from its configuration: mesh, decoder, tokenizer, schedule, sampler.

Every command starts here, so that a setting means the same in all of them, and so that what cannot work (missing
weights, a vocabulary that does not fit, a schedule of another page size, too little memory) is said before anything
large is read.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sparrow_jax import memory
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.config import ConfigError, ControllerConfig, RunConfig
from sparrow_jax.console import notice_once
from sparrow_jax.learner.distill import Distiller
from sparrow_jax.learner.learner import Learner
from sparrow_jax.learner.updates import LearnerState
from sparrow_jax.models.adapter import AdapterSpec, SamplerAdapter, adapter_axes, init_adapter
from sparrow_jax.models.decoder import Factors, abstract_decoder, init_decoder, logical_axes
from sparrow_jax.models.identity import model_hash
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.models.weights import load_params, read_shape
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.parallel import transfer
from sparrow_jax.rollout.engine import Engine, Probing
from sparrow_jax.sparsity.controller import Control, whole_pages
from sparrow_jax.sparsity.schedules import Schedule, check_calibration, load_schedule
from sparrow_jax.tasks.prompts import PromptEncoder
from sparrow_jax.workdir import Workdir


@dataclasses.dataclass(frozen=True)
class Frame:
    """What is compiled: the parts that need no files but the schedule's, and no accelerator.

    Attributes:
        run: the configuration, with the pages of the pool where memory decides them.
        mesh: of all devices.
        shape: of the decoder.
        schedule: budgets of the sparse sampler.
        learner_graph, sampler_graph: the decoder's structure with and without recomputation in the backward pass;
            both take the same weights.
    """

    run: RunConfig
    mesh: Mesh
    shape: DecoderShape
    schedule: Schedule
    learner_graph: nnx.GraphDef
    sampler_graph: nnx.GraphDef

    @classmethod
    def make(cls, run: RunConfig, mesh: Mesh, shape: DecoderShape, schedule: Schedule, **more: Any) -> Self:
        """With the decoder's structures; more: what a subclass has beside these."""
        learner_graph, _ = abstract_decoder(shape, remat=run.model.remat, **_dtypes(run))
        sampler_graph, _ = abstract_decoder(shape, remat=False, **_dtypes(run))
        return cls(run, mesh, shape, schedule, learner_graph, sampler_graph, **more)

    def abstract_params(self) -> nnx.State:
        """Shapes, dtypes and learner shardings of the weights; nothing is allocated."""
        _, params = abstract_decoder(self.shape, **_dtypes(self.run))
        place = lambda x, axes: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=meshes.weight_sharding(self.mesh, axes, x.shape, meshes.LEARNER_RULES)
        )
        leaves = [
            place(x, axes)
            for x, axes in zip(
                jax.tree.leaves(params),
                jax.tree.leaves(logical_axes(params), is_leaf=lambda x: isinstance(x, tuple)),
                strict=True,
            )
        ]
        return jax.tree.unflatten(jax.tree.structure(params), leaves)

    def engine_that_ends(self, end_ids: Sequence[int], trains: bool) -> Engine:
        """The sampler, with the tokens that end a response; trains: as in `Parts.engine`."""
        return Engine(
            self.sampler_graph,
            self.shape,
            self.mesh,
            self.run.rollout,
            self.schedule,
            end_ids,
            self.run.model.compute_dtype,
            probing_of(self.run.controller, self.schedule) if trains else None,
            may_widen=trains and self.run.guard.action == 'widen',
        )

    def distiller(self, learner: Learner, engine: Engine) -> Distiller:
        """What trains the adapter of the engine's sampler beside the learner."""
        return Distiller(
            self.shape,
            learner.abstract_state.params,
            self.mesh,
            self.run,
            self.schedule,
            engine.kernels,
            learner.attention,
        )


@dataclasses.dataclass(frozen=True)
class Parts(Frame):
    """What all commands share.

    Attributes:
        encoder: prompts and answers, text to ids and back.
        memory_bytes: estimated bytes per device, by part.
    """

    encoder: PromptEncoder
    memory_bytes: dict[str, int]

    def start_params(self) -> nnx.State:
        """The start weights: from `model.path`, or random ones drawn from the run's seed."""
        abstract = self.abstract_params()
        if not self.run.model.random_weights:
            return load_params(self.run.model.path, abstract)
        make = lambda: init_decoder(self.shape, self.run.seed, **_dtypes(self.run))[1]
        return jax.jit(make, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()

    def engine(self, trains: bool = False, forced_lengths: bool = False) -> Engine:
        """The sampler.

        Args:
            trains: whether budgets can change while it lives: by an adaptive schedule, or by a guard.
            forced_lengths: sequences end at their limits only.
        """
        never = (self.shape.vocab_size,)  # no token has that number
        return self.engine_that_ends(never if forced_lengths else self.encoder.end_ids, trains)


def assemble(run: RunConfig, *, trains: bool = True, samples: bool = True) -> Parts:
    """Makes the parts; reads configuration files and tokenizer, no weights.

    Args:
        run: the configuration.
        trains, samples: False for a command that does not; it needs no memory for it.

    Raises:
        ConfigError: the configuration, the files it names and this machine do not fit each other.
    """
    shape = model_shape(run)
    longest = run.rollout.max_prompt_tokens + run.rollout.max_response_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f'rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}: the model knows '
            f'{shape.max_positions} positions; '
            f'set rollout.max_response_tokens to at most {shape.max_positions - run.rollout.max_prompt_tokens}'
        )
    schedule = load_schedule(run.schedule, run.rollout, shape.layers, run.mismatch.bin_width_tokens)
    check_calibration(
        run.schedule,
        model=run.model.path or 'random weights',
        model_hash=lambda: model_hash(run.model, run.seed),
        dtype=run.model.compute_dtype,
        temperature=run.rollout.temperature,
    )
    mesh = meshes.make_mesh(run.parallel)
    encoder = PromptEncoder(run.tokenizer, run.data, run.model.path)
    if len(encoder.tokenizer) > shape.vocab_size:
        raise ConfigError(
            f'the tokenizer has {len(encoder.tokenizer)} tokens, the model an embedding of {shape.vocab_size}: '
            'tokenizer.path and model.path belong to different models'
        )
    if samples:
        device = jax.local_devices()[0]
        available = transfer.least(memory.available_bytes(device))  # or every process would have a pool of its own
        run, note = memory.fit_pool(run, shape, mesh.shape, available, device.platform, trains=trains)
        if note:
            notice_once(note)
    parts = memory.check_fits(run, shape, mesh.shape, trains=trains, samples=samples)
    return Parts.make(run, mesh, shape, schedule, encoder=encoder, memory_bytes=parts)


def probing_of(config: ControllerConfig, schedule: Schedule) -> Probing | None:
    """What an adaptive schedule measures; None for the others."""
    if schedule.kind != 'adaptive':
        return None
    control = Control(
        target=config.target_p05,
        bin_width_tokens=schedule.bin_width_tokens,
        min_count=config.min_count,
        urgent_count=config.urgent_count,
        tolerance=config.tolerance,
        least_budget=config.least_pages,
        reserved_pages=schedule.reserved_pages,
    )
    return Probing(control, config.probes, config.most_pages)


def _dtypes(run: RunConfig) -> dict[str, jnp.dtype]:
    """The dtype arguments of `Decoder`."""
    return {'param_dtype': jnp.dtype(run.model.param_dtype), 'compute_dtype': jnp.dtype(run.model.compute_dtype)}


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy to look at.

    Attributes:
        params: its weights.
        step: of the checkpoint; 0 for start weights.
        parts: those of the command; the schedule has the budgets that the run had arrived at.
        factors: float32, of the sparse sampler's adapter, where the run has taught one; spec: its size.
    """

    params: nnx.State
    step: int
    parts: Parts
    factors: list[Factors] | None = None
    spec: AdapterSpec | None = None

    @property
    def adapter(self) -> SamplerAdapter | None:
        """As the sampler takes it."""
        if self.factors is None or self.spec is None:
            return None
        dtype = jnp.dtype(self.parts.run.model.compute_dtype)
        return SamplerAdapter(jax.tree.map(lambda x: x.astype(dtype), self.factors), self.spec.scale)


def load_policy(parts: Parts, workdir: str) -> Policy:
    """A run's newest checkpoint, or the start weights where there is none (or no workdir).

    Reads only: the run may still be training.

    Raises:
        ConfigError: the workdir belongs to a run of another model, or its budgets are for other pages or length bins.
    """
    folder = Path(workdir)
    if not workdir or not (folder / 'config.json').exists():
        return Policy(parts.start_params(), 0, parts)
    opened, trained = Workdir.existing(workdir)
    if trained.model.shape != parts.run.model.shape or trained.model.random_weights != parts.run.model.random_weights:
        raise ConfigError(
            f'--workdir={workdir}: its run trains another model than --config; give the config that it was started with'
        )
    if not opened.checkpoints.exists():
        return Policy(parts.start_params(), 0, parts)
    with Checkpoints(opened.checkpoints, read_only=True) as checkpoints:
        step = checkpoints.latest_step()
        if step is None:
            return Policy(parts.start_params(), 0, parts)
        # A learner state without its other parts: only the weights are read.
        wanted: dict[str, Any] = {'params': parts.abstract_params()}
        spec = None
        if trained.distill.enabled:
            spec = AdapterSpec(trained.distill.rank, trained.distill.alpha, trained.distill.targets)
            wanted['adapter'] = LearnerState(_abstract_factors(parts, spec), None, None)
        restored, facts = checkpoints.restore(step, wanted, partial=True)
    arrived = dataclasses.replace(parts, schedule=_arrived(parts, trained, facts))
    factors = restored['adapter'].params if spec else None
    return Policy(restored['params'], step, arrived, factors, spec)


def _abstract_factors(parts: Parts, spec: AdapterSpec) -> Any:
    """Shapes of a run's adapter, and where the sampler has it."""
    place = lambda x, axes: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=meshes.weight_sharding(parts.mesh, axes, x.shape, meshes.SAMPLER_RULES)
    )
    factors = jax.eval_shape(lambda: init_adapter(parts.shape, spec, 0))
    return jax.tree.map(place, factors, adapter_axes(parts.shape, spec))


def _arrived(parts: Parts, trained: RunConfig, facts: Mapping[str, Any]) -> Schedule:
    """The schedule as the run's controller and guard have left it."""
    guard = facts.get('guard', {})
    if parts.schedule.kind != trained.schedule.kind or guard.get('dense'):
        return parts.schedule
    if parts.schedule.kind != 'adaptive':
        return parts.schedule.widened(guard.get('widened', 0))
    for field in (
        'rollout.page_tokens',
        'mismatch.bin_width_tokens',
        'schedule.start',
        'schedule.policy',
        'schedule.dense_layers',
        'schedule.reserved_first_pages',
        'schedule.reserved_last_pages',
    ):
        section, name = field.split('.')
        here, there = (getattr(getattr(run, section), name) for run in (parts.run, trained))
        if here != there:
            raise ConfigError(f'{field}={here!r}: the run has found its budgets with {there!r}; set it to that')
    if parts.schedule.bin_width_tokens != facts['bin_width_tokens']:
        raise ConfigError(
            f'schedule.path={parts.run.schedule.path!r}: has length bins of {parts.schedule.bin_width_tokens} tokens, '
            f'the run has found its budgets with {facts["bin_width_tokens"]}'
        )
    budgets = whole_pages(np.asarray(facts['controller']['budget_Z']))
    return dataclasses.replace(parts.schedule, budget_pages=tuple(budgets.tolist()))


def model_shape(run: RunConfig) -> DecoderShape:
    """The decoder's shape: the checkpoint's own, or the configured one for random weights.

    Raises:
        ConfigError: no checkpoint there, or `model.shape` is filled in and says otherwise.
    """
    configured = dataclasses.asdict(run.model.shape)
    if run.model.random_weights:
        return DecoderShape(**configured)
    shape = read_shape(run.model.path)
    if run.model.shape.vocab_size:
        for field, value in configured.items():
            if value != getattr(shape, field):
                raise ConfigError(
                    f'model.shape.{field}={value!r}: the checkpoint {run.model.path} has {getattr(shape, field)!r} '
                    '(model.shape.vocab_size=0 takes the shape from the checkpoint)'
                )
    return shape
