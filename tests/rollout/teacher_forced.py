"""Log-probs of sampled tokens from one forward pass over prompt and response, without cache, pages or slots.

`dense` is the policy as the learner sees it; `sparse` makes every response token choose and read its pages in float64
NumPy over plain token lists (`tests/pallas_kernels/numpy_reference.py`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference
import sampler_setup as setup
from flax import nnx

from sparrow_jax.models.attention import causal_attend

ROW = setup.MAX_PROMPT + setup.MAX_RESPONSE


def row_of(request, response) -> np.ndarray:
    """Prompt and response in one padded row [1, T]."""
    ids = [*request.prompt_ids, *response.tokens.tolist()]
    return np.asarray([ids + [1] * (ROW - len(ids))], np.int32)


def _logits(graphdef, params, tokens_BT, attend):
    decoder = nnx.merge(graphdef, params)
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    return decoder.logits(decoder.hidden(tokens_BT, positions_BT, attend))


@functools.partial(jax.jit, static_argnums=0)
def _dense_logits(graphdef, params, tokens_BT):
    return _logits(graphdef, params, tokens_BT, causal_attend(None, 'xla'))


def log_softmax(logits_V, temperature=1.0):
    scaled_V = np.asarray(logits_V, np.float64) / temperature
    top = scaled_V.max(axis=-1, keepdims=True)
    return scaled_V - top - np.log(np.exp(scaled_V - top).sum(axis=-1, keepdims=True))


def dense(model, request, response) -> np.ndarray:
    """Logits [response tokens, V] that each response token was to be drawn from."""
    logits_1TV = np.asarray(_dense_logits(*model, row_of(request, response)))
    return _from_prompt_on(logits_1TV[0], request, response)


def sparse(model, request, response, budgets, policy='block_mean') -> np.ndarray:
    """Like `dense`, for a sampler with these budgets and policy; the prompt and the dense layers read everything."""
    prompt, used = len(request.prompt_ids), len(request.prompt_ids) + len(response.tokens)

    def attend(layer, q_1THA, k_1TKA, v_1TKA):
        q_THA, k_TKA, v_TKA = (np.asarray(x[0]) for x in (q_1THA, k_1TKA, v_1TKA))
        o_1THA = np.zeros(q_1THA.shape, np.float32)
        K = k_TKA.shape[1]
        for t in range(used):
            for k in range(K):
                q_GA = q_THA[t].reshape(K, -1, q_THA.shape[-1])[k]
                seen = list(range(t + 1))
                if t >= prompt and layer not in setup.DENSE_LAYERS:
                    seen = _chosen_tokens(q_GA, k_TKA[: t + 1, k], budgets, policy)
                for g, q_A in enumerate(q_GA):
                    o_A = numpy_reference.attend(q_A, k_TKA[seen, k].astype(float), v_TKA[seen, k].astype(float))
                    o_1THA[0, t, k * len(q_GA) + g] = o_A
        return jnp.asarray(o_1THA)

    graphdef, params = model
    logits_1TV = np.asarray(_logits(graphdef, params, row_of(request, response), attend))
    return _from_prompt_on(logits_1TV[0], request, response)


def _chosen_tokens(q_GA, keys_SA, budgets, policy):
    length, C = len(keys_SA), setup.PAGE
    full = length // C
    landmark_NW = [numpy_reference.page_landmark(keys_SA[n * C : (n + 1) * C], policy) for n in range(full)]
    budget = budgets[min(length // setup.BIN_WIDTH, len(budgets) - 1)]
    pages = numpy_reference.select_pages(
        q_GA, landmark_NW, length, budget, C, setup.PAGES, setup.RESERVED_FIRST, setup.RESERVED_LAST, policy
    )
    return [position for page in pages for position in range(page * C, min((page + 1) * C, length))]


def _from_prompt_on(logits_TV, request, response):
    start = len(request.prompt_ids) - 1  # the token at i is drawn from the position before it
    return logits_TV[start : start + len(response.tokens)]
