"""How long a decode step takes at a given number of cached tokens, and how long its parts take alone.

The step is the engine's own decode segment, the compiled function that every rollout runs. No prompt is encoded: the
cache is filled with random numbers, and the slots are told how many tokens they hold. The parts stand in graphs of
their own, with the shapes of the step. Times are of graphs run back to back, without waiting in between.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.rotate_and_write import rotate_and_write
from sparrow_jax.parallel.transfer import place, read
from sparrow_jax.rollout.cache import Cache, Slots
from sparrow_jax.rollout.decode import SamplerStatics, attend_layer, choose_pages, write_token
from sparrow_jax.rollout.engine import Engine
from sparrow_jax.rollout.functions import CACHE, SHARDED, WHOLE, Sampling
from sparrow_jax.rollout.fused_step import fused_hidden
from sparrow_jax.rollout.sampling import Noise, draw, noise_of_step, segment_noise

RUNS = 5  # the median of them counts
SEGMENTS = 3  # of one run
SCALE = 0.1  # standard deviation of what stands in the cache
NEVER_ENDS = 1 << 30  # response tokens
BY_STEP = PartitionSpec(None, *SHARDED)  # a row a step, of numbers of the slots

State = TypeVar('State')


class FullSlots:
    """Cache and slots of an engine as if every slot decoded a sequence; segments donate and replace them.

    Args:
        engine: its pool must hold `longest_tokens` for every slot. Engines that differ in nothing but the schedule can
            share the slots.
        longest_tokens: the most that any sequence will hold; each gets pages for so many, in random places of its
            shard's pool.
        seed: of all random numbers.
    """

    def __init__(self, engine: Engine, longest_tokens: int, seed: int = 0):
        pages = -(-longest_tokens // engine.rollout.page_tokens)
        B, N, per_shard = engine.rollout.slots, engine.pages_per_sequence, engine.slots_per_shard
        rng, key = np.random.default_rng(seed), jax.random.key(seed)
        table_BN = np.zeros((B, N), np.int32)
        for first in range(0, B, per_shard):
            places = rng.permutation(engine.pool_pages)[: per_shard * pages]
            table_BN[first : first + per_shard, :pages] = places.reshape(per_shard, pages)
        self.cache, slots = engine.functions.fresh(False)()
        self._fill(engine, key)
        integers = lambda value: _placed(engine, np.full(B, value, np.int32))
        self.slots = dataclasses.replace(
            slots,
            table_BN=_placed(engine, table_BN),
            token_B=_placed(engine, rng.integers(0, engine.shape.vocab_size, B, dtype=np.int32)),
            count_B=integers(1),
            limit_B=integers(NEVER_ENDS),
            active_B=_placed(engine, np.ones(B, bool)),
            key_B2=_placed(engine, rng.integers(0, 2**32, (B, 2), dtype=np.uint32)),
        )
        self.rewind = jax.jit(_rewound, donate_argnums=0, out_shardings=engine.functions.shardings()[1])

    def _fill(self, engine: Engine, key: jax.Array) -> None:
        """Random numbers in place of zeros, in the same memory: there is no room for a second pool."""
        layouts = engine.functions.shardings()[0]
        pages = jax.jit(_random_pages, donate_argnums=0, out_shardings=layouts.pages)
        landmarks = jax.jit(_random, donate_argnums=0, out_shardings=layouts.landmarks)
        for layer in range(engine.shape.layers):
            own = jax.random.fold_in(key, layer)
            self.cache.pages[layer] = pages(self.cache.pages[layer], own)
            self.cache.landmarks[layer] = landmarks(self.cache.landmarks[layer], jax.random.fold_in(own, 1))
        jax.block_until_ready(self.cache)


def segment_start(cached_tokens: int, segment_steps: int) -> int:
    """Tokens that a sequence holds before a segment over which it holds `cached_tokens` on average, the current token
    included."""
    return cached_tokens - (segment_steps + 1) // 2


def segment_end(cached_tokens: int, segment_steps: int) -> int:
    """Tokens that it holds after that segment."""
    return segment_start(cached_tokens, segment_steps) + segment_steps


def step_seconds(engine: Engine, weights: nnx.State, full: FullSlots, cached_tokens: int) -> float:
    """Seconds of one step of the engine's decode segment, over all slots.

    Before every segment the lengths are set back, on the device, so that all segments run at `cached_tokens`.

    Raises:
        RuntimeError: a sequence did not decode to the end of a segment: the time would be that of fewer.
    """
    sampling, steps = sampling_of(engine), engine.rollout.segment_steps
    run, values = engine.functions.segment(sampling), engine.values(sampling)
    start = np.int32(segment_start(cached_tokens, steps))

    def segment(state: tuple[Cache, Slots]) -> tuple[Cache, Slots]:
        cache, slots = state
        return run(weights, cache, full.rewind(slots, start), values)

    seconds, (full.cache, full.slots) = median_seconds(segment, (full.cache, full.slots))
    decoded_B = read(full.slots.active_B) & (read(full.slots.length_B) == start + steps)
    if not decoded_B.all():
        raise RuntimeError('a sequence ended during the run')
    return seconds / steps


def median_seconds(call: Callable[[State], State], state: State) -> tuple[float, State]:
    """Seconds of one call, each made from the last one's result, and the last result.

    The median over runs of several calls without waiting in between, after one that compiles and warms up.
    """
    state = jax.block_until_ready(call(state))
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        for _ in range(SEGMENTS):
            state = call(state)
        jax.block_until_ready(state)
        seconds.append((time.perf_counter() - began) / SEGMENTS)
    return statistics.median(seconds), state


def sampling_of(engine: Engine) -> Sampling:
    """How a bench samples: as the engine's schedule says, from the full softmax."""
    return Sampling(engine.rollout.temperature, sparse=engine.schedule.kind != 'dense')


class StepParts:
    """Times of the parts of a step, each alone in a graph that loops over as many steps as a segment.

    In every loop a step needs the one before, through a value that the compiler cannot foresee: of steps that are all
    alike it would run one.
    """

    def __init__(self, engine: Engine, weights: nnx.State):
        self.engine, self.weights = engine, weights
        self.statics: SamplerStatics = engine.functions.variant(sampling_of(engine))
        self.sparse_layers = [i for i in range(engine.shape.layers) if i not in self.statics.dense_layers]
        self._graphs: dict[str, Callable] = {}

    def reading(self, full: FullSlots, cached_tokens: int) -> dict[str, float]:
        """Seconds of what depends on the cache.

        `select`: the choice of pages alone. `attention`: what it and the attention of all layers take in the sampler,
        where they may be one kernel, beyond that.
        """
        B = self.engine.rollout.slots
        query, cache, table_BN = self._queries(), full.cache, full.slots.table_BN
        length_B, budget_B = (self._integers(n) for n in (cached_tokens, self.engine.schedule.budget_pages[0]))
        select_s = 0.0
        if self.sparse_layers:
            choose = (query, [cache.landmarks[layer] for layer in self.sparse_layers], table_BN, length_B, budget_B)
            first_BK = self._by_head(np.zeros((B, self.statics.heads.cache_heads), np.int32))
            select_s = self._seconds('select', self._select, choose, first_BK)
        attend = (cache.pages, cache.landmarks, table_BN, length_B, budget_B)
        specs = (CACHE.pages, CACHE.landmarks, SHARDED, SHARDED, SHARDED)
        both_s = self._seconds('attention', self._attend, attend, query, specs)
        return {'attention': both_s - select_s, 'select': select_s}

    def others(self, full: FullSlots, cached_tokens: int) -> dict[str, float]:
        """Seconds of what is the same for every length and schedule.

        `matmuls`: the decoder without attention and head, norms and embedding included. `sampling`: head and draw.
        `cache_write`: keys and values into their pages, landmarks of pages that they fill.
        """
        shape, dtype = self.engine.shape, self.engine.dtype
        B, start = self.engine.rollout.slots, segment_start(cached_tokens, self.engine.rollout.segment_steps)
        token_B = lambda: self._integers(1)
        rows = lambda: self._by_head(np.zeros((B, 1, shape.kv_heads, shape.head_dim), dtype), axis=2)
        kept = [] if self.statics.fused else [(rows(), rows()) for _ in range(shape.layers)]
        hidden_BD = self._random((B, shape.d_model))
        carry = (token_B(), self._placed(np.zeros(B, np.float32)))
        k_BKA, v_BKA = (self._random((B, shape.kv_heads, shape.head_dim)) for _ in range(2))
        write = (k_BKA, v_BKA, full.slots.table_BN, self._integers(start))
        cache_write_s, full.cache = self._seconds_and_result('cache_write', self._write, write, full.cache)
        return {
            'matmuls': self._seconds(
                'matmuls', self._multiply, (self.weights, self._integers(start)), (token_B(), kept), (WHOLE, SHARDED)
            ),
            'sampling': self._seconds(
                'sampling', self._draw, (self.weights, hidden_BD, self._noise()), carry, (WHOLE, SHARDED, BY_STEP)
            ),
            'cache_write': cache_write_s,
        }

    # ------------------------------------------------------------------ one step of each part

    def _attend(self, _turn, q_BTHA, pages, landmarks, table_BN, length_B, budget_B):
        """The result of one layer is the query of the next."""
        q_BHA = q_BTHA[:, 0]
        for layer, cache in enumerate(zip(pages, landmarks, strict=True)):
            q_BHA = attend_layer(layer, q_BHA, *cache, table_BN, length_B, budget_B, self.statics)
        return q_BHA[:, None]

    def _select(self, _turn, first_BK, query, landmarks, table_BN, length_B, budget_B):
        unforeseen_B = (first_BK < 0).any(axis=1)  # never
        q_BHA = query[:, 0] + unforeseen_B[:, None, None].astype(query.dtype)
        chosen = (
            choose_pages(q_BHA, landmark_BKNA, table_BN, length_B, budget_B, self.statics)
            for landmark_BKNA in landmarks
        )
        return sum(ids_BKM[:, :, 0] for ids_BKM, _ in chosen)

    def _multiply(self, turn, carry, weights, start_B):
        """Keys and values are kept: unused, they would not be computed. The fused step makes them with the queries."""
        token_B, _ = carry
        kept = []

        def attend(_layer, q_BTHA, k_BTKA, v_BTKA):
            kept.append((k_BTKA, v_BTKA))
            return q_BTHA

        decoder = nnx.merge(self.engine.graphdef, weights)
        if self.statics.fused:
            shape = decoder.shape
            queries = slice(shape.query_heads * shape.head_dim)

            def write(_layer, parts_SBF, *_rotation):
                q_BF = parts_SBF[0, : token_B.size, queries].astype(self.engine.dtype)
                return q_BF.reshape(*token_B.shape, -1, shape.head_dim)

            attend_to_none = lambda _layer, q_BHA: q_BHA
            hidden_BD = fused_hidden(decoder, token_B, start_B + turn, write, attend_to_none, self.statics.kernels)
        else:
            hidden_BD = decoder.hidden(token_B[:, None], (start_B + turn)[:, None], attend)[:, 0]
        unforeseen_B = jnp.isinf(hidden_BD).any(axis=1)  # never
        return token_B - unforeseen_B, kept

    def _draw(self, turn, carry, weights, hidden_BD, noise):
        token_B, _ = carry
        hidden_BD = hidden_BD + (token_B < 0)[:, None].astype(hidden_BD.dtype)  # never
        decoder = nnx.merge(self.engine.graphdef, weights)
        return draw(decoder.logits(hidden_BD), noise_of_step(noise, turn), jnp.float32(self.engine.rollout.temperature))

    def _write(self, turn, cache, k_BKA, v_BKA, table_BN, start_B):
        at = table_BN, start_B + turn, start_B >= 0
        written = []
        for layer, (pages_KPCE, landmark_BKNA) in enumerate(zip(cache.pages, cache.landmarks, strict=True)):
            if self.statics.fused:
                group = self.engine.shape.query_heads // self.engine.shape.kv_heads
                heads_BhA = jnp.concatenate([k_BKA] * (group + 1) + [v_BKA], axis=1)
                parts_SBF = heads_BhA.reshape(1, len(start_B), -1).astype(jnp.float32)
                angle_BR = jnp.broadcast_to(jnp.float32(1), (len(start_B), k_BKA.shape[-1] // 2))
                _, *pair = rotate_and_write(
                    pages_KPCE,
                    landmark_BKNA,
                    parts_SBF,
                    None,
                    angle_BR,
                    angle_BR,
                    *at,
                    eps=self.engine.shape.norm_eps,
                    implementation=self.statics.kernels,
                )
            else:
                pair = [*write_token(cache, layer, k_BKA, v_BKA, *at, self.statics)]
            written.append(pair)
        return Cache([pages for pages, _ in written], [landmarks for _, landmarks in written])

    # ------------------------------------------------------------------ how they are run

    def _seconds(self, name: str, step: Callable, fixed: tuple, carry: Any, specs: Any = SHARDED) -> float:
        return self._seconds_and_result(name, step, fixed, carry, specs)[0]

    def _seconds_and_result(
        self, name: str, step: Callable, fixed: tuple, carry: State, specs: Any = SHARDED
    ) -> tuple[float, State]:
        """Seconds of one step, and the last carry. The graph is compiled once for all lengths.

        Args:
            step: (turn, carry, *fixed) -> carry.
            fixed: what every step reads; specs: how it is split, of each entry or of all.
            carry: what a step hands to the next; donated.
        """
        steps = self.engine.rollout.segment_steps

        def loop(fixed: tuple, carry: State) -> State:
            return lax.fori_loop(0, steps, lambda turn, carry: step(turn, carry, *fixed), carry)

        carry_spec = CACHE if isinstance(carry, Cache) else SHARDED
        if name not in self._graphs:
            self._graphs[name] = jax.jit(
                self.engine.functions.mapped(loop, (specs, carry_spec), carry_spec),
                donate_argnums=1,
                out_shardings=jax.tree.map(lambda array: array.sharding, carry),  # it goes in again
                compiler_options=self.engine.functions.compiler_options(self.statics),
            )
        seconds, carry = median_seconds(lambda carry: self._graphs[name](fixed, carry), carry)
        return seconds / steps, carry

    def _noise(self) -> Noise:
        """Of all draws of a segment, which makes it before its first step."""
        B, steps = self.engine.rollout.slots, self.engine.rollout.segment_steps
        make = lambda key_B2, position_B: segment_noise(key_B2, position_B, steps, self.engine.shape.vocab_size)
        made = jax.jit(make, out_shardings=NamedSharding(self.engine.mesh, BY_STEP))
        return made(jnp.zeros((B, 2), jnp.uint32), jnp.zeros(B, jnp.int32))

    def _queries(self) -> jax.Array:
        shape = self.engine.shape
        size = (self.engine.rollout.slots, 1, shape.query_heads, shape.head_dim)
        return self._by_head(self._normal(size), axis=2)

    def _random(self, size: tuple[int, ...]) -> jax.Array:
        return self._placed(self._normal(size))

    def _normal(self, size: tuple[int, ...]) -> np.ndarray:
        return np.random.default_rng(0).standard_normal(size).astype(self.engine.dtype)

    def _integers(self, value: int) -> jax.Array:
        return self._placed(np.full(self.engine.rollout.slots, value, np.int32))

    def _placed(self, array: Any) -> jax.Array:
        return _placed(self.engine, array)

    def _by_head(self, array: Any, axis: int = 1) -> jax.Array:
        """Split over the slots and, along `axis`, over tensor shards, as the products with weights leave it."""
        heads = 'tensor' if array.shape[axis] % self.engine.mesh.shape['tensor'] == 0 else None
        between = [None] * (axis - 1)
        return place(array, NamedSharding(self.engine.mesh, PartitionSpec(*SHARDED, *between, heads)))


def _placed(engine: Engine, array: Any) -> jax.Array:
    """Split over the shards along its first axis, which counts slots."""
    return place(array, NamedSharding(engine.mesh, SHARDED))


def _rewound(slots: Slots, length: jax.Array) -> Slots:
    count_B = jnp.ones_like(slots.count_B)
    return dataclasses.replace(slots, length_B=jnp.full_like(slots.length_B, length), count_B=count_B)


def _random_pages(pages_KPCE: jax.Array, key: jax.Array) -> jax.Array:
    """Token by token of the pages, so that the generator's own memory is a small part of the pool."""
    K, P, C, E = pages_KPCE.shape

    def fill(token: jax.Array, pages_KPCE: jax.Array) -> jax.Array:
        rows_KPE = SCALE * jax.random.normal(jax.random.fold_in(key, token), (K, P, E), pages_KPCE.dtype)
        return pages_KPCE.at[:, :, token].set(rows_KPE)

    return lax.fori_loop(0, C, fill, pages_KPCE)


def _random(array: jax.Array, key: jax.Array) -> jax.Array:
    # Drawn flat: XLA's CPU backend takes seconds to compile a draw with four axes.
    return SCALE * jax.random.normal(key, (array.size,), array.dtype).reshape(array.shape)
