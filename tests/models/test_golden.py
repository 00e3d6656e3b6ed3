"""Logits against those of transformers (scripts/make_golden.py), tiny models and SmolLM2-135M."""

import pathlib

import golden_cases
import numpy as np
import pytest
from tiny_models import jitted_logits, load, write_checkpoint

from sparrow_jax.tasks.tokenizer import load_tokenizer

GOLDEN = pathlib.Path(__file__).parent / 'golden'
SMOLLM2 = pathlib.Path(__file__).parents[2] / 'weights' / 'smollm2-135m' / 'SmolLM2-135M-Instruct.Q4_1.gguf'
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason='`make model` fetches the SmolLM2-135M weights')


@pytest.mark.parametrize('name', golden_cases.CASES)
@pytest.mark.parametrize(('shards', 'bfloat16'), [(1, False), (2, True)])
def test_tiny_models_give_the_logits_of_transformers(tmp_path, name, shards, bfloat16):
    config = golden_cases.CASES[name]
    folder = write_checkpoint(tmp_path, config, golden_cases.weights(config), shards, bfloat16)
    graphdef, params = load(folder)
    logits_BTV = jitted_logits(graphdef, params, golden_cases.tokens_BT())
    with np.load(GOLDEN / f'{name}.npz') as golden:
        np.testing.assert_allclose(logits_BTV, golden['logits_BTV'], rtol=0, atol=2e-5)


def test_golden_cases_differ_from_each_other():
    # RoPE scaling that is read but never applied would pass all else if the tiny models did not feel it.
    with np.load(GOLDEN / 'llama.npz') as plain, np.load(GOLDEN / 'llama_llama3.npz') as scaled:
        assert np.abs(plain['logits_BTV'] - scaled['logits_BTV']).max() > 0.01


@needs_smollm2
@pytest.mark.slow
def test_smollm2_gives_the_logits_of_transformers():
    graphdef, params = load(SMOLLM2)
    with np.load(GOLDEN / 'smollm2.npz') as golden:
        logits_TV = np.asarray(jitted_logits(graphdef, params, golden['ids'][None]))[0]
        grid = logits_TV[list(golden_cases.SMOLLM2_POSITIONS)][:, :: golden_cases.SMOLLM2_VOCAB_STRIDE]
        # Logits of size 30 after 30 layers, summed in another order: 6e-5 apart where this was written.
        np.testing.assert_allclose(grid, golden['grid'], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits_TV.max(-1), golden['max'], rtol=0, atol=1e-4)
        np.testing.assert_array_equal(logits_TV.argmax(-1), golden['argmax'])


@needs_smollm2
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    graphdef, params = load(SMOLLM2)
    tokenizer = load_tokenizer(SMOLLM2)
    message = {'role': 'user', 'content': golden_cases.SMOLLM2_PROMPT}
    prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=True, return_dict=False)
    tokens = np.zeros((1, len(prompt) + 12), np.int32)
    tokens[0, : len(prompt)] = prompt
    for i in range(len(prompt), tokens.shape[1]):
        tokens[0, i] = int(np.argmax(jitted_logits(graphdef, params, tokens)[0, i - 1]))
    assert 'Paris' in tokenizer.decode(tokens[0, len(prompt) :])
