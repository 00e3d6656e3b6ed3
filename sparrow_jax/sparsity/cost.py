"""What a decode step must read: in bytes for a given length, and as a fraction from the recorded budgets."""

from typing import Any

import numpy as np

from sparrow_jax.sparsity.schedules import Schedule


def kv_read_fraction(schedule: Schedule, layers: int, length_tokens: np.ndarray, pages_read: np.ndarray) -> float:
    """KV and landmark bytes that the sampler read over the KV bytes that a dense sampler reads for the same tokens,
    all layers.

    A landmark is as many key rows as the policy keeps, of a page that holds 2 C rows; it is read for every full page. A
    page is read whole, in both samplers.

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
    rows = schedule.policy.landmark_width(1)
    landmarks = rows * (length_tokens // schedule.page_tokens).sum() / (2 * schedule.page_tokens)
    sparse_layer = pages_read.astype(np.int64).sum() + landmarks
    return float((dense * pages.sum() + (layers - dense) * sparse_layer) / (layers * pages.sum()))


def kv_bytes_per_token(
    schedule: Schedule, *, layers: int, kv_heads: int, head_dim: int, value_bytes: int, length_tokens: np.ndarray
) -> float:
    """Bytes of pages and landmarks that a decode step reads for one sequence, all layers, mean over these lengths.

    Arguments as in `decode_step_bytes`; length_tokens: int [tokens]. NaN for no tokens.
    """
    if not length_tokens.size:
        return float('nan')
    pages = -(-length_tokens.astype(np.int64) // schedule.page_tokens)
    dense = layers * pages.mean() * kv_heads * schedule.page_tokens * 2 * head_dim * value_bytes
    return float(dense * kv_read_fraction(schedule, layers, length_tokens, pages_read(schedule, length_tokens)))


def pages_read(schedule: Schedule, length_tokens: np.ndarray) -> np.ndarray:
    """int64 [tokens]: `schedule.pages_read` of many lengths."""
    if schedule.kind == 'dense':
        return -(-length_tokens.astype(np.int64) // schedule.page_tokens)
    budget_Z = np.asarray(schedule.budget_pages, np.int64)
    budget = budget_Z[np.minimum(length_tokens // schedule.bin_width_tokens, len(budget_Z) - 1)]
    return np.minimum(budget + schedule.reserved_pages, -(-length_tokens.astype(np.int64) // schedule.page_tokens))


def decode_step_bytes(
    schedule: Schedule,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    landmark_width: int,
    value_bytes: int,
    weight_bytes: int,
    sequences: int,
    length_tokens: Any,
    pages_read: Any,
) -> Any:
    """Bytes that one decode step has to read, each of them once: weights, pages, landmarks.

    A page is read whole. A dense layer reads every page of a sequence, a sparse one the chosen pages and the landmark
    of every full page. What the step writes, and what it could keep on chip, is left out.

    Args:
        schedule: gives the page size and the dense layers.
        layers: L.
        kv_heads, head_dim: K and A of the cache.
        landmark_width: numbers of a landmark; A where it is a mean key.
        value_bytes: bytes of one number of the cache.
        weight_bytes: bytes of the weights that every step reads, whatever the number of sequences.
        sequences: B, all of one length.
        length_tokens: cached tokens of each, the current one included; a number, or a NumPy array of several lengths.
        pages_read: pages that a sparse layer reads at each length, reserved ones included; no more than there are.

    Returns:
        Bytes of a step at each length: a number, or an array.
    """
    page_bytes = kv_heads * schedule.page_tokens * 2 * head_dim * value_bytes
    landmark_bytes = kv_heads * landmark_width * value_bytes
    pages, full_pages = -(-length_tokens // schedule.page_tokens), length_tokens // schedule.page_tokens
    dense = layers if schedule.kind == 'dense' else len(set(schedule.dense_layers))
    sparse_layer = np.minimum(pages_read, pages) * page_bytes + full_pages * landmark_bytes
    return weight_bytes + sequences * (dense * pages * page_bytes + (layers - dense) * sparse_layer)
