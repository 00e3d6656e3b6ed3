"""What a decode step must read, counted from the recorded budgets."""

import numpy as np

from sparrow_jax.sparsity.schedules import Schedule


def kv_read_fraction(schedule: Schedule, layers: int, length_tokens: np.ndarray, pages_read: np.ndarray) -> float:
    """KV and landmark bytes that the sampler read over the KV bytes that a dense sampler reads for the same tokens,
    all layers.

    A landmark is one key row of a page that holds 2 C rows; it is read for every full page. A page is read whole, in
    both samplers.

    Args:
        schedule: gives the page size and the dense layers.
        layers: L.
        length_tokens: int [tokens], cached tokens (the current one included) at each decode step of each sequence.
        pages_read: int [tokens], pages read in a sparse layer, reserved ones included.

    Returns:
        The fraction; 1 for a dense sampler, which reads no landmarks. NaN for no tokens.
    """
    pages = -(-length_tokens.astype(np.int64) // schedule.page_tokens)
    if not pages.sum():
        return float('nan')
    dense = np.int64(len(schedule.dense_layers)) if schedule.kind != 'dense' else np.int64(layers)
    landmarks = (length_tokens // schedule.page_tokens).sum() / (2 * schedule.page_tokens)
    sparse_layer = pages_read.astype(np.int64).sum() + landmarks
    return float((dense * pages.sum() + (layers - dense) * sparse_layer) / (layers * pages.sum()))
