"""What selection does to a model that was trained: the first page and the newest ones matter, the rest may be chosen.

Random weights attend everywhere a little, so they cannot show a lost sink. The start checkpoint of configs/tiny.py
halves numbers line by line; here it scores a careful solution, teacher-forced, with pages left out.
"""

import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import tiny
from pallas_kernels.landmark_update import page_mean
from pallas_kernels.page_select import page_select
from pallas_kernels.sparse_decode import sparse_decode
from sparrow_jax.config import resolve
from sparrow_jax.models.decoder import abstract_decoder
from sparrow_jax.models.weights import load_params, read_shape
from sparrow_jax.tasks.prompts import PromptEncoder
from sparrow_jax.tasks.worked import worked_solution

ROOT = pathlib.Path(__file__).parents[2]
NUMBERS = (28034063, 90000001)
ALL_PAGES = 1 << 20
FIRST, LAST = 1, 3  # reserved pages


@pytest.fixture(scope='module')
def run():
    config = tiny.get_config()
    config.model.path = config.tokenizer.path = str(ROOT / 'configs' / 'tiny_start')
    return resolve(config)


@pytest.fixture(scope='module')
def log_probs(run):
    """log_probs(budget, first, last): of the solutions' tokens, where of the reserved pages at either end only `first`
    and `last` are read."""
    shape = read_shape(run.model.path)
    graphdef, abstract = abstract_decoder(shape, compute_dtype=jnp.float32)
    params = load_params(run.model.path, abstract)
    encoder = PromptEncoder(run.tokenizer, run.data, run.model.path)
    rows = []
    for number in NUMBERS:
        question = f'How many 1 bits are there in the binary representation of the number {number}?'
        problem = SimpleNamespace(question=question, source=run.data.source, metadata={'number': number})
        rows.append(encoder.encode_worked(problem, worked_solution(problem, style='careful')))
    C, schedule = run.rollout.page_tokens, run.schedule
    T = -(-max(len(prompt) + len(response) for prompt, response in rows) // C) * C

    def attend_as_sampled(prompt_tokens, budget, first, last):
        """Every token is a sequence of its own length over the row's pages; the prompt's tokens read all of them."""
        length_T = jnp.arange(1, T + 1)
        sampled_T = length_T > prompt_tokens

        def attend(layer, q_1THA, k_1TKA, v_1TKA):
            K, A = k_1TKA.shape[2:]
            kv_TKE = jnp.concatenate([k_1TKA[0], v_1TKA[0]], axis=-1)
            pages_KPCE = kv_TKE.reshape(T // C, C, K, 2 * A).transpose(2, 0, 1, 3)
            landmark_KNA = page_mean(pages_KPCE[..., :A])
            dense = layer in schedule.dense_layers
            ids_TKM, count_T = page_select(
                q_1THA[0],
                jnp.broadcast_to(landmark_KNA, (T, *landmark_KNA.shape)),
                length_T,
                jnp.where(sampled_T & (not dense), budget, ALL_PAGES),
                page_tokens=C,
                max_pages=T // C,
                reserved_first=schedule.reserved_first_pages,
                reserved_last=schedule.reserved_last_pages,
            )
            # A page left out is read at a place beyond the sequence, where nothing is valid.
            newest_T = (length_T - 1) // C
            out_TKM = (ids_TKM < schedule.reserved_first_pages) & (ids_TKM >= first)
            age_TKM = newest_T[:, None, None] - ids_TKM
            out_TKM |= (age_TKM < schedule.reserved_last_pages) & (age_TKM >= last) & (age_TKM >= 0)
            out_TKM &= sampled_T[:, None, None] & (not dense)
            ids_TKM = jnp.where(out_TKM, T // C, ids_TKM)
            table_TN = jnp.broadcast_to(jnp.arange(T // C), (T, T // C))
            return sparse_decode(q_1THA[0], pages_KPCE, table_TN, ids_TKM, count_T, length_T)[None]

        return attend

    @jax.jit
    def score(tokens_1T, prompt_tokens, budget, first, last):
        decoder = nnx.merge(graphdef, params)
        hidden_1TD = decoder.hidden(
            tokens_1T, jnp.arange(T)[None], attend_as_sampled(prompt_tokens, budget, first, last)
        )
        return jax.nn.log_softmax(decoder.logits(hidden_1TD)[0])

    def log_probs(budget, first, last):
        picked = []
        for prompt, response in rows:
            tokens_T = np.zeros(T, np.int32)
            tokens_T[: len(prompt) + len(response)] = prompt + response
            logp_TV = np.asarray(score(tokens_T[None], len(prompt), budget, first, last))
            picked.append(logp_TV[np.arange(len(prompt) - 1, len(prompt) + len(response) - 1), response])
        return np.concatenate(picked)

    return log_probs


@pytest.fixture(scope='module')
def error(log_probs):
    """error(budget, first, last): |log-prob - dense log-prob| of every token, by default with all reserved pages."""
    dense = log_probs(ALL_PAGES, FIRST, LAST)
    assert dense.mean() > -0.05, 'the checkpoint does not know the task'
    return lambda budget, first=FIRST, last=LAST: np.abs(log_probs(budget, first, last) - dense)


def test_the_reserved_pages_are_those_of_the_configuration(run):
    assert (run.schedule.reserved_first_pages, run.schedule.reserved_last_pages) == (FIRST, LAST)


def test_chosen_pages_keep_the_log_probs(run, error):
    """Of up to 31 pages: with 8 nothing is lost, with the configuration's own budget little, with none a lot."""
    assert error(8).max() < 0.01
    assert error(run.schedule.budget_pages).mean() < 0.02
    assert error(0).mean() > 0.1


def test_without_the_first_page_log_probs_move(error):
    """By little, as this small model has no strong sink; yet by far more than the choice among the others costs."""
    assert error(8, first=0).mean() > 4 * error(8).mean()
    assert error(8, first=0).max() > 4 * error(8).max()


def test_without_the_newest_pages_log_probs_are_lost(error):
    """The line above the current one is needed for every digit: the oldest reserved page matters, all three do."""
    assert error(8, last=LAST - 1).mean() > 0.1
    assert error(8, last=0).mean() > 2


def test_no_budget_makes_up_for_the_newest_pages(error):
    assert error(ALL_PAGES, last=LAST - 1).mean() > 0.1
