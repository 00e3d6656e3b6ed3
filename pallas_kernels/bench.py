"""Times every operation on the accelerator at hand, beside the memory bound and beside what else there is.

    python -m pallas_kernels.bench [--op=sparse_decode,page_select] [--grid=full|short] [--out=bench.json] [--no-peers]

Device time: the calls of one shape stand in one jitted graph, in turn with different inputs so that none finds them
in the cache, and the graph is run many times without waiting in between; the median of five such runs counts. The read
bandwidth of the machine is measured in the same run, by a reduction over 8 GB; every time stands beside bytes over
4.3 TB/s, the ceiling that attention reads reach on an H200, and as a share of that measured bandwidth. Peers
(FlashInfer, torch) are measured by `pallas_kernels.peers` in a process of their own, where they are installed.
sparse_prefill is a forward and a backward pass, bound by arithmetic; its peer is cuDNN's causal attention over all
tokens, called through JAX, and its temporary memory is shown.
`--rehearse` runs small shapes with the JAX definitions on any machine: it checks the program and says nothing about
speed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dense_decode import dense_decode
from pallas_kernels.implementation import Implementation, choose
from pallas_kernels.landmark_update import landmark_update
from pallas_kernels.page_select import page_select
from pallas_kernels.shapes import GRIDS, OPS, RESERVED_FIRST, RESERVED_LAST, Shape
from pallas_kernels.sparse_decode import sparse_decode
from pallas_kernels.sparse_prefill import sparse_prefill

CEILING = 4.3e12  # bytes a second that attention reads reach on an H200
LEAST_BANDWIDTH = 4.2e12  # a run that measures less on an H200 is not valid
LEAST_SETS = 32  # so that counting the rounds, a few microseconds each, matters little
LEAST_SECONDS = 0.05  # of one timed run
GRAPH_SECONDS = 2e-3  # of one graph, by the bound: starting it takes the host some 0.1 ms
LEAST_KERNEL_SECONDS = 4e-6  # that any call is reckoned with
DTYPE = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A shape with its inputs.

    The graph has rounds. A round calls `function(length_B, *fixed, *each)` once for each of the sets, or `steps` times
    `function(length_B, step, *fixed, *state)`, whose result is the next state; `bytes_read` is that of one call.
    Lengths are one token shorter every other round: of rounds that are all alike the compiler would run one.
    """

    shape: Shape
    function: Callable[..., Any]
    length_B: jax.Array
    fixed: tuple[Any, ...]
    sets: list[tuple[Any, ...]]
    bytes_read: int
    state: tuple[Any, ...] = ()
    steps: int = 0
    compiled: Any = None

    @property
    def calls_of_round(self) -> int:
        return self.steps or len(self.sets)

    @property
    def rounds(self) -> int:
        """As many as keep the device busy for longer than the host takes to start the graph."""
        # sparse_prefill takes many times as long as it reads; few calls are a rehearsal.
        if self.shape.op == 'sparse_prefill' or self.calls_of_round < LEAST_SETS:
            return 1
        return math.ceil(GRAPH_SECONDS / (self.calls_of_round * max(self.bytes_read / CEILING, LEAST_KERNEL_SECONDS)))

    def compile(self) -> 'Prepared':
        def one_round(turn, state, length_B, fixed, sets):
            length_B = length_B - turn % 2
            results = [self.function(length_B, *fixed, *each) for each in sets]
            for step in range(self.steps):
                state = self.function(length_B, step, *fixed, *state)
            return results, state

        def graph(length_B, fixed, sets, state):
            again = lambda turn, before: one_round(turn, before[1], length_B, fixed, sets)
            kinds, _ = jax.eval_shape(one_round, 0, state, length_B, fixed, sets)
            results = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
            return jax.lax.fori_loop(0, self.rounds, again, (results, state))

        lowered = jax.jit(graph, donate_argnums=3).lower(self.length_B, self.fixed, self.sets, self.state)
        return dataclasses.replace(self, compiled=lowered.compile())

    def seconds(self) -> float:
        """Of one call."""
        state = self.state

        def run(times: int) -> float:
            nonlocal state
            began = time.perf_counter()
            for _ in range(times):
                results, state = self.compiled(self.length_B, self.fixed, self.sets, state)
            jax.block_until_ready((results, state))
            return (time.perf_counter() - began) / times

        run(1)
        repeats = max(int(LEAST_SECONDS / max(run(1), 1e-6)), 3)
        return statistics.median(run(repeats) for _ in range(5)) / (self.calls_of_round * self.rounds)


def read_bandwidth(gigabytes: float) -> float:
    """Bytes a second of a reduction that only reads."""
    x = jnp.ones(int(gigabytes * 1e9) // 4, jnp.int32)
    add = lambda length_B, x: (x + length_B[0]).sum()
    whole = Prepared(GRIDS['rehearsal'][0], add, jnp.zeros(1, jnp.int32), (), [(x,)], x.nbytes)
    return x.nbytes / whole.compile().seconds()


_normal = jax.jit(lambda key, size: jax.random.normal(key, size, DTYPE), static_argnums=1)


class Inputs:
    """Random inputs of shapes that share a cache, made on the device."""

    def __init__(self, shape: Shape, seed: int = 0):
        self.shape = shape
        self.rng = np.random.default_rng(seed)
        self.key = jax.random.key(seed)
        B, K, N, C, A = shape.sequences, shape.kv_heads, shape.pages, shape.page_tokens, shape.head_dim
        self.pages_KPCE = self.normal((K, B * N, C, 2 * A))
        self.table_BN = self.rng.permutation(B * N).reshape(B, N).astype(np.int32)
        self.length_B = jnp.full(B, shape.cached_tokens, jnp.int32)

    def normal(self, size: tuple[int, ...]) -> jax.Array:
        self.key, key = jax.random.split(self.key)
        return _normal(key, size)

    def queries(self, shape: Shape, *middle: int) -> jax.Array:
        return self.normal((shape.sequences, *middle, shape.kv_heads * shape.group, shape.head_dim))

    def chosen(self, shape: Shape) -> jax.Array:
        """Physical ids of random pages in logical order, the newest among them, for each KV head."""
        self.key, key = jax.random.split(self.key)
        return _chosen(key, jnp.asarray(self.table_BN), shape.kv_heads, shape.read_pages)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _chosen(key: jax.Array, table_BN: jax.Array, K: int, M: int) -> jax.Array:
    B, N = table_BN.shape
    logical = jnp.argsort(jax.random.uniform(key, (B, K, N - 1)), axis=-1)[..., : M - 1]
    logical = jnp.concatenate([jnp.sort(logical, axis=-1), jnp.full((B, K, 1), N - 1)], axis=-1)
    return jnp.take_along_axis(table_BN[:, None], logical, axis=2)


def select_options(shape: Shape) -> dict[str, Any]:
    """What a page_select of the shape is told beside its arrays."""
    return {
        'page_tokens': shape.page_tokens,
        'max_pages': shape.read_pages,
        'reserved_first': RESERVED_FIRST,
        'reserved_last': RESERVED_LAST,
    }


def prepare(shape: Shape, inputs: Inputs, implementation: Implementation, calls: int = LEAST_SETS) -> Prepared:
    """The inputs of a shape, over a cache that may serve other shapes. calls: in one round."""
    B, K, A = shape.sequences, shape.kv_heads, shape.head_dim
    pages, table, length = inputs.pages_KPCE, jnp.asarray(inputs.table_BN), inputs.length_B
    page_bytes = pages.nbytes // (K * pages.shape[1])

    def sets(make: Callable[[], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [make() for _ in range(calls)]

    if shape.op == 'sparse_decode':
        count = jnp.full(B, shape.read_pages, jnp.int32)
        read = B * K * shape.read_pages * page_bytes

        def attend(length, pages, count, q, ids):
            return sparse_decode(q, pages, None, ids, count, length, implementation=implementation)

        each = sets(lambda: (inputs.queries(shape), inputs.chosen(shape)))
        return Prepared(shape, attend, length, (pages, count), each, read)
    if shape.op == 'dense_decode':

        def attend_all(length, pages, table, q):
            return dense_decode(q, pages, table, length, implementation=implementation)

        read = B * K * shape.pages * page_bytes
        each = sets(lambda: (inputs.queries(shape, shape.queries),))
        return Prepared(shape, attend_all, length, (pages, table), each, read)
    if shape.op == 'page_select':
        budget = jnp.full(B, shape.read_pages - RESERVED_FIRST - RESERVED_LAST, jnp.int32)

        def choose_pages(length, table, budget, q, landmarks):
            return page_select(
                q,
                landmarks,
                length,
                budget,
                table,
                implementation=implementation,
                **select_options(shape),
            )

        read = B * K * shape.pages * A * 2
        each = sets(lambda: (inputs.queries(shape), inputs.normal((B, K, shape.pages, A))))
        return Prepared(shape, choose_pages, length, (table, budget), each, read)
    if shape.op == 'sparse_prefill':
        budget = jnp.full((B, shape.cached_tokens), shape.read_pages - RESERVED_FIRST - RESERVED_LAST, jnp.int32)

        def train(length, budget, *tokens):
            def attend(q, k, v):
                return sparse_prefill(
                    q,
                    k,
                    v,
                    length,
                    budget,
                    page_tokens=shape.page_tokens,
                    reserved_first=RESERVED_FIRST,
                    reserved_last=RESERVED_LAST,
                    implementation=implementation,
                )

            return with_gradients(attend, *tokens)

        q, do = (inputs.queries(shape, shape.cached_tokens) for _ in range(2))
        k, v = (inputs.normal((B, shape.cached_tokens, K, A)) for _ in range(2))
        return Prepared(shape, train, length, (budget,), [(q, k, v, do)], sum(x.nbytes for x in (q, k, v, do)))
    assert shape.op == 'landmark_update'

    def write(length, step, table, write, k, v, pages, landmarks):
        position = length - 1 - step
        return landmark_update(pages, landmarks, k, v, table, position, write, implementation=implementation)

    token = lambda: inputs.normal((B, K, A))
    fixed = (table, jnp.ones(B, bool), token(), token())
    state = (inputs.normal(pages.shape), inputs.normal((B, K, shape.pages, A)))
    return Prepared(shape, write, length, fixed, [], B * K * page_bytes, state, steps=calls)


def with_gradients(attend: Callable[..., jax.Array], q, k, v, do) -> tuple[jax.Array, ...]:
    """The result of an attention and the gradients of q, k and v."""
    o, transposed = jax.vjp(attend, q, k, v)
    return o, *transposed(do)


def dense_peer(prepared: Prepared) -> dict[str, float]:
    """Microseconds of cuDNN's attention over all tokens of a sparse_prefill."""
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation='cudnn')
    try:
        train = lambda _, *tokens: with_gradients(attend, *tokens)
        dense = dataclasses.replace(prepared, function=train, fixed=())
        return {'cuDNN dense': dense.compile().seconds() * 1e6}
    except Exception as error:  # an installation without it
        print(f'{prepared.shape.title}: {error!r}'[:300], file=sys.stderr)
        return {}


def measure(prepared: Prepared, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    seconds = prepared.seconds()
    rate = prepared.bytes_read / seconds
    return {
        **dataclasses.asdict(prepared.shape),
        'us': seconds * 1e6,
        'bytes': prepared.bytes_read,
        'limit_us': prepared.bytes_read / CEILING * 1e6,
        'tb_s': rate / 1e12,
        'share_of_read_bandwidth': rate / bandwidth,
        'temporary_mib': prepared.compiled.memory_analysis().temp_size_in_bytes / 2**20,
    }


def by_cache(shapes: Sequence[Shape]) -> Iterator[list[Shape]]:
    """Groups of shapes that share a cache, in the order given."""
    groups: dict[tuple, list[Shape]] = {}
    for shape in shapes:
        groups.setdefault((shape.sequences, shape.cached_tokens, shape.page_tokens), []).append(shape)
    yield from groups.values()


def run_peers(shapes: Sequence[Shape]) -> dict[str, dict[str, float]]:
    """Microseconds of each peer by shape, measured in another process before this one takes the device's memory."""
    asked = json.dumps([dataclasses.asdict(shape) for shape in shapes])
    done = subprocess.run(
        [sys.executable, '-m', 'pallas_kernels.peers'], input=asked, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ['no message'])[-1]
        print(f'peers: not measured ({reason})')
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def show(row: dict[str, Any], peer: dict[str, float]) -> str:
    what = Shape(**{field.name: row[field.name] for field in dataclasses.fields(Shape)}).title
    memory = f'{row["temporary_mib"]:.0f} MiB temporary  ' if row['op'] == 'sparse_prefill' else ''
    beside = memory + '  '.join(f'{name} {us:.1f} us ({us / row["us"]:.2f}x)' for name, us in peer.items())
    return (
        f'{what:<58} {row["us"]:>9.1f} us  limit {row["limit_us"]:>8.1f}  {row["tb_s"]:.2f} TB/s '
        f'({row["share_of_read_bandwidth"]:.2f})  {beside}'
    )


def why_no_file(out: Path) -> str | None:
    """Why no figures can be written there, known before they are measured; makes the folder. None where they can."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        is_new = not out.exists()
        with open(out, 'a', encoding='utf-8'):
            pass
        if is_new:
            out.unlink()
        return None
    except OSError as error:
        return str(error.strerror)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m pallas_kernels.bench', description=__doc__.splitlines()[0])
    parser.add_argument('--op', default=','.join(OPS), help='operations, separated by commas')
    parser.add_argument('--grid', default='full', choices=sorted(GRIDS), help='which shapes')
    parser.add_argument('--out', type=Path, help='a JSON file for the figures')
    parser.add_argument('--no-peers', action='store_true', help='leave out FlashInfer and torch')
    parser.add_argument('--rehearse', action='store_true', help='small shapes, JAX definitions, any machine')
    options = parser.parse_args(argv)
    if options.out and (why_not := why_no_file(options.out)):
        parser.error(f'--out={options.out}: {why_not}')
    ops = options.op.split(',')
    if unknown := sorted(set(ops) - set(OPS)):
        parser.error(f'--op={options.op}: no operation {unknown[0]}; there are {", ".join(OPS)}')
    shapes = [shape for shape in GRIDS['rehearsal' if options.rehearse else options.grid] if shape.op in ops]

    peers = {} if options.no_peers or options.rehearse else run_peers(shapes)
    device = jax.devices()[0]
    implementation, why = choose(device)
    if options.rehearse:
        implementation, why = Implementation.REFERENCE, 'a rehearsal'
    elif implementation is Implementation.REFERENCE:
        print(f'error: {why}; --rehearse runs the JAX definitions on small shapes', file=sys.stderr)
        return 1
    bandwidth = read_bandwidth(0.01 if options.rehearse else 8)
    valid = bandwidth >= LEAST_BANDWIDTH or 'H200' not in device.device_kind
    print(f'{device.device_kind}, jax {jax.__version__}, {implementation} ({why})')
    print(f'read bandwidth {bandwidth / 1e12:.2f} TB/s{"" if valid else ": too low, this run is NOT VALID"}')

    facts = {
        'device': device.device_kind,
        'jax': jax.__version__,
        'implementation': implementation.value,
        'read_bandwidth_tb_s': bandwidth / 1e12,
        'valid': valid,
        'command': shlex.join(['python', '-m', 'pallas_kernels.bench', *(sys.argv[1:] if argv is None else argv)]),
    }
    rows = []
    for group in by_cache(shapes):
        inputs = Inputs(group[0])
        prepared = [prepare(shape, inputs, implementation, 2 if options.rehearse else LEAST_SETS) for shape in group]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled = list(pool.map(Prepared.compile, prepared))
        for each in compiled:
            row = measure(each, bandwidth)
            row['peers_us'] = peers.get(each.shape.title, {})
            if each.shape.op == 'sparse_prefill' and not (options.no_peers or options.rehearse):
                row['peers_us'] |= dense_peer(each)
            rows.append(row)
            print(show(row, row['peers_us']), flush=True)
            if options.out:
                options.out.write_text(json.dumps({**facts, 'rows': rows}, indent=1) + '\n')
        del inputs, prepared, compiled
    if options.out:
        print(f'written to {options.out}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
