"""The shapes that `bench` and `peers` measure: Qwen3's heads at the batch sizes and lengths of long rollouts."""

import dataclasses
import itertools

OPS = ('sparse_decode', 'dense_decode', 'page_select', 'landmark_update', 'sparse_prefill')
RESERVED_FIRST, RESERVED_LAST = 1, 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """One measurement.

    Attributes:
        op: the operation.
        sequences, cached_tokens: B, and the length of each sequence; all tokens are queries of sparse_prefill.
        group, kv_heads, head_dim: G, K and A.
        page_tokens: C.
        read_pages: pages that a sparse layer reads, reserved ones included; 0 where all are.
        queries: T.
    """

    op: str
    sequences: int
    cached_tokens: int
    group: int
    page_tokens: int = 16
    read_pages: int = 0
    queries: int = 1
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def pages(self) -> int:
        """N."""
        return self.cached_tokens // self.page_tokens

    @property
    def title(self) -> str:
        """As it stands in tables; one for each shape."""
        size = f'{self.sequences} x {self.cached_tokens:,} tokens, G {self.group}, C {self.page_tokens}'
        read = f', {self.read_pages} pages' if self.read_pages else ''
        queries = f', {self.queries} queries' if self.queries > 1 else ''
        return f'{self.op}: {size}{read}{queries}'


def _grid(sequences, lengths, groups, pages) -> list[Shape]:
    shapes = []
    for B, S in itertools.product(sequences, lengths):
        for G, M in itertools.product(groups, pages):
            shapes.append(Shape('sparse_decode', B, S, G, read_pages=M))
            if groups[0] == G:  # the same tokens in twice as many pages
                shapes.append(Shape('sparse_decode', B, S, G, page_tokens=8, read_pages=2 * M))
            shapes.append(Shape('page_select', B, S, G, read_pages=M))
        shapes += [Shape('dense_decode', B, S, G) for G in groups]
        shapes.append(Shape('landmark_update', B, S, groups[0]))
    return shapes


def _prefill(sequences: int, lengths, pages) -> list[Shape]:
    return [Shape('sparse_prefill', sequences, S, 2, read_pages=M) for S, M in itertools.product(lengths, pages)]


GRIDS = {
    'full': [
        *_grid((16, 32, 64), (8192, 16384, 32768), (2, 4, 5), (64, 256)),
        *_prefill(1, (8192, 16384, 32768), (64, 256)),
    ],
    'short': [
        *_grid((16, 32), (16384,), (2,), (64, 256)),
        *_grid((32,), (32768,), (2, 5), (256,)),
        Shape('dense_decode', 4, 16384, 2, queries=256),
        *_prefill(1, (8192, 16384), (64, 256)),
    ],
    'tune': [
        *(
            Shape('page_select', B, S, 2, read_pages=M)
            for B, S, M in ((16, 8192, 64), (16, 16384, 256), (64, 16384, 256))
        ),
        *(Shape('sparse_decode', B, 16384, 2, read_pages=M) for B, M in ((16, 64), (32, 256))),
        Shape('sparse_decode', 32, 16384, 2, page_tokens=8, read_pages=512),
        Shape('dense_decode', 16, 16384, 2),
        Shape('dense_decode', 32, 16384, 5),
    ],
    'rehearsal': [
        *_grid((2,), (256,), (2,), (6,)),
        Shape('dense_decode', 2, 256, 2, queries=16),
        *_prefill(2, (64,), (4,)),
    ],
}
