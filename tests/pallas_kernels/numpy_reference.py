"""The sampler's attention once more, in float64 NumPy and over plain lists of tokens: the judge of the JAX references.

Nothing is shared with `pallas_kernels`: tokens are collected one by one through the page table, softmax runs over
whole lists, pages are chosen by sorting pairs (score, page), landmarks and scores are the formulas, written out.
"""

import numpy as np


def cached_tokens(pages_KPCE, table_N, kv_head, positions):
    """Keys and values [tokens, A] of the given positions of one sequence, float64."""
    C, E = pages_KPCE.shape[2:]
    tokens = [pages_KPCE[kv_head, table_N[position // C], position % C] for position in positions]
    keys_values_SE = np.asarray(tokens, np.float64).reshape(-1, E)
    return keys_values_SE[:, : E // 2], keys_values_SE[:, E // 2 :]


def attend(q_A, keys_SA, values_SA):
    """softmax(q . k / sqrt(A)) v over a list of tokens; zeros for an empty list."""
    q_A = np.asarray(q_A, np.float64)
    if not len(keys_SA):
        return np.zeros_like(q_A)
    score_S = keys_SA @ q_A / np.sqrt(len(q_A))
    weight_S = np.exp(score_S - score_S.max())
    return weight_S @ values_SA / weight_S.sum()


def dense_decode(q_BTHA, pages_KPCE, table_BN, length_B):
    B, T, H, _ = q_BTHA.shape
    group = H // pages_KPCE.shape[0]
    o_BTHA = np.zeros(q_BTHA.shape)
    for b in range(B):
        for t in range(T):
            seen = range(max(length_B[b] - (T - 1 - t), 0))
            for h in range(H):
                o_BTHA[b, t, h] = attend(q_BTHA[b, t, h], *cached_tokens(pages_KPCE, table_BN[b], h // group, seen))
    return o_BTHA


def sparse_decode(q_BHA, pages_KPCE, table_BN, ids_BKM, count_B, length_B):
    B, H, _ = q_BHA.shape
    K, C = pages_KPCE.shape[0], pages_KPCE.shape[2]
    o_BHA = np.zeros(q_BHA.shape)
    for b in range(B):
        for h in range(H):
            k = h // (H // K)
            chosen = ids_BKM[b, k, : count_B[b]]
            seen = [n * C + i for n in chosen for i in range(C) if n * C + i < length_B[b]]
            o_BHA[b, h] = attend(q_BHA[b, h], *cached_tokens(pages_KPCE, table_BN[b], k, seen))
    return o_BHA


def page_landmark(keys_CA, policy):
    """What a policy keeps of one full page."""
    keys_CA = np.asarray(keys_CA, np.float64)
    if policy == 'quest':
        return np.asarray([*keys_CA.min(axis=0), *keys_CA.max(axis=0)])
    return keys_CA.mean(axis=0)


def page_scores(q_GA, landmark_NA, policy):
    """Score of every page, all of them full, for one group of query heads."""
    q_GA, landmark_NA = np.asarray(q_GA, np.float64), np.asarray(landmark_NA, np.float64)
    A = q_GA.shape[1]
    if policy == 'block_mean':
        return [float(q_GA.mean(axis=0) @ landmark_A) for landmark_A in landmark_NA]
    if policy == 'quest':
        bound = lambda q_A, low_A, high_A: np.maximum(q_A * low_A, q_A * high_A).sum()
        return [max(bound(q_A, landmark_W[:A], landmark_W[A:]) for q_A in q_GA) for landmark_W in landmark_NA]
    assert policy == 'group_softmax'
    total_N = np.zeros(len(landmark_NA))
    for q_A in q_GA:
        weight_N = np.exp([q_A @ landmark_A / np.sqrt(A) for landmark_A in landmark_NA])
        total_N += weight_N / weight_N.sum()
    return list(total_N)


def select_pages(
    q_GA, landmark_NW, length, budget, page_tokens, max_pages, reserved_first, reserved_last, policy='block_mean'
):
    """The pages that one KV head reads, ascending. Landmarks of pages that are not full are not looked at."""
    pages = -(-length // page_tokens)
    reserved = [n for n in range(pages) if n < reserved_first or n >= pages - reserved_last]
    others = [n for n in range(pages) if n not in reserved]
    score = page_scores(q_GA, landmark_NW[: length // page_tokens], policy)
    best = sorted(others, key=lambda n: (-score[n], n))
    return sorted((reserved + best[: min(budget, max_pages - len(reserved))])[:max_pages])


def page_select(
    q_BHA,
    landmark_BKNA,
    length_B,
    budget_B,
    *,
    page_tokens,
    max_pages,
    reserved_first,
    reserved_last,
    policy='block_mean',
):
    B, K, N, _ = landmark_BKNA.shape
    ids_BKM = np.full((B, K, min(max_pages, N)), N)
    count_B = np.zeros(B, int)
    for b in range(B):
        for k in range(K):
            chosen = select_pages(
                q_BHA[b].reshape(K, -1, q_BHA.shape[-1])[k],
                landmark_BKNA[b, k],
                int(length_B[b]),
                int(budget_B[b]),
                page_tokens,
                max_pages,
                reserved_first,
                reserved_last,
                policy,
            )
            ids_BKM[b, k, : len(chosen)] = chosen
            count_B[b] = len(chosen)
    return ids_BKM, count_B


def landmark_update(pages_KPCE, landmark_BKNA, k_BKA, v_BKA, table_BN, position_B, write_B, policy='block_mean'):
    """New pool and landmarks, these in float64 and not rounded."""
    pages_KPCE, landmark_BKNA = pages_KPCE.copy(), landmark_BKNA.astype(np.float64)
    K, C = pages_KPCE.shape[0], pages_KPCE.shape[2]
    for b in range(len(position_B)):
        if not write_B[b]:
            continue
        page, offset = divmod(int(position_B[b]), C)
        for k in range(K):
            A = k_BKA.shape[-1]
            pages_KPCE[k, table_BN[b, page], offset, :A] = k_BKA[b, k]
            pages_KPCE[k, table_BN[b, page], offset, A:] = v_BKA[b, k]
            if offset == C - 1:
                landmark_BKNA[b, k, page] = page_landmark(pages_KPCE[k, table_BN[b, page], :, :A], policy)
    return pages_KPCE, landmark_BKNA


def prefill_pages(
    q_BTHA, k_BTKA, length_B, budget_BT, *, page_tokens, reserved_first, reserved_last, policy='block_mean'
):
    """bool [B, K, T, N]: the pages that each query read when its token was the newest one."""
    B, T, H, _ = q_BTHA.shape
    K, C, N = k_BTKA.shape[2], page_tokens, -(-k_BTKA.shape[1] // page_tokens)
    read_BKTN = np.zeros((B, K, T, N), bool)
    for b in range(B):
        for k in range(K):
            full = [page_landmark(k_BTKA[b, n * C : (n + 1) * C, k], policy) for n in range(length_B[b] // C)]
            landmark_NW = [landmark_W.astype(np.float32).astype(k_BTKA.dtype) for landmark_W in full]
            for t in range(length_B[b]):
                q_GA = q_BTHA[b, t].reshape(K, H // K, -1)[k]
                budget = int(budget_BT[b, t])
                read = select_pages(q_GA, landmark_NW, t + 1, budget, C, N, reserved_first, reserved_last, policy)
                read_BKTN[b, k, t, read] = True
    return read_BKTN


def prefill_attention(q_BTHA, k_BTKA, v_BTKA, read_BKTN, page_tokens):
    """Attention of each query over the tokens, up to its own, of the pages that it reads."""
    B, T, H, _ = q_BTHA.shape
    group = H // k_BTKA.shape[2]
    k_BTKA, v_BTKA = k_BTKA.astype(np.float64), v_BTKA.astype(np.float64)
    o_BTHA = np.zeros(q_BTHA.shape)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                seen = [s for s in range(t + 1) if read_BKTN[b, h // group, t, s // page_tokens]]
                o_BTHA[b, t, h] = attend(q_BTHA[b, t, h], k_BTKA[b, seen, h // group], v_BTKA[b, seen, h // group])
    return o_BTHA
