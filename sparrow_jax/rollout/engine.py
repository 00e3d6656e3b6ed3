"""The engine: any number of prompts through a fixed number of slots.

Requests come from the training loop, evaluation or `generate`. Loop: give waiting requests free slots and pages, encode
them (prefill), run one jitted decode segment over all slots, take out what has finished. Responses go back in the order
of the requests. Samples of one prompt that follow each other and are admitted together are encoded once and share the
pages that the prompt fills.

A request begins when a shard has a free slot and pages for its prompt and a segment; sequences get further pages as
they grow. Where they are missing, the youngest leaves for host memory and comes back later (`rollout.scheduler`,
`rollout.offload`). Each data shard has its own slots and its own pool. Under an adaptive schedule some slots are probes
(`rollout.probes`), measured after every segment.
"""

import dataclasses
import functools
import time
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
from sparrow_jax.rollout.decode import Prompts, SamplerStatics, SamplingValues, decode_segment, prefill
from sparrow_jax.rollout.fused_step import why_unfused
from sparrow_jax.rollout.harvest import Harvest, Response, cut_row
from sparrow_jax.rollout.offload import Offload, Parked
from sparrow_jax.rollout.pool import Request, Row
from sparrow_jax.rollout.probes import measure
from sparrow_jax.rollout.sampling import sample_keys
from sparrow_jax.rollout.scheduler import Layout, Scheduler
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.controller import Control, Controller
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule

# Of XLA: in the CUDA graphs that it makes, no kernel begins before the one before it has ended.
KERNEL_BY_KERNEL = {'xla_gpu_enable_command_buffer': ''}
KEY_BLOCK = 64  # sample keys made by one call
SHARDED = PartitionSpec(meshes.BATCH_AXES)
_POOL = PartitionSpec(None, meshes.BATCH_AXES)  # pages are split over shards along P
WHOLE = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a call of `generate` is.

    Attributes:
        finished, total: responses.
        tokens: sampled so far.
        running: sequences that held a slot in the segment, parked: that waited in host memory for one, parks: how
            often one has left so far.
        pages: of all shards' pools that held a sequence.
        prefill_s: seconds that the encoding of prompts took so far.
    """

    finished: int
    total: int
    tokens: int
    running: int
    parked: int
    parks: int
    pages: int
    prefill_s: float


@dataclasses.dataclass(frozen=True)
class Adapted:
    """What a rollout under the controller leaves behind.

    Attributes:
        controller: its state.
        budget_Z, p05_Z: NumPy: pages of each length bin; p05 as last known of it, -1 where it never was.
        moves: changes of a bin's budget in this rollout.
        probe_s: seconds spent on the probes.
    """

    controller: Controller
    budget_Z: np.ndarray
    p05_Z: np.ndarray
    moves: int
    probe_s: float


@dataclasses.dataclass(frozen=True)
class Probing:
    """Slots of each data shard that the dense policy follows, what their measurements are held at, and the most pages
    of any budget (0: as many as a sequence has).
    """

    control: Control
    probes: int
    most_pages: int = 0


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


class Engine:
    """Samples responses with one set of compiled functions.

    Args:
        graphdef, shape: the decoder.
        mesh: of the run.
        rollout: sizes of slots, pages and lengths.
        schedule: budgets of the sparse sampler.
        end_ids: tokens that end a response.
        compute_dtype: dtype of cache and activations.
        probing: of an adaptive schedule; None for the others.
        may_widen: whether `schedule` may later be replaced by one with larger budgets.

    Raises:
        ConfigError: slots that do not split over the data shards or are all probes, kernels that do not take such a
            cache.

    Attributes:
        parks: sequences that have left for host memory so far.
        kernels, why_kernels: what runs the attention of decode steps, and the reason for it.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        shape: DecoderShape,
        mesh: Mesh,
        rollout: RolloutConfig,
        schedule: Schedule,
        end_ids: Sequence[int],
        compute_dtype: str,
        probing: Probing | None = None,
        may_widen: bool = False,
    ):
        self.shards = meshes.batch_shards(mesh)
        if rollout.slots % self.shards:
            raise ConfigError(f'rollout.slots={rollout.slots}: must be a multiple of the {self.shards} data shards')
        self.graphdef, self.shape, self.mesh, self.rollout, self.schedule = graphdef, shape, mesh, rollout, schedule
        self.dtype = jnp.dtype(compute_dtype)
        self.slots_per_shard = rollout.slots // self.shards
        self.probing, self.probes = probing, probing.probes if probing else 0  # of each shard
        if self.probes >= self.slots_per_shard:
            raise ConfigError(
                f'controller.probes={self.probes}: each of the {self.shards} data shards has '
                f'{self.slots_per_shard} slots, and some go without; raise rollout.slots'
            )
        self.pages_per_sequence = rollout.pages_per_sequence
        most_pages = (self.slots_per_shard + self.probes) * self.pages_per_sequence  # that all slots can fill
        self.pool_pages = rollout.pool_pages or most_pages
        self.rows_per_shard = min(-(-rollout.prefill_rows // self.shards), self.slots_per_shard)
        self.samples_per_row = min(rollout.samples_per_prompt, self.slots_per_shard)
        self.prefill_lengths = _prefill_lengths(rollout.max_prompt_tokens, rollout.page_tokens)
        self.may_park = self.pool_pages < most_pages  # sequences may have to leave for a while
        self.parks = 0
        self.kernels, self.why_kernels = self._kernels()
        _, why_selection = schedule.policy.implementation(self.kernels)
        unfused = self._why_unfused()
        self.why_kernels += ''.join(f'; {reason}' for reason in (why_selection, unfused) if reason)
        self._statics = SamplerStatics(
            page_tokens=rollout.page_tokens,
            max_pages=self.pages_per_sequence if may_widen else schedule.most_pages(self.pages_per_sequence),
            reserved_first=schedule.reserved_first,
            reserved_last=schedule.reserved_last,
            bin_width_tokens=schedule.bin_width_tokens,
            dense_layers=frozenset(range(shape.layers) if schedule.kind == 'dense' else schedule.dense_layers),
            end_ids=tuple(end_ids),
            prefill_attention=best_implementation(compute_dtype),
            policy=schedule.policy,
            kernels=self.kernels,
            fused=self.kernels.platform == 'gpu' and not unfused,
            truncate=False,
        )
        self._functions: dict[tuple, Any] = {}
        self._keys = jax.jit(sample_keys)

    def weights(self, params: nnx.State) -> nnx.State:
        """The sampler's copy of the policy, whole on every fsdp shard.

        Matrices are in the compute dtype, norm scales in float32.
        """

        def build() -> Callable[[nnx.State], nnx.State]:
            shardings = jax.tree.map(
                lambda array, axes: meshes.weight_sharding(self.mesh, axes, array.shape, meshes.SAMPLER_RULES),
                nnx.to_pure_dict(params),
                nnx.to_pure_dict(logical_axes(params)),
            )
            out = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(shardings))
            cast = lambda x: x.astype(self.dtype) if x.ndim > 1 else x
            return jax.jit(lambda p: jax.tree.map(cast, p), out_shardings=out)

        return self._compiled(('weights',), build)(params)

    def warm_up(
        self, weights: nnx.State, samplings: Sequence[Sampling], on_compile: Callable[[str], None] | None = None
    ) -> None:
        """Compiles everything that `generate` will need for these ways of sampling."""
        for sampling in samplings:
            if on_compile:
                on_compile(f'{"sparse" if sampling.sparse else "dense"} sampler')
            cache, slots = self._fresh(sampling.keep_hidden)()
            values = self._values(sampling)
            for length in self.prefill_lengths:
                prompts = self._prompt_arrays([[] for _ in range(self.shards)], length)
                cache, slots = self._prefill(sampling)(weights, cache, slots, prompts, values)
            cache, slots = self._segment(sampling)(weights, cache, slots, values)
            self._cut()(slots, 0)
            if self.probing and sampling.sparse:
                controller = self._renew()(self.widened(self.start_controller()))
                controller = self._close()(controller, self._probes())
                cache, slots, controller = self._measure(sampling)(
                    weights, cache, slots, controller, values.temperature
                )
                self._budgets()(controller)
            if self.may_park:
                cache, slots = self._offload().warm_up(cache, slots)
            jax.block_until_ready(slots.active_B)
            del cache, slots  # there is room for one pool, and the next way of sampling makes its own
        self._request_keys([Request([0], 0, 0, 1)], jax.random.key(0), 0)

    def generate(
        self,
        weights: nnx.State,
        requests: Sequence[Request],
        *,
        run_key: jax.Array,
        step: int,
        sampling: Sampling,
        on_progress: Callable[[Progress], None] | None = None,
        on_tokens: Callable[[int, np.ndarray], None] | None = None,
    ) -> list[Response]:
        """Samples a response for every request.

        Args:
            weights: from `weights`.
            requests: any number, in any order; a response depends only on its own request (beyond rounding of the
                batch's arithmetic).
            run_key: typed key; step: the run's step. Folded into each sample's key.
            sampling: how.
            on_progress: called after every segment.
            on_tokens: called after every segment with (request index, new tokens); for streaming.

        Raises:
            ConfigError: an empty prompt, or a request beyond the configured lengths or larger than the whole pool.
        """
        return self._run(weights, requests, run_key, step, sampling, None, on_progress, on_tokens)[0]

    def generate_adaptively(
        self,
        weights: nnx.State,
        requests: Sequence[Request],
        controller: Controller,
        *,
        run_key: jax.Array,
        step: int,
        sampling: Sampling,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> tuple[list[Response], Adapted]:
        """Samples a response for every request while the controller moves the budgets; see `generate`.

        A response depends on the others here, through the budgets; the same requests and state give the same again.
        """
        responses, adapted = self._run(weights, requests, run_key, step, sampling, controller, on_progress, None)
        assert adapted is not None
        return responses, adapted

    def start_controller(self) -> Controller:
        """A controller that begins with the schedule's budgets."""
        assert self.probing
        budgets = np.minimum(self.schedule.budget_pages, self.most_budgets())
        return self.placed(controllers.start(budgets, self.probes * self.shards))

    def placed(self, controller: Controller) -> Controller:
        """On every device, as every function of the engine leaves it."""
        return jax.device_put(controller, NamedSharding(self.mesh, WHOLE))

    def widened(self, controller: Controller) -> Controller:
        """With every budget doubled, as far as that goes."""
        most_Z = self.most_budgets()
        build = lambda: self._whole(lambda state: controllers.widen(state, most_Z))
        return self._compiled(('widened',), build)(controller)

    def most_budgets(self) -> np.ndarray:
        """int32 [bins]: the largest budget of each length bin, pages."""
        assert self.probing
        bins = len(self.schedule.budget_pages)
        return self.probing.control.most_budgets(
            bins, self.rollout.page_tokens, self.pages_per_sequence, self.probing.most_pages
        )

    def _run(
        self,
        weights: nnx.State,
        requests: Sequence[Request],
        run_key: jax.Array,
        step: int,
        sampling: Sampling,
        controller: Controller | None,
        on_progress: Callable[[Progress], None] | None,
        on_tokens: Callable[[int, np.ndarray], None] | None,
    ) -> tuple[list[Response], Adapted | None]:
        self._check(requests)
        values, probe_s = self._values(sampling), 0.0
        moves = 0
        if controller is not None:
            moves = np.asarray(controller.moves_Z).sum()
            controller = self._renew()(controller)
            values = dataclasses.replace(values, budget_bins=self._budgets()(controller))
        run_prefill, run_segment = self._prefill(sampling), self._segment(sampling)
        cache, slots = self._fresh(sampling.keep_hidden)()
        keys = self._request_keys(requests, run_key, step)
        scheduler = Scheduler(requests, keys, self._layout(probes=self.probes if controller is not None else 0))
        parked: dict[int, Parked] = {}
        harvest = Harvest(self._cut())
        prefill_s = 0.0
        streamed: dict[int, int] = {}
        while scheduler.busy:
            for row in scheduler.make_room():
                place = row.slot, scheduler.probe_of(row.slot), *scheduler.filled_pages(row)
                slots, parked[row.index] = self._offload().park(cache, slots, *place)
                if controller is not None:
                    controller = self._close()(controller, self._probes(place[1]))
            for old, row in scheduler.come_back():
                place = row.slot, scheduler.probe_of(row.slot), *scheduler.filled_pages(row)
                cache, slots = self._offload().restore(cache, slots, parked.pop(old.index), *place)
            began, encodes = time.perf_counter(), False
            for groups in scheduler.begin():
                longest = max(len(rows[0].request.prompt_ids) for shard in groups for rows in shard)
                length = next(n for n in self.prefill_lengths if n >= longest)
                cache, slots = run_prefill(weights, cache, slots, self._prompt_arrays(groups, length), values)
                encodes = True
            if scheduler.tables_changed:
                slots = self._set_tables(slots, scheduler.table_BN, scheduler.probe_table_PN)
                scheduler.tables_changed = False
            if encodes:  # known before the segment starts: the host may take as long to start it as it runs
                jax.block_until_ready(slots.count_B)
                prefill_s += time.perf_counter() - began
            cache, slots = run_segment(weights, cache, slots, values)
            harvest.read()
            if controller is not None:
                jax.block_until_ready(slots.active_B)
                began = time.perf_counter()
                cache, slots, controller = self._measure(sampling)(
                    weights, cache, slots, controller, values.temperature
                )
                values = dataclasses.replace(values, budget_bins=self._budgets()(controller))
                jax.block_until_ready(values.budget_bins)
                probe_s += time.perf_counter() - began
            count_B, active_B, stopped_B = jax.device_get((slots.count_B, slots.active_B, slots.stopped_B))
            if on_tokens:
                tokens_BT = np.asarray(slots.tokens_BT)
                for slot, row in scheduler.pool.running.items():
                    on_tokens(row.index, tokens_BT[slot, streamed.get(row.index, 0) : count_B[slot]])
                    streamed[row.index] = int(count_B[slot])
            scheduler.advance(count_B)
            running, pages = len(scheduler.pool.running), scheduler.pool.taken_pages
            for slot in [slot for slot in scheduler.pool.running if not active_B[slot]]:
                row = scheduler.pool.release(slot)
                harvest.take(slots, row, int(count_B[slot]), bool(stopped_B[slot]))
            if on_progress:
                progress = Progress(
                    finished=len(harvest),
                    total=len(requests),
                    tokens=harvest.tokens + scheduler.drawn_tokens,
                    running=running,
                    parked=len(scheduler.parked),
                    parks=scheduler.parks,
                    pages=pages,
                    prefill_s=prefill_s,
                )
                on_progress(progress)
        self.parks += scheduler.parks
        found = harvest.responses(range(len(requests)))
        if controller is None:
            return found, None
        controller = self._close()(controller, self._probes())
        moves = int(np.asarray(controller.moves_Z).sum() - moves)
        return found, Adapted(controller, np.asarray(values.budget_bins), np.asarray(controller.p05_Z), moves, probe_s)

    def _layout(self, probes: int) -> Layout:
        return Layout(
            shards=self.shards,
            slots=self.slots_per_shard,
            pages=self.pool_pages,
            probes=probes,
            page_tokens=self.rollout.page_tokens,
            pages_per_sequence=self.pages_per_sequence,
            segment_steps=self.rollout.segment_steps,
            rows=self.rows_per_shard,
            samples=self.samples_per_row,
        )

    def _offload(self) -> Offload:
        build = lambda: Offload(self._shardings(), NamedSharding(self.mesh, WHOLE))
        return self._compiled(('offload',), build)

    def _set_tables(self, slots: Slots, table_BN: np.ndarray, probe_table_PN: np.ndarray) -> Slots:
        sharding = NamedSharding(self.mesh, SHARDED)
        table_BN, probe_table_PN = table_BN.copy(), probe_table_PN.copy()  # the device may read them where they lie
        if len(probe_table_PN) < self.probes * self.shards:  # nothing is probed in this call
            return dataclasses.replace(slots, table_BN=jax.device_put(table_BN, sharding))
        tables = jax.device_put((table_BN, probe_table_PN), sharding)
        return dataclasses.replace(slots, table_BN=tables[0], probe_table_PN=tables[1])

    def _kernels(self) -> tuple[Implementation, str]:
        group = self.shape.query_heads // self.shape.kv_heads
        unfit = why_unfit(self.shape.head_dim, group, self.dtype)
        if self.mesh.shape['tensor'] > 1:
            unfit = unfit or 'the kernels are not split over parallel.tensor'
        asked = self.rollout.kernels
        if asked == 'auto':
            chosen, why = choose(self.mesh.devices.flat[0])
            if chosen.platform and not unfit and chosen.platform not in PROVEN_PLATFORMS:
                unfit = f'the kernels have not been run on a {chosen.platform} yet; rollout.kernels={chosen} tries them'
            return (Implementation.REFERENCE, unfit) if unfit and chosen.platform else (chosen, why)
        kernels = Implementation(asked)
        if unfit and kernels is not Implementation.REFERENCE:
            raise ConfigError(f'rollout.kernels={asked}: {unfit}; set it to reference or auto')
        here = self.mesh.devices.flat[0].platform
        if kernels.platform not in (None, here) and not kernels.interpreted:
            raise ConfigError(f'rollout.kernels={asked}: this machine has a {here}; set it to auto or reference')
        return kernels, 'as configured'

    def _why_unfused(self) -> str | None:
        """Why kernels run no more than the attention of decode steps, where they could run all."""
        if self.kernels.platform != 'gpu':
            return None
        if self.schedule.policy.implementation(self.kernels)[1]:
            return 'landmarks other than means are not written by the fused kernels'
        return why_unfused(self.shape, self.slots_per_shard, self.dtype)

    # ------------------------------------------------------------------ compiled functions

    def _variant(self, sampling: Sampling) -> SamplerStatics:
        statics = dataclasses.replace(self._statics, truncate=sampling.top_p < 1)
        if not sampling.sparse:
            statics = dataclasses.replace(statics, dense_layers=frozenset(range(self.shape.layers)))
        return statics

    def _fresh(self, keep_hidden: bool) -> Callable[[], tuple[Cache, Slots]]:
        def make() -> tuple[Cache, Slots]:
            cache = make_cache(
                self.shape,
                slots=self.rollout.slots,
                pool_pages=self.pool_pages * self.shards,
                pages_per_sequence=self.pages_per_sequence,
                page_tokens=self.rollout.page_tokens,
                policy=self._statics.policy,
                dtype=self.dtype,
            )
            slots = make_slots(
                slots=self.rollout.slots,
                pages_per_sequence=self.pages_per_sequence,
                max_response_tokens=self.rollout.max_response_tokens,
                kept_hidden_size=self.shape.d_model if keep_hidden else 0,
                probes=self.probes * self.shards,
                segment_steps=self.rollout.segment_steps,
                hidden_size=self.shape.d_model,
                dtype=self.dtype,
            )
            return cache, slots

        return self._compiled(('fresh', keep_hidden), lambda: jax.jit(make, out_shardings=self._shardings()))

    def _shardings(self) -> tuple[Cache, NamedSharding]:
        """Of cache and slots, the same out of every function: left to XLA they would differ, and each kind compiles."""
        heads = 'tensor' if self.shape.kv_heads % self.mesh.shape['tensor'] == 0 else None
        pages = NamedSharding(self.mesh, PartitionSpec(heads, meshes.BATCH_AXES))
        landmarks = NamedSharding(self.mesh, PartitionSpec(meshes.BATCH_AXES, heads))
        return Cache(pages, landmarks), NamedSharding(self.mesh, SHARDED)  # type: ignore[arg-type]

    def _prefill(self, sampling: Sampling) -> Callable:
        # Prefill is dense whatever the sampler: the sparse sampler's function serves both.
        statics = dataclasses.replace(self._variant(sampling), dense_layers=self._statics.dense_layers)
        build = lambda: self._sharded(functools.partial(prefill, self.graphdef, statics), (SHARDED, WHOLE))
        return self._compiled(('prefill', statics), build)

    def _segment(self, sampling: Sampling) -> Callable:
        statics, steps = self._variant(sampling), self.rollout.segment_steps
        function = functools.partial(decode_segment, self.graphdef, statics, steps)
        build = lambda: self._sharded(function, (WHOLE,), compiler_options=self.compiler_options(statics))
        return self._compiled(('segment', statics), build)

    def _measure(self, sampling: Sampling) -> Callable:
        statics, probing = self._variant(sampling), self.probing
        assert probing
        most_pages = tuple(self.most_budgets().tolist())
        function = functools.partial(measure, self.graphdef, statics, probing.control, most_pages, meshes.BATCH_AXES)
        build = lambda: self._sharded(function, (WHOLE, WHOLE), (WHOLE,))
        return self._compiled(('measure', statics, probing.control), build)

    def _renew(self) -> Callable[[Controller], Controller]:
        return self._compiled(('renew',), lambda: self._whole(controllers.renew))

    def _budgets(self) -> Callable[[Controller], jax.Array]:
        return self._compiled(('budgets',), lambda: self._whole(controllers.budgets))

    def _close(self) -> Callable[[Controller, np.ndarray], Controller]:
        return self._compiled(('close',), lambda: self._whole(controllers.close))

    def _cut(self) -> Callable[[Slots, int], dict[str, jax.Array]]:
        return self._compiled(('cut',), lambda: self._whole(cut_row))

    def _probes(self, only: int | None = None) -> np.ndarray:
        """bool: one of the probes of all shards, or every one."""
        return (
            np.isin(np.arange(self.probes * self.shards), [only])
            if only is not None
            else np.ones(self.probes * self.shards, bool)
        )

    def compiler_options(self, statics: SamplerStatics) -> dict[str, str] | None:
        """Of decode steps."""
        return KERNEL_BY_KERNEL if statics.fused and kernels_start_early() else None

    def _whole(self, function: Callable) -> Callable:
        return jax.jit(function, out_shardings=NamedSharding(self.mesh, WHOLE))

    def _sharded(
        self, function: Callable, more_specs: tuple, more_out: tuple = (), compiler_options: dict | None = None
    ) -> Callable:
        cache_spec = Cache(_POOL, SHARDED)  # type: ignore[arg-type]
        manual = set(meshes.BATCH_AXES if self.mesh.shape['tensor'] > 1 else meshes.AXES)
        mapped = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(WHOLE, cache_spec, SHARDED, *more_specs),
            out_specs=(cache_spec, SHARDED, *more_out),
            axis_names=manual,
            check_vma=False,
        )
        more = [NamedSharding(self.mesh, spec) for spec in more_out]
        return jax.jit(
            mapped,
            donate_argnums=(1, 2),
            out_shardings=(*self._shardings(), *more),
            compiler_options=compiler_options,
        )

    def _compiled(self, key: tuple, build: Callable[[], Any]) -> Any:
        if key not in self._functions:
            self._functions[key] = build()
        return self._functions[key]

    # ------------------------------------------------------------------ host side of the loop

    def _check(self, requests: Sequence[Request]) -> None:
        for request in requests:
            prompt, limit = len(request.prompt_ids), request.limit_tokens
            longest = self.rollout.max_prompt_tokens
            if not 1 <= prompt <= longest:
                raise ConfigError(
                    f'rollout.max_prompt_tokens={longest}: prompts hold 1 to so many tokens, one has {prompt}'
                )
            longest = self.rollout.max_response_tokens
            if not 1 <= limit <= longest:
                raise ConfigError(
                    f'rollout.max_response_tokens={longest}: a request asks for {limit}, not 1 to so many'
                )
            pages = -(-(prompt + limit) // self.rollout.page_tokens)
            if pages > self.pool_pages:  # it would wait for ever
                raise ConfigError(
                    f'rollout.pool_pages={self.pool_pages}: one request needs {pages} pages; set it to at least '
                    f'{self.pages_per_sequence}, or to 0'
                )

    def _values(self, sampling: Sampling) -> SamplingValues:
        budgets = self.schedule.budgets()
        if not sampling.sparse:
            budgets = jnp.full_like(budgets, EVERY_PAGE)
        budgets = jax.device_put(budgets, NamedSharding(self.mesh, WHOLE))
        return SamplingValues(budgets, jnp.float32(sampling.temperature), jnp.float32(sampling.top_p))

    def _request_keys(self, requests: Sequence[Request], run_key: jax.Array, step: int) -> np.ndarray:
        # In blocks of a fixed shape, so that the number of requests compiles nothing.
        numbers = np.asarray([(r.prompt, r.sample) for r in requests], np.int32).reshape(-1, 2)
        padded = np.zeros((-(-len(numbers) // KEY_BLOCK) * KEY_BLOCK, 2), np.int32)
        padded[: len(numbers)] = numbers
        blocks = [self._keys(run_key, step, block[:, 0], block[:, 1]) for block in padded.reshape(-1, KEY_BLOCK, 2)]
        return np.concatenate([np.zeros((0, 2), np.uint32), *map(np.asarray, blocks)])[: len(numbers)]

    def _prompt_arrays(self, groups: list[list[list[Row]]], length: int) -> Prompts:
        """One row a prompt, the groups of each shard in its own rows."""
        R, F, N = self.rows_per_shard * self.shards, self.samples_per_row, self.pages_per_sequence
        tokens_RT, length_R = np.zeros((R, length), np.int32), np.ones(R, np.int32)
        slot_RF = np.full((R, F), self.slots_per_shard, np.int32)  # padding
        table_RFN, probe_table_RFN = np.zeros((R, F, N), np.int32), np.full((R, F, N), self.pool_pages, np.int32)
        limit_RF, key_RF2 = np.ones((R, F), np.int32), np.zeros((R, F, 2), np.uint32)
        for shard, shard_groups in enumerate(groups):
            for i, rows in enumerate(shard_groups, start=shard * self.rows_per_shard):
                ids = rows[0].request.prompt_ids
                tokens_RT[i, : len(ids)] = ids
                length_R[i] = len(ids)
                for j, row in enumerate(rows):
                    slot_RF[i, j] = row.slot % self.slots_per_shard
                    table = row.prefix.pages + row.pages
                    table_RFN[i, j, : len(table)] = table
                    if row.probe_pages:
                        probe_table_RFN[i, j] = 0
                        probe_table_RFN[i, j, : len(table)] = row.prefix.pages + row.probe_pages
                    limit_RF[i, j] = row.request.limit_tokens
                    key_RF2[i, j] = row.key
        arrays = jax.device_put(
            (tokens_RT, length_R, slot_RF, table_RFN, probe_table_RFN, limit_RF, key_RF2),
            NamedSharding(self.mesh, SHARDED),
        )
        return Prompts(*arrays)


def _prefill_lengths(longest: int, page_tokens: int) -> tuple[int, ...]:
    """The few lengths, in tokens, that prompts are padded to: the longest prompt and its halves down to 128."""
    lengths = {-(-longest // page_tokens) * page_tokens}
    while longest > 256:
        longest //= 2
        lengths.add(-(-longest // page_tokens) * page_tokens)
    return tuple(sorted(lengths))
