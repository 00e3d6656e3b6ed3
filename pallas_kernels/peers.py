"""Times what else there is for the operations: FlashInfer's paged decode, and torch's matmul and topk.

    python -m pallas_kernels.peers < shapes.json        a list of the fields of `shapes.Shape`

The last line of the output is one JSON object, {title of the shape: {peer: microseconds}}. Everything runs in CUDA
graphs over rotated inputs, as `bench` does. Neither package is needed for anything else.
"""

import functools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

from pallas_kernels.shapes import RESERVED_FIRST, RESERVED_LAST, Shape

SETS = 4  # inputs in turn, so that none is found in the cache
TURNS = 8  # of all inputs in a graph: what starting it takes counts little then
LEAST_US = 3e4  # of one timed run
WORKSPACE_BYTES = 128 << 20


def graph_us(torch, calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one of the calls, captured together in a graph, several times."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * TURNS:
            call()

    def replay_us(times: int) -> float:
        start, end = torch.cuda.Event(True), torch.cuda.Event(True)
        start.record()
        for _ in range(times):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3 / times

    replay_us(1)
    times = max(int(LEAST_US / replay_us(1)), 3)
    return statistics.median(replay_us(times) for _ in range(5)) / (len(calls) * TURNS)


class Caches:
    """The page pools of one cache shape, every (sequence, KV head) a sequence of its own with one head."""

    def __init__(self, torch, shape: Shape):
        P = shape.sequences * shape.pages
        size = (shape.kv_heads * P, shape.page_tokens, 1, shape.head_dim)
        self.keys, self.values = (torch.randn(size, device='cuda', dtype=torch.bfloat16) for _ in range(2))
        table = torch.randperm(P, device='cuda').reshape(shape.sequences, 1, shape.pages)
        heads = torch.arange(shape.kv_heads, device='cuda').reshape(1, -1, 1)
        self.table_BKN = (table + heads * P).int()


def flashinfer_us(torch, flashinfer, shape: Shape, caches: Caches) -> float:
    """BatchDecodeWithPagedKVCacheWrapper over the pages of the shape."""
    BK, N = shape.sequences * shape.kv_heads, shape.pages
    read = shape.read_pages or N
    calls: list[Callable[[], Any]] = []
    for _ in range(SETS if read < N else 1):
        ids = caches.table_BKN
        if read < N:
            order = torch.rand(*ids.shape, device='cuda').topk(read, dim=-1)[1].sort(dim=-1)[0]
            ids = ids.gather(-1, order)
        indptr = (torch.arange(BK + 1, device='cuda') * read).int()
        ids, last = ids.reshape(-1).contiguous(), torch.full((BK,), shape.page_tokens, device='cuda').int()
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device='cuda')
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            'NHD',
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=ids.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        wrapper.plan(
            indptr,
            ids,
            last,
            shape.group,
            1,
            shape.head_dim,
            shape.page_tokens,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        q = torch.randn(BK, shape.group, shape.head_dim, device='cuda', dtype=torch.bfloat16)
        calls.append(functools.partial(wrapper.run, q, (caches.keys, caches.values)))
    return graph_us(torch, calls * (1 if len(calls) > 1 else SETS))


def topk_us(torch, shape: Shape) -> float:
    """Mean query times landmarks, reserved pages, torch.topk."""
    B, K, N, A = shape.sequences, shape.kv_heads, shape.pages, shape.head_dim
    calls: list[Callable[[], Any]] = []
    for _ in range(SETS):
        landmarks = torch.randn(B, K, N, A, device='cuda', dtype=torch.bfloat16)
        q = torch.randn(B, K, shape.group, A, device='cuda', dtype=torch.bfloat16)

        def call(landmarks=landmarks, q=q):
            mean = q.float().mean(2).to(torch.bfloat16)
            score = torch.matmul(landmarks, mean[..., None])[..., 0]
            score[:, :, :RESERVED_FIRST] = 1e4
            score[:, :, -RESERVED_LAST:] = 1e4
            torch.topk(score, shape.read_pages, dim=-1, sorted=False)

        calls.append(call)
    return graph_us(torch, calls)


def main() -> int:
    shapes = [Shape(**fields) for fields in json.load(sys.stdin)]
    import torch

    try:
        import flashinfer
    except ImportError as error:
        flashinfer = None
        print(f'flashinfer: {error}', file=sys.stderr)
    found: dict[str, dict[str, float]] = {}
    caches: Caches | None = None
    held = None
    for shape in sorted(shapes, key=lambda s: (s.sequences, s.cached_tokens, s.page_tokens)):
        cache = (shape.sequences, shape.cached_tokens, shape.page_tokens)
        row = found.setdefault(shape.title, {})
        try:
            if shape.op == 'page_select':
                row['matmul + topk'] = topk_us(torch, shape)
            elif shape.op in ('sparse_decode', 'dense_decode') and shape.queries == 1 and flashinfer:
                if caches is None or cache != held:
                    caches = None
                    torch.cuda.empty_cache()
                    caches, held = Caches(torch, shape), cache
                row['flashinfer'] = flashinfer_us(torch, flashinfer, shape, caches)
        except Exception as error:  # one shape that a peer cannot do does not take the others with it
            print(f'{shape.title}: {error!r}'[:300], file=sys.stderr)
    print(json.dumps(found))
    return 0


if __name__ == '__main__':
    sys.exit(main())
