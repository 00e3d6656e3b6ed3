"""The compiled functions of an engine, and what is fixed when they are compiled.

The engine calls them between the host's decisions, benches call the same ones. Each is made when it is first asked
for. Cache and slots are donated to every function that takes both, and come back in the same layouts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.implementation import PROVEN_PLATFORMS, Implementation, choose, kernels_start_early, why_unfit
from sparrow_jax.config import ConfigError, RolloutConfig
from sparrow_jax.models.attention import best_implementation
from sparrow_jax.models.decoder import logical_axes
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.cache import Cache, Slots, make_cache, make_slots
from sparrow_jax.rollout.compaction import move_sequences
from sparrow_jax.rollout.decode import SamplerStatics, decode_segment, prefill
from sparrow_jax.rollout.fused_step import why_unfused
from sparrow_jax.rollout.harvest import cut_row
from sparrow_jax.rollout.head_shards import HeadShards
from sparrow_jax.rollout.offload import Offload
from sparrow_jax.rollout.probes import measure
from sparrow_jax.rollout.sampling import sample_keys
from sparrow_jax.rollout.scheduler import Layout
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.controller import Control, Controller
from sparrow_jax.sparsity.schedules import Schedule

SHARDED = PartitionSpec(meshes.BATCH_AXES)
WHOLE = PartitionSpec()
CACHE = Cache(PartitionSpec(None, meshes.BATCH_AXES), SHARDED)  # type: ignore[arg-type]  # pages are split along P
# Of XLA: in the CUDA graphs that it makes, no kernel begins before the one before it has ended.
_KERNEL_BY_KERNEL = {'xla_gpu_enable_command_buffer': ''}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample.

    `sparse` follows the schedule, else every layer reads every page; temperature 0 is greedy; top_p below 1 is for
    evaluation.
    """

    temperature: float
    top_p: float = 1.0
    sparse: bool = True
    keep_hidden: bool = False


class SamplerFunctions:
    """What an engine compiles, by name; each method down to `offload` gives one function.

    Args:
        graphdef, shape: the decoder.
        mesh: of the run.
        rollout: lengths and the kernels that are asked for.
        layout: sizes of slots and pages.
        schedule: what it says of layers, reserved pages and policy is fixed; its budgets are not.
        end_ids: tokens that end a response.
        dtype: of cache and activations.
        may_widen: whether sparse layers may come to read more pages than `schedule` says.
        most_budget: pages that an adaptive schedule keeps to; 0: as many as a sequence has.

    Raises:
        ConfigError: kernels that do not take such a cache, or that this machine does not run.

    Attributes:
        statics: of the sparse sampler.
        why_kernels: the reason for `statics.kernels`, and for what they do not run.
        compiled: the functions made so far.
        sample_keys: `sampling.sample_keys`.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        shape: DecoderShape,
        mesh: Mesh,
        rollout: RolloutConfig,
        layout: Layout,
        schedule: Schedule,
        end_ids: Sequence[int],
        dtype: np.dtype,
        may_widen: bool,
        most_budget: int = 0,
    ):
        self.graphdef, self.shape, self.mesh = graphdef, shape, mesh
        self.rollout, self.layout, self.dtype = rollout, layout, dtype
        kernels, self.why_kernels = choose_kernels(rollout.kernels, shape, mesh, dtype)
        _, why_selection = schedule.policy.implementation(kernels)
        unfused = self._why_unfused(kernels, schedule)
        self.why_kernels += ''.join(f'; {reason}' for reason in (why_selection, unfused) if reason)
        pages = layout.pages_per_sequence
        self.statics = SamplerStatics(
            page_tokens=layout.page_tokens,
            max_pages=pages if may_widen else schedule.most_pages(pages, most_budget),
            reserved_first=schedule.reserved_first,
            reserved_last=schedule.reserved_last,
            bin_width_tokens=schedule.bin_width_tokens,
            dense_layers=frozenset(range(shape.layers) if schedule.kind == 'dense' else schedule.dense_layers),
            end_ids=tuple(end_ids),
            prefill_attention=best_implementation(dtype.name),
            policy=schedule.policy,
            kernels=kernels,
            heads=HeadShards.of(shape, mesh.shape['tensor']),
            fused=kernels.platform == 'gpu' and not unfused,
            truncate=False,
        )
        self.compiled: dict[tuple, Any] = {}
        self.sample_keys = jax.jit(sample_keys)

    def weights(self, params: nnx.State) -> Callable[[nnx.State], nnx.State]:
        """Of a policy like `params`: the sampler's copy of it."""

        def build() -> Callable[[nnx.State], nnx.State]:
            shardings = jax.tree.map(
                lambda array, axes: meshes.weight_sharding(self.mesh, axes, array.shape, meshes.SAMPLER_RULES),
                nnx.to_pure_dict(params),
                nnx.to_pure_dict(logical_axes(params)),
            )
            out = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(shardings))
            cast = lambda x: x.astype(self.dtype) if x.ndim > 1 else x
            return jax.jit(lambda p: jax.tree.map(cast, p), out_shardings=out)

        return self._once(('weights',), build)

    def fresh(self, keep_hidden: bool) -> Callable[[], tuple[Cache, Slots]]:
        """Cache and slots of a call of the engine."""
        layout = self.layout
        probes = layout.probes * layout.shards

        def make() -> tuple[Cache, Slots]:
            cache = make_cache(
                self.shape,
                heads=self.statics.heads,
                slots=self.rollout.slots,
                pool_pages=layout.pages * layout.shards,
                pages_per_sequence=layout.pages_per_sequence,
                page_tokens=layout.page_tokens,
                policy=self.statics.policy,
                dtype=self.dtype,
            )
            slots = make_slots(
                slots=self.rollout.slots,
                pages_per_sequence=layout.pages_per_sequence,
                max_response_tokens=self.rollout.max_response_tokens,
                kept_hidden_size=self.shape.d_model if keep_hidden else 0,
                probes=probes,
                segment_steps=layout.segment_steps,
                hidden_size=self.shape.d_model,
                dtype=self.dtype,
            )
            return cache, slots

        return self._once(('fresh', keep_hidden), lambda: jax.jit(make, out_shardings=self.shardings()))

    def prefill(self, sampling: Sampling) -> Callable:
        """(weights, cache, slots, prompts, values) -> cache, slots."""
        # Prefill is dense whatever the sampler: the sparse sampler's function serves both.
        statics = dataclasses.replace(self.variant(sampling), dense_layers=self.statics.dense_layers)
        build = lambda: self._sharded(functools.partial(prefill, self.graphdef, statics), (SHARDED, WHOLE))
        return self._once(('prefill', statics), build)

    def segment(self, sampling: Sampling, width: int = 0) -> Callable:
        """(weights, cache, slots, values) -> cache, slots; of the first `width` slots of each shard, 0: of all."""
        statics, width = self.variant(sampling), width or self.layout.slots
        function = functools.partial(decode_segment, self.graphdef, statics, self.layout.segment_steps, width)
        build = lambda: self._sharded(function, (WHOLE,), compiler_options=self.compiler_options(statics))
        return self._once(('segment', statics, width), build)

    def move(self) -> Callable:
        """(landmarks, slots, source_M, target_M) -> landmarks, slots: `compaction.move_sequences` on every shard."""

        def build() -> Callable:
            cache, slots = self.shardings()
            return jax.jit(
                self.mapped(move_sequences, (SHARDED,) * 4, (SHARDED,) * 2),
                donate_argnums=(0, 1),
                out_shardings=(cache.landmarks, slots),
            )

        return self._once(('move',), build)

    def measure(self, sampling: Sampling, control: Control, most_budget_Z: np.ndarray) -> Callable:
        """(weights, cache, slots, controller, temperature) -> cache, slots, controller."""
        statics, most_pages = self.variant(sampling), tuple(most_budget_Z.tolist())
        function = functools.partial(measure, self.graphdef, statics, control, most_pages, meshes.BATCH_AXES)
        build = lambda: self._sharded(function, (WHOLE, WHOLE), (WHOLE,))
        return self._once(('measure', statics, control, most_pages), build)

    def widen(self, most_budget_Z: np.ndarray) -> Callable[[Controller], Controller]:
        """Doubles every budget, as far as that goes."""
        build = lambda: self._whole(lambda controller: controllers.widen(controller, most_budget_Z))
        return self._once(('widen', *most_budget_Z.tolist()), build)

    def renew(self) -> Callable[[Controller], Controller]:
        return self._once(('renew',), lambda: self._whole(controllers.renew))

    def budgets(self) -> Callable[[Controller], jax.Array]:
        return self._once(('budgets',), lambda: self._whole(controllers.budgets))

    def mark(self) -> Callable[[jax.Array], jax.Array]:
        """A copy of an array over slots: it is there when what made the array is, also if that is donated further."""
        return self._once(('mark',), lambda: jax.jit(jnp.copy, out_shardings=NamedSharding(self.mesh, SHARDED)))

    def close(self) -> Callable[[Controller, np.ndarray], Controller]:
        return self._once(('close',), lambda: self._whole(controllers.close))

    def cut(self) -> Callable[[Slots, int], dict[str, jax.Array]]:
        return self._once(('cut',), lambda: self._whole(cut_row))

    def offload(self) -> Offload:
        """The copies to host memory and back."""
        return self._once(('offload',), lambda: Offload(self.shardings(), NamedSharding(self.mesh, WHOLE)))

    # ------------------------------------------------------------------ how they are compiled

    def variant(self, sampling: Sampling) -> SamplerStatics:
        """What is fixed for one way of sampling."""
        statics = dataclasses.replace(self.statics, truncate=sampling.top_p < 1)
        if not sampling.sparse:
            statics = dataclasses.replace(statics, dense_layers=frozenset(range(self.shape.layers)))
        return statics

    def shardings(self) -> tuple[Cache, NamedSharding]:
        """Of cache and slots, the same out of every function: left to XLA they would differ, and each kind compiles."""
        heads = 'tensor' if self.statics.heads.shards > 1 else None
        pages = NamedSharding(self.mesh, PartitionSpec(heads, meshes.BATCH_AXES))
        landmarks = NamedSharding(self.mesh, PartitionSpec(meshes.BATCH_AXES, heads))
        return Cache(pages, landmarks), NamedSharding(self.mesh, SHARDED)  # type: ignore[arg-type]

    def compiler_options(self, statics: SamplerStatics) -> dict[str, str] | None:
        """Of decode steps."""
        return _KERNEL_BY_KERNEL if statics.fused and kernels_start_early() else None

    def mapped(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """A function of one data shard on all of them; over tensor shards XLA splits it."""
        manual = set(meshes.BATCH_AXES if self.mesh.shape['tensor'] > 1 else meshes.AXES)
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False
        )

    def _sharded(
        self, function: Callable, more_specs: tuple, more_out: tuple = (), compiler_options: dict | None = None
    ) -> Callable:
        more = [NamedSharding(self.mesh, spec) for spec in more_out]
        return jax.jit(
            self.mapped(function, (WHOLE, CACHE, SHARDED, *more_specs), (CACHE, SHARDED, *more_out)),
            donate_argnums=(1, 2),
            out_shardings=(*self.shardings(), *more),
            compiler_options=compiler_options,
        )

    def _whole(self, function: Callable) -> Callable:
        return jax.jit(function, out_shardings=NamedSharding(self.mesh, WHOLE))

    def _once(self, key: tuple, build: Callable[[], Any]) -> Any:
        if key not in self.compiled:
            self.compiled[key] = build()
        return self.compiled[key]

    def _why_unfused(self, kernels: Implementation, schedule: Schedule) -> str | None:
        """Why kernels run no more than the attention of decode steps, where they could run all."""
        if kernels.platform != 'gpu':
            return None
        if self.mesh.shape['tensor'] > 1:
            return 'the products with weights are not split over parallel.tensor by the fused kernels'
        if schedule.policy.implementation(kernels)[1]:
            return 'landmarks other than means are not written by the fused kernels'
        return why_unfused(self.shape, self.layout.slots, self.dtype)


def choose_kernels(asked: str, shape: DecoderShape, mesh: Mesh, dtype: np.dtype) -> tuple[Implementation, str]:
    """What runs the attention of decode steps, and the reason for it."""
    unfit = why_unfit(shape.head_dim, shape.query_heads // shape.kv_heads, dtype)
    tensor = mesh.shape['tensor']
    if HeadShards.of(shape, tensor).shards != tensor:
        heads = f'{shape.query_heads} query and {shape.kv_heads} KV heads'
        unfit = unfit or f'the kernels cannot share {heads} among the {tensor} shards of parallel.tensor'
    device = mesh.devices.flat[0]
    if asked == 'auto':
        chosen, why = choose(device)
        if chosen.platform and not unfit and chosen.platform not in PROVEN_PLATFORMS:
            unfit = f'the kernels have not been run on a {chosen.platform} yet; rollout.kernels={chosen} tries them'
        return (Implementation.REFERENCE, unfit) if unfit and chosen.platform else (chosen, why)
    kernels = Implementation(asked)
    if unfit and kernels is not Implementation.REFERENCE:
        raise ConfigError(f'rollout.kernels={asked}: {unfit}; set it to reference or auto')
    if kernels.platform not in (None, device.platform) and not kernels.interpreted:
        raise ConfigError(f'rollout.kernels={asked}: this machine has a {device.platform}; set it to auto or reference')
    return kernels, 'as configured'
