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
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparrow_jax.config import ConfigError, RolloutConfig
from sparrow_jax.models.adapter import SamplerAdapter
from sparrow_jax.models.shape import DecoderShape
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.parallel.transfer import place, read
from sparrow_jax.rollout.cache import Cache, Slots
from sparrow_jax.rollout.compaction import widths
from sparrow_jax.rollout.decode import Prompts, SamplingValues
from sparrow_jax.rollout.functions import SHARDED, WHOLE, SamplerFunctions, Sampling
from sparrow_jax.rollout.harvest import Harvest, Response
from sparrow_jax.rollout.offload import Parked
from sparrow_jax.rollout.pool import Request, Row
from sparrow_jax.rollout.scheduler import Layout, Scheduler
from sparrow_jax.sparsity import controller as controllers
from sparrow_jax.sparsity.controller import Control, Controller
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule

KEY_BLOCK = 64  # sample keys made by one call


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a call of `generate` is.

    Attributes:
        finished, total: responses.
        tokens: sampled so far.
        running: sequences that held a slot in the segment, slots: that it decoded.
        parked: sequences that waited in host memory for a slot, parks: how often one has left so far.
        pages: of all shards' pools that held a sequence.
        prefill_s: seconds that the encoding of prompts took so far.
    """

    finished: int
    total: int
    tokens: int
    running: int
    slots: int
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

    def followed_by(self, later: 'Adapted') -> 'Adapted':
        """Of two rollouts of a step, the second under the controller that the first left."""
        moves, probe_s = self.moves + later.moves, self.probe_s + later.probe_s
        return dataclasses.replace(later, moves=moves, probe_s=probe_s)


@dataclasses.dataclass(frozen=True)
class Probing:
    """Slots of each data shard that the dense policy follows, what their measurements are held at, and the most pages
    of any budget (0: as many as a sequence has).
    """

    control: Control
    probes: int
    most_pages: int = 0


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
        functions: what is compiled.
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
        self.widths = widths(self.slots_per_shard, rollout.halvings, self.probes)
        self.may_park = self.pool_pages < most_pages  # sequences may have to leave for a while
        self.parks = 0
        self.layout = Layout(
            shards=self.shards,
            slots=self.slots_per_shard,
            pages=self.pool_pages,
            probes=self.probes,
            page_tokens=rollout.page_tokens,
            pages_per_sequence=self.pages_per_sequence,
            segment_steps=rollout.segment_steps,
            rows=self.rows_per_shard,
            samples=self.samples_per_row,
        )
        self.functions = SamplerFunctions(
            graphdef,
            shape,
            mesh,
            rollout,
            self.layout,
            schedule,
            end_ids,
            self.dtype,
            may_widen,
            probing.most_pages if probing else 0,
        )
        self.kernels, self.why_kernels = self.functions.statics.kernels, self.functions.why_kernels

    def weights(self, params: nnx.State) -> nnx.State:
        """The sampler's copy of the policy, whole on every fsdp shard.

        Matrices are in the compute dtype, norm scales in float32.
        """
        return self.functions.weights(params)(params)

    def warm_up(
        self,
        weights: nnx.State,
        samplings: Sequence[Sampling],
        on_compile: Callable[[str], None] | None = None,
        adapter: SamplerAdapter | None = None,
    ) -> None:
        """Compiles everything that `generate` will need for these ways of sampling, with an adapter if it gets one."""
        for sampling in samplings:
            if on_compile:
                on_compile(f'{"sparse" if sampling.sparse else "dense"} sampler')
            cache, slots = self.functions.fresh(sampling.keep_hidden)()
            values = self.values(sampling)
            for length in self.prefill_lengths:
                prompts = self.prompt_arrays([[] for _ in range(self.shards)], length)
                cache, slots = self.functions.prefill(sampling)(weights, cache, slots, prompts, values)
            adapted = _with_adapter(values, sampling, adapter)
            for width in self.widths:
                cache, slots = self.functions.segment(sampling, width)(weights, cache, slots, adapted)
            if len(self.widths) > 1:
                cache, slots = self._moved(cache, slots, [[]] * self.shards)
            self.functions.cut()(slots, 0)
            if self.probing and sampling.sparse:
                controller = self.functions.renew()(self.widened(self.start_controller()))
                controller = self.functions.close()(controller, self._probes())
                self.functions.mark()(slots.count_B)
                cache, slots, controller = self._measure(sampling)(
                    weights, cache, slots, controller, values.temperature
                )
                self.functions.budgets()(controller)
            if self.may_park:
                cache, slots = self.functions.offload().warm_up(cache, slots)
            read((slots.count_B, slots.active_B, slots.stopped_B))
            del cache, slots  # there is room for one pool, and the next way of sampling makes its own
        self.request_keys([Request([0], 0, 0, 1)], jax.random.key(0), 0)

    def programs(
        self, params: nnx.State, sampling: Sampling, adapter: SamplerAdapter | None = None
    ) -> dict[str, tuple[Any, tuple]]:
        """The functions of one way of sampling and what they take, with shapes in place of arrays.

        Args:
            params, adapter: the policy and the sampler's adapter, as shapes.
            sampling: how.
        Returns:
            Name to the jitted function and its arguments, which begin with weights, cache and slots where it takes
            them; of the prefills, the one of the longest prompts.
        """
        functions = self.functions

        def placed(make: Callable[[], Any], spec: PartitionSpec) -> Any:
            where = NamedSharding(self.mesh, spec)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), jax.eval_shape(make))

        copy, fresh = functions.weights(params), functions.fresh(sampling.keep_hidden)
        # Of jitted functions, which also say where their results lie.
        state = (copy.eval_shape(params), *fresh.eval_shape())  # type: ignore[attr-defined]
        values = placed(lambda: self.values(sampling), WHOLE)
        found: dict[str, tuple[Any, tuple]] = {'copy of the weights': (copy, (params,))}
        longest = self.prefill_lengths[-1]
        prompts = placed(lambda: self.prompt_arrays([[]] * self.shards, longest), SHARDED)
        found[f'prefill of {longest} tokens'] = functions.prefill(sampling), (*state, prompts, values)
        found['decode segment'] = functions.segment(sampling), (*state, _with_adapter(values, sampling, adapter))
        if self.probing and sampling.sparse:
            controller = placed(self.start_controller, WHOLE)
            found['measure of the probes'] = self._measure(sampling), (*state, controller, values.temperature)
        return found

    def generate(
        self,
        weights: nnx.State,
        requests: Sequence[Request],
        *,
        run_key: jax.Array,
        step: int,
        sampling: Sampling,
        adapter: SamplerAdapter | None = None,
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
            adapter: acts on response positions of the sparse sampler; the dense sampler is the weights alone.
            on_progress: called after every segment.
            on_tokens: called after every segment with (request index, new tokens); for streaming.

        Raises:
            ConfigError: an empty prompt, or a request beyond the configured lengths or larger than the whole pool.
        """
        return self._run(weights, requests, run_key, step, sampling, adapter, None, on_progress, on_tokens)[0]

    def generate_adaptively(
        self,
        weights: nnx.State,
        requests: Sequence[Request],
        controller: Controller,
        *,
        run_key: jax.Array,
        step: int,
        sampling: Sampling,
        adapter: SamplerAdapter | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> tuple[list[Response], Adapted]:
        """Samples a response for every request while the controller moves the budgets; see `generate`.

        A response depends on the others here, through the budgets; the same requests and state give the same again.
        """
        run = weights, requests, run_key, step, sampling, adapter, controller, on_progress, None
        responses, adapted = self._run(*run)
        assert adapted is not None
        return responses, adapted

    def start_controller(self) -> Controller:
        """A controller that begins with the schedule's budgets."""
        assert self.probing
        budgets = np.minimum(self.schedule.budget_pages, self.most_budgets())
        return self.placed(controllers.start(budgets, self.probes * self.shards))

    def placed(self, controller: Controller) -> Controller:
        """On every device, as every function of the engine leaves it."""
        return place(controller, NamedSharding(self.mesh, WHOLE))

    def widened(self, controller: Controller) -> Controller:
        """With every budget doubled, as far as that goes."""
        return self.functions.widen(self.most_budgets())(controller)

    def most_budgets(self) -> np.ndarray:
        """int32 [bins]: the largest budget of each length bin, pages."""
        assert self.probing
        bins = len(self.schedule.budget_pages)
        return self.probing.control.most_budgets(
            bins, self.rollout.page_tokens, self.pages_per_sequence, self.probing.most_pages
        )

    def values(self, sampling: Sampling) -> SamplingValues:
        """What the compiled functions take for this way of sampling, the schedule's budgets as they are now."""
        budgets = self.schedule.budgets()
        if not sampling.sparse:
            budgets = jnp.full_like(budgets, EVERY_PAGE)
        budgets = place(budgets, NamedSharding(self.mesh, WHOLE))
        return SamplingValues(budgets, jnp.float32(sampling.temperature), jnp.float32(sampling.top_p))

    def request_keys(self, requests: Sequence[Request], run_key: jax.Array, step: int) -> np.ndarray:
        """uint32 [requests, 2]: key data of each, see `sampling.sample_keys`."""
        # In blocks of a fixed shape, so that the number of requests compiles nothing.
        numbers = np.asarray([(r.prompt, r.sample) for r in requests], np.int32).reshape(-1, 2)
        padded = np.zeros((-(-len(numbers) // KEY_BLOCK) * KEY_BLOCK, 2), np.int32)
        padded[: len(numbers)] = numbers
        blocks = [
            self.functions.sample_keys(run_key, step, block[:, 0], block[:, 1])
            for block in padded.reshape(-1, KEY_BLOCK, 2)
        ]
        return np.concatenate([np.zeros((0, 2), np.uint32), *map(np.asarray, blocks)])[: len(numbers)]

    def prompt_arrays(self, groups: list[list[list[Row]]], length: int) -> Prompts:
        """What prefill takes: one row a prompt, the groups of each shard in its own rows.

        Args:
            groups: of each shard; a group are the samples of one prompt.
            length: tokens that prompts are padded to, one of `prefill_lengths`.
        """
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
        arrays = place(
            (tokens_RT, length_R, slot_RF, table_RFN, probe_table_RFN, limit_RF, key_RF2),
            NamedSharding(self.mesh, SHARDED),
        )
        return Prompts(*arrays)

    def _run(
        self,
        weights: nnx.State,
        requests: Sequence[Request],
        run_key: jax.Array,
        step: int,
        sampling: Sampling,
        adapter: SamplerAdapter | None,
        controller: Controller | None,
        on_progress: Callable[[Progress], None] | None,
        on_tokens: Callable[[int, np.ndarray], None] | None,
    ) -> tuple[list[Response], Adapted | None]:
        self._check(requests)
        values, probe_s = self.values(sampling), 0.0
        moves = 0
        if controller is not None:
            moves = np.asarray(controller.moves_Z).sum()
            controller = self.functions.renew()(controller)
            values = dataclasses.replace(values, budget_bins=self.functions.budgets()(controller))
        run_prefill = self.functions.prefill(sampling)
        cache, slots = self.functions.fresh(sampling.keep_hidden)()
        keys = self.request_keys(requests, run_key, step)
        layout = dataclasses.replace(self.layout, probes=self.probes if controller is not None else 0)
        scheduler = Scheduler(requests, keys, layout)
        parked: dict[int, Parked] = {}
        harvest = Harvest(self.functions.cut())
        prefill_s = 0.0
        streamed: dict[int, int] = {}
        while scheduler.busy:
            for row in scheduler.make_room():
                place = row.slot, scheduler.probe_of(row.slot), *scheduler.filled_pages(row)
                slots, parked[row.index] = self.functions.offload().park(cache, slots, *place)
                if controller is not None:
                    controller = self.functions.close()(controller, self._probes(place[1]))
            for old, row in scheduler.come_back():
                place = row.slot, scheduler.probe_of(row.slot), *scheduler.filled_pages(row)
                cache, slots = self.functions.offload().restore(cache, slots, parked.pop(old.index), *place)
            began, encodes = time.perf_counter(), False
            for groups in scheduler.begin():
                longest = max(len(rows[0].request.prompt_ids) for shard in groups for rows in shard)
                length = next(n for n in self.prefill_lengths if n >= longest)
                cache, slots = run_prefill(weights, cache, slots, self.prompt_arrays(groups, length), values)
                encodes = True
            width = min(width for width in self.widths if width >= scheduler.slots_needed)
            if any(places := scheduler.compact(width)):
                cache, slots = self._moved(cache, slots, places)
            if scheduler.tables_changed:
                slots = self._set_tables(slots, scheduler.table_BN, scheduler.probe_table_PN)
                scheduler.tables_changed = False
            if encodes:  # known before the segment starts: the host may take as long to start it as it runs
                jax.block_until_ready(slots.count_B)
                prefill_s += time.perf_counter() - began
            run_segment = self.functions.segment(sampling, width)
            cache, slots = run_segment(weights, cache, slots, _with_adapter(values, sampling, adapter))
            harvest.read()
            if controller is not None:
                # Started while the segment runs: else the device would wait for the host.
                began, drawn = time.perf_counter(), self.functions.mark()(slots.count_B)
                cache, slots, controller = self._measure(sampling)(
                    weights, cache, slots, controller, values.temperature
                )
                values = dataclasses.replace(values, budget_bins=self.functions.budgets()(controller))
                if not drawn.is_ready():  # type: ignore[attr-defined]  # of arrays on devices
                    jax.block_until_ready(drawn)
                    began = time.perf_counter()
                jax.block_until_ready(values.budget_bins)
                probe_s += time.perf_counter() - began
            count_B, active_B, stopped_B = read((slots.count_B, slots.active_B, slots.stopped_B))
            if on_tokens:
                tokens_BT = read(slots.tokens_BT)
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
                    slots=width * self.shards,
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
        controller = self.functions.close()(controller, self._probes())
        moves = int(np.asarray(controller.moves_Z).sum() - moves)
        return found, Adapted(controller, np.asarray(values.budget_bins), np.asarray(controller.p05_Z), moves, probe_s)

    def _measure(self, sampling: Sampling) -> Callable:
        assert self.probing
        return self.functions.measure(sampling, self.probing.control, self.most_budgets())

    def _moved(self, cache: Cache, slots: Slots, moves: list[list[tuple[int, int]]]) -> tuple[Cache, Slots]:
        """Cache and slots after the moves of each shard, which `Scheduler.compact` gives."""
        most = self.widths[1]
        padded = np.zeros((self.shards, most, 2), np.int32)  # slot 0 stays where it is
        for shard, pairs in enumerate(moves):
            padded[shard, : len(pairs)] = np.asarray(pairs, np.int32).reshape(-1, 2)
        source_M, target_M = place(
            (padded[..., 0].reshape(-1), padded[..., 1].reshape(-1)), NamedSharding(self.mesh, SHARDED)
        )
        landmarks, slots = self.functions.move()(cache.landmarks, slots, source_M, target_M)
        return Cache(cache.pages, landmarks), slots

    def _set_tables(self, slots: Slots, table_BN: np.ndarray, probe_table_PN: np.ndarray) -> Slots:
        sharding = NamedSharding(self.mesh, SHARDED)
        table_BN, probe_table_PN = table_BN.copy(), probe_table_PN.copy()  # the device may read them where they lie
        if len(probe_table_PN) < self.probes * self.shards:  # nothing is probed in this call
            return dataclasses.replace(slots, table_BN=place(table_BN, sharding))
        tables = place((table_BN, probe_table_PN), sharding)
        return dataclasses.replace(slots, table_BN=tables[0], probe_table_PN=tables[1])

    def _probes(self, only: int | None = None) -> np.ndarray:
        """bool: one of the probes of all shards, or every one."""
        return (
            np.isin(np.arange(self.probes * self.shards), [only])
            if only is not None
            else np.ones(self.probes * self.shards, bool)
        )

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


def _with_adapter(values: SamplingValues, sampling: Sampling, adapter: SamplerAdapter | None) -> SamplingValues:
    """What decode segments take."""
    return dataclasses.replace(values, adapter=adapter) if sampling.sparse else values


def _prefill_lengths(longest: int, page_tokens: int) -> tuple[int, ...]:
    """The few lengths, in tokens, that prompts are padded to: the longest prompt and its halves down to 128."""
    lengths = {-(-longest // page_tokens) * page_tokens}
    while longest > 256:
        longest //= 2
        lengths.add(-(-longest // page_tokens) * page_tokens)
    return tuple(sorted(lengths))
