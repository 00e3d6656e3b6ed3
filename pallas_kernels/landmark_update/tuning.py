"""Block sizes of landmark_update, as data."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Block sizes on TPU.

    Attributes:
        buffer_bytes, most_buffers: sequences in flight, counted by their whole pages, which a full page needs.
    """

    buffer_bytes: int
    most_buffers: int


TPU = Blocks(buffer_bytes=4 << 20, most_buffers=64)
