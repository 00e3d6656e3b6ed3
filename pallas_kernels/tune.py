"""Times candidates for the block sizes of sparse_decode, dense_decode and page_select on the GPU at hand.

    python -m pallas_kernels.tune [--op=sparse_decode,page_select] [--grid=tune|short|full] [--out=tune.json]

For each shape of `shapes` it prints the fastest sizes and how far behind those in use are, which stand in `tuning_gpu`
and in `page_select.tuning`; the last lines say which sizes are best over all shapes of an operation, by the geometric
mean of time over limit.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.bench import (
    Inputs,
    Prepared,
    by_cache,
    measure,
    prepare,
    read_bandwidth,
    select_options,
    why_no_file,
)
from pallas_kernels.implementation import Implementation, choose, kernel_module
from pallas_kernels.page_select.tuning import HopperBlocks, hopper_blocks
from pallas_kernels.shapes import GRIDS, Shape
from pallas_kernels.tuning_gpu import DENSE_DECODE, SPARSE_DECODE, Blocks

IN_USE: dict[str, Callable[[Shape], Any]] = {
    'sparse_decode': lambda _: SPARSE_DECODE,
    'dense_decode': lambda _: DENSE_DECODE,
    'page_select': lambda shape: hopper_blocks(shape.sequences * shape.kv_heads),
}
_ATTENTION = [
    Blocks(*sizes)
    for sizes in itertools.product((64, 128), (2, 3, 4, 6), (4096, 8192, 1 << 20))
    if sizes[0] * sizes[1] <= 64 * 6  # what fits into shared memory
]
CANDIDATES: dict[str, list[Any]] = {
    'sparse_decode': _ATTENTION,
    'dense_decode': _ATTENTION,
    'page_select': [
        HopperBlocks(*sizes)
        for sizes in itertools.product((1, 2, 4), (32 << 10, 64 << 10, 96 << 10), (1024,), (1, 2, 3))
    ],
}


def with_blocks(prepared: Prepared, blocks: Any, *, interpret: bool = False) -> Prepared:
    """The same calls with other block sizes."""
    op = prepared.shape.op
    call = functools.partial(
        getattr(kernel_module(op, Implementation.MOSAIC_GPU), op), interpret=interpret, blocks=blocks
    )

    def sparse(length, pages, count, q, ids):
        return call(q, pages, None, ids, count, length, out_dtype=pages.dtype)

    def dense(length, pages, table, q):
        return call(q, pages, table, length, out_dtype=pages.dtype)

    def select(length, table, budget, q, landmarks):
        return call(q, landmarks, length, budget, table, **select_options(prepared.shape))

    functions: dict[str, Callable[..., Any]] = {'sparse_decode': sparse, 'dense_decode': dense, 'page_select': select}
    return dataclasses.replace(prepared, function=functions[op])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog='python -m pallas_kernels.tune', description=__doc__.splitlines()[0])
    parser.add_argument('--op', default=','.join(IN_USE), help='operations, separated by commas')
    parser.add_argument('--grid', default='tune', choices=('tune', 'short', 'full'), help='which shapes')
    parser.add_argument('--out', type=Path, help='a JSON file for all figures')
    options = parser.parse_args(argv)
    if options.out and (why_not := why_no_file(options.out)):
        parser.error(f'--out={options.out}: {why_not}')
    ops = options.op.split(',')
    if unknown := sorted(set(ops) - set(IN_USE)):
        parser.error(f'--op={options.op}: no block sizes for {unknown[0]}; there are {", ".join(IN_USE)}')
    implementation, why = choose(jax.devices()[0])
    if implementation is not Implementation.MOSAIC_GPU:
        print(f'error: {why}; nothing to tune', file=sys.stderr)
        return 1

    bandwidth = read_bandwidth(8)
    print(f'{jax.devices()[0].device_kind}, read bandwidth {bandwidth / 1e12:.2f} TB/s')
    rows: list[dict[str, Any]] = []
    for group in by_cache([shape for shape in GRIDS[options.grid] if shape.op in ops]):
        inputs = Inputs(group[0])
        for shape in group:
            plain = prepare(shape, inputs, implementation)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                candidates = [with_blocks(plain, blocks) for blocks in CANDIDATES[shape.op]]
                compiled = list(pool.map(Prepared.compile, candidates))
            measured = [
                {**measure(each, bandwidth), **dataclasses.asdict(blocks)}
                for each, blocks in zip(compiled, CANDIDATES[shape.op], strict=True)
            ]
            rows += measured
            print(_line(shape, measured), flush=True)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1) + '\n')
    for op in ops:
        best = min(CANDIDATES[op], key=functools.partial(_mean, [row for row in rows if row['op'] == op]))
        in_use = dict.fromkeys(IN_USE[op](shape) for shape in GRIDS[options.grid] if shape.op == op)
        print(f'{op}: best over all {best}, in use {", ".join(map(str, in_use))}')
    return 0


def _of(rows: list[dict[str, Any]], blocks: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == size for name, size in dataclasses.asdict(blocks).items())]


def _mean(rows: list[dict[str, Any]], blocks: Any) -> float:
    return math.exp(sum(math.log(row['us'] / row['limit_us']) for row in _of(rows, blocks)) / len(_of(rows, blocks)))


def _line(shape: Shape, rows: list[dict[str, Any]]) -> str:
    best = min(rows, key=lambda row: row['us'])
    used_blocks = IN_USE[shape.op](shape)
    [used] = _of(rows, used_blocks)
    sizes = ', '.join(f'{field.name} {best[field.name]}' for field in dataclasses.fields(used_blocks))
    return f'{shape.title:<58} {best["us"]:.1f} us with {sizes}; in use {used["us"]:.1f} us'


if __name__ == '__main__':
    sys.exit(main())
