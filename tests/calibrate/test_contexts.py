"""Sequences of a calibration: prompts and texts from files, what is left out, and the way to a file and back."""

import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

from sparrow_jax import commands
from sparrow_jax.calibrate import __main__ as command
from sparrow_jax.calibrate.contexts import Contexts, make_requests, of_samples, read_texts
from sparrow_jax.calibrate.passes import choose_passes_kernels
from sparrow_jax.config import ConfigError, resolve
from sparrow_jax.rollout.harvest import Response
from sparrow_jax.rollout.pool import Request
from sparrow_jax.tasks.prompts import PromptEncoder

pytestmark = pytest.mark.usefixtures('in_the_repository')


def config(**changes):
    overrides = [f'--config.{name}={value}' for name, value in changes.items()]
    return resolve(commands.load_config('configs/qwen3_1p7b.py:smoke', overrides))


@pytest.fixture(scope='module')
def encoder():
    run = config()
    return PromptEncoder(run.tokenizer, run.data, '')


def test_prompts_of_a_file_go_through_the_template_and_begin_again(encoder, tmp_path):
    (tmp_path / 'p.txt').write_text('One.\n\nTwo is longer.\n' + 'Far too long. ' * 60 + '\n')
    (tmp_path / 'p.jsonl').write_text('{"prompt": "One."}\n{"prompt": "Two is longer.", "level": 3}\n')
    as_lines, as_rows = (
        make_requests(config(**{'calibrate.prompts': tmp_path / name}), encoder) for name in ('p.txt', 'p.jsonl')
    )
    assert as_lines == as_rows
    assert [r.prompt for r in as_rows] == [0, 1, 2, 3]  # keys of their own
    assert as_rows[0].prompt_ids == as_rows[2].prompt_ids != as_rows[1].prompt_ids
    assert 'Two is longer.' in encoder.tokenizer.decode(as_rows[1].prompt_ids)
    assert len(as_rows[0].prompt_ids) > len(encoder.tokenizer('One.')['input_ids'])
    (tmp_path / 'long.txt').write_text('Far too long. ' * 60)
    with pytest.raises(ConfigError, match=r'rollout\.max_prompt_tokens=96: no prompt of calibrate\.prompts='):
        make_requests(config(**{'calibrate.prompts': tmp_path / 'long.txt'}), encoder)
    (tmp_path / 'bad.jsonl').write_text('{"question": "One."}')
    with pytest.raises(ConfigError, match='a row has no "prompt", but question'):
        make_requests(config(**{'calibrate.prompts': tmp_path / 'bad.jsonl'}), encoder)


def test_texts_keep_their_prompts_and_long_ones_are_cut(encoder, tmp_path):
    ids = lambda text: encoder.tokenizer(text, add_special_tokens=False)['input_ids']
    long, most = 'Halve it again and again. ' * 30, 32
    rows = [
        {'prompt': 'A question', 'completion': 'and its answer', 'step': 4},
        {'prompt': 'A question', 'completion': long},
        {'text': ''},
        {'text': long},
    ]
    (tmp_path / 't.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    found = read_texts(config(**{'calibrate.texts': tmp_path / 't.jsonl', 'calibrate.sequences': 5}), encoder)
    assert len(found) == 5
    assert found.left_out >= 1
    assert found.prompts[0].tolist() == found.prompts[1].tolist() == ids('A question')
    assert found.responses[0].tolist() == ids('and its answer')
    assert found.responses[1].tolist() == ids(long)[:most]  # no more: the rest would stand behind another prompt
    for number in (0, 1, 2):
        part = ids(long)[number * (most + 1) : (number + 1) * (most + 1)]
        assert [*found.prompts[2 + number], *found.responses[2 + number]] == part
        assert len(found.prompts[2 + number]) == 1


def test_sequences_come_back_from_a_file_and_lengths_count_the_prompt():
    contexts = Contexts((np.arange(3), np.arange(1)), (np.arange(4), np.arange(2)), left_out=2)
    buffer = io.BytesIO()
    np.savez(buffer, **contexts.flat())
    buffer.seek(0)
    back = Contexts.from_flat(np.load(buffer))
    assert [x.tolist() for x in back.prompts + back.responses] == [[0, 1, 2], [0], [0, 1, 2, 3], [0, 1]]
    assert (back.left_out, back.tokens) == (2, 4)
    # The first response token is drawn by the prefill; when the second is drawn, prompt and first are cached.
    assert back.measured_lengths().tolist() == [4, 5, 6, 2]
    assert len(Contexts.joined([back, contexts])) == 4


def test_answers_of_one_token_are_left_out():
    response = lambda n: Response(np.arange(n), np.zeros(n), np.zeros(n, int), np.zeros((n, 2)), 'stop')
    contexts, hidden = of_samples([Request([5], 0, 0, 9), Request([6], 1, 0, 9)], [response(1), response(3)])
    assert (len(contexts), contexts.left_out, len(hidden)) == (1, 1, 1)
    assert contexts.prompts[0].tolist() == [6]


def test_several_processes_and_shards_that_cannot_share_the_heads_are_refused():
    run = config()
    several = dataclasses.replace(run, parallel=dataclasses.replace(run.parallel, distributed='auto'))
    with pytest.raises(ConfigError, match=r"parallel\.distributed='auto': a calibration runs in one process"):
        command.calibrate(several, 'never')
    parts = SimpleNamespace(run=run, mesh=SimpleNamespace(shape={'tensor': 4}), shape=SimpleNamespace(kv_heads=2))
    with pytest.raises(ConfigError, match=r'parallel\.tensor=4: does not divide the 2 KV heads'):
        choose_passes_kernels(parts)


def test_budgets_are_halves_of_the_longest_sequence_in_whole_pages():
    run = command.sized(config(**{'calibrate.page_tokens': '(16,)'}))
    assert [(p.budget_tokens, p.page_tokens) for p in command.sweep(run)] == [(0, 16), (16, 16), (32, 16), (64, 16)]
