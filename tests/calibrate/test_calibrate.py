"""calibrate from its command line, on a tiny random model: what it finds, going on, mistakes, the schedule it leaves.

The sampler's own hidden states judge the teacher-forced passes: in float32 both give the same alphas.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from tiny_run import exit_code

from sparrow_jax import commands
from sparrow_jax.assembly import assemble
from sparrow_jax.calibrate import __main__ as command
from sparrow_jax.calibrate.contexts import make_requests
from sparrow_jax.calibrate.measured import Measured
from sparrow_jax.calibrate.passes import Passes
from sparrow_jax.calibrate.results import Point, Results
from sparrow_jax.calibrate.summary import table
from sparrow_jax.config import resolve
from sparrow_jax.console import Console
from sparrow_jax.sparsity.calibration import Tokens
from sparrow_jax.sparsity.schedules import EVERY_PAGE, load_schedule
from sparrow_jax.train import train

CONFIG = 'configs/qwen3_1p7b.py:smoke'  # two layers: what these tests cost is compiling
BUDGETS = '(8,24)'
pytestmark = pytest.mark.usefixtures('in_the_repository')


def arguments(data_cache, **changes):
    fields = {'data.cache_dir': data_cache, 'calibrate.budget_tokens': BUDGETS, 'mismatch.min_count': 20} | changes
    return [f'--config={CONFIG}', *(f'--config.{name}={value}' for name, value in fields.items())]


def call(workdir, data_cache, **changes):
    return exit_code(command.calibrate, [*arguments(data_cache, **changes), f'--workdir={workdir}'])


def written(workdir, name='calibration.json'):
    return json.loads((workdir / name).read_text())


def measured_files(workdir):
    return {file.name: file.stat().st_mtime_ns for file in (workdir / 'measured').iterdir()}


@pytest.fixture(scope='module')
def whole(tmp_path_factory, data_cache):
    """A calibration at two budgets."""
    workdir = tmp_path_factory.mktemp('whole')
    assert call(workdir, data_cache) == 0
    return workdir


def test_it_measures_every_point_and_leaves_a_schedule(whole, data_cache):
    found = written(whole)
    assert [(p['budget_tokens'], p['every_page']) for p in found['points']] == [(0, True), (8, False), (24, False)]
    every_page, small, large = found['points']
    tokens = found['facts']['tokens']
    assert tokens == 4 * 31  # four responses of 32, the first token is prefill's
    for point in (found['dense_floor'], *found['points']):
        assert point['all']['tokens'] == tokens == sum(b['tokens'] for b in point['bins'])
    # Every page is the dense policy, in the pass as in the sampler; a larger budget is nearer to it, and dearer.
    assert found['dense_floor']['all']['alpha']['p01'][0] > 0.9999
    assert every_page['all']['alpha']['p01'][0] > 0.9999
    assert small['all']['alpha']['mean'][0] < large['all']['alpha']['mean'][0] < 0.9999
    assert small['all']['kv_bytes_per_token'] < large['all']['kv_bytes_per_token']
    assert small['all']['top20']['mean'][0] < small['all']['alpha']['mean'][0]

    [chosen] = found['chosen']
    schedule = written(whole, 'schedule.json')
    run = resolve(commands.load_config(CONFIG, arguments(data_cache, **{'schedule.path': whole / 'schedule.json'})[1:]))
    loaded = load_schedule(dataclasses.replace(run.schedule, kind='file'), run.rollout, run.model.shape.layers)
    assert list(loaded.budget_pages) == schedule['budget_pages'] == chosen['budget_pages']
    for z, budget in enumerate(chosen['budget_pages']):
        if z not in chosen['unknown_bins']:
            held = chosen['bins'][z]['alpha']['p05'][1]
            assert held >= 0.86 or budget == EVERY_PAGE or z in chosen['missed_bins']
    facts = schedule['calibration']
    assert (facts['dtype'], facts['temperature'], facts['target_p05']) == ('float32', 1.0, 0.86)
    assert facts['tokens'] == tokens
    for name in ('p05_by_length.png', 'cost.png', 'alpha.png'):
        assert (whole / name).stat().st_size > 10_000


def test_it_goes_on_where_it_was_stopped_and_budgets_can_be_added(whole, tmp_path, data_cache, monkeypatch, capsys):
    workdir, (sparse, calls) = tmp_path / 'w', (Passes.sparse, [])

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sparse(self, *args)

    monkeypatch.setattr(Passes, 'sparse', interrupted)
    assert call(workdir, data_cache) == 130
    assert 'the same command goes on from here' in capsys.readouterr().out
    kept = measured_files(workdir)
    assert set(kept) == {'block_mean_page8_all.npz', 'block_mean_page8_budget8.npz'}
    assert not (workdir / 'schedule.json').exists()
    monkeypatch.setattr(Passes, 'sparse', sparse)
    assert call(workdir, data_cache, **{'calibrate.budget_tokens': '(8,16,24)'}) == 0
    assert {name: time for name, time in measured_files(workdir).items() if name in kept} == kept
    points = written(workdir)['points']
    assert [p['budget_tokens'] for p in points] == [0, 8, 16, 24]
    assert [p for p in points if p['budget_tokens'] != 16] == written(whole)['points']


def test_other_settings_and_other_folders_are_refused(whole, tmp_path, data_cache, capsys):
    stamps = {file: file.stat().st_mtime_ns for file in whole.rglob('*')}
    assert call(whole, data_cache, **{'seed': 5, 'rollout.temperature': 0.5}) == 2
    said = capsys.readouterr().err
    assert 'holds a calibration with other settings' in said
    for part in ('seed: 0 -> 5', 'temperature: 1.0 -> 0.5', 'model_hash: '):
        assert part in said
    assert {file: file.stat().st_mtime_ns for file in whole.rglob('*')} == stamps
    (tmp_path / 'notes.txt').write_text('mine')
    assert call(tmp_path, data_cache) == 2
    assert f'--workdir={tmp_path}: is not empty; give a new folder' in capsys.readouterr().err


def test_a_target_above_the_floor_is_said(whole):
    found = written(whole)
    assert not any('above the floor' in line for line in table(found))
    found['dense_floor']['bins'][1]['alpha']['p05'][0] = 0.85
    assert [line for line in table(found) if 'above the floor' in line] == [
        '  0.86 is above the floor at 32-64 cached tokens: numerical differences alone cost as much; set '
        'calibrate.target_p05 below 0.850'
    ]


@pytest.mark.parametrize('policy', ['block_mean', pytest.param('quest', marks=pytest.mark.slow)])
def test_a_pass_gives_the_alphas_of_the_sampler_itself(policy, tmp_path, data_cache):
    """Sequences of the sparse sampler, whose hidden states it kept: the same alphas from one pass over their tokens.

    Pages of 8 where the budget grows by length, and the prompts end within pages.
    """
    changes = {'schedule.policy': policy}
    run = command.sized(resolve(commands.load_config(CONFIG, arguments(data_cache, **changes)[1:])))
    parts = assemble(run, trains=False)
    measured = Measured(parts, Results(str(tmp_path), {}), Console(quiet=True))
    schedule = measured.schedule(Point(policy, 8, 0), (1, 2, 3))
    requests = make_requests(run, parts.encoder)
    contexts, hidden = measured._draw(schedule, requests, sparse=True, done=0, total=len(requests))
    passes, quiet = measured.passes, lambda *_: None
    dense = passes.dense(contexts, quiet)
    kept, passed = passes.sampled(contexts, dense, hidden, quiet), passes.sparse(contexts, dense, schedule, quiet)
    np.testing.assert_allclose(passed.alpha, kept.alpha, rtol=0, atol=1e-4)
    np.testing.assert_allclose(passed.top20, kept.top20, rtol=0, atol=1e-4)
    assert kept.alpha.min() < 0.9, 'no page was left out that mattered'
    wrong = passes.sparse(contexts, dense, measured.schedule(Point(policy, 8, 0), (1, 2, 2)), quiet)
    assert np.abs(wrong.alpha - kept.alpha).max() > 0.01
    assert np.array_equal(wrong.alpha[kept.length < 64], passed.alpha[kept.length < 64])
    # In the order of the sequences, every token but the first of each response.
    lengths = [len(q.prompt_ids) + np.arange(1, len(r)) for q, r in zip(requests, contexts.responses, strict=True)]
    np.testing.assert_array_equal(kept.length, np.concatenate(lengths))
    assert jax.tree.map(len, [kept.alpha, kept.sequence]) == [len(kept.length)] * 2


@pytest.mark.slow
def test_texts_and_other_pages_and_policies(tmp_path, data_cache, capsys):
    """Rows as a run's samples.jsonl has them; a plain text is cut into sequences."""
    rows = [
        {'prompt': f'<|im_start|>{i}', 'completion': f'{i * 37} halves to {i * 18}. ' * 4, 'reward': 1}
        for i in range(4)
    ]
    (tmp_path / 'texts.jsonl').write_text(
        '\n'.join(map(json.dumps, [*rows, {'text': 'Halve it again and again. ' * 30}]))
    )
    changes = {
        'calibrate.texts': tmp_path / 'texts.jsonl',
        'calibrate.sequences': 6,
        'calibrate.policies': "('block_mean','quest')",
        'calibrate.page_tokens': '(16,)',
        'calibrate.budget_tokens': '(16,)',
        'rollout.max_response_tokens': 120,
    }
    assert call(tmp_path / 'w', data_cache, **changes) == 0
    said = capsys.readouterr().out
    assert 'given texts' in said
    file = tmp_path / 'w' / 'schedules' / 'block_mean_page16.json'
    assert f'--config.schedule.path={file} --config.rollout.page_tokens=16\n' in said
    found = written(tmp_path / 'w')
    assert found['dense_floor'] is None
    assert [(p['policy'], p['page_tokens']) for p in found['chosen']] == [('block_mean', 16), ('quest', 16)]
    assert found['facts']['sequences_measured'] == 6
    assert found['points'][0]['all']['alpha']['p01'][0] > 0.9999
    by_name = {p['policy']: p['all'] for p in found['points'][1:]}
    assert by_name['block_mean']['alpha']['mean'] != by_name['quest']['alpha']['mean']
    # Twice the landmarks.
    assert by_name['quest']['kv_bytes_per_token'] > by_name['block_mean']['kv_bytes_per_token']
    assert written(tmp_path / 'w', 'schedules/quest_page16.json')['policy'] == 'quest'


@pytest.mark.slow
def test_every_budget_may_sample_anew(tmp_path, data_cache, capsys):
    assert call(tmp_path / 'w', data_cache, **{'calibrate.contexts': 'sparse_samples'}) == 0
    assert 'sampled anew by the sparse sampler at every budget' in capsys.readouterr().out
    found = written(tmp_path / 'w')
    assert [p['budget_tokens'] for p in found['points']] == [8, 24]
    assert found['points'][0]['all']['alpha']['mean'][0] < found['points'][1]['all']['alpha']['mean'][0]
    assert found['schedules']['schedule.json']['calibration']['contexts'] == 'sparse_samples'


@pytest.mark.verify
def test_a_run_takes_the_schedule(whole, tmp_path, data_cache):
    changes = {
        'schedule.kind': 'file',
        'schedule.path': whole / 'schedule.json',
        'steps': 1,
        'evaluate.every_steps': -1,
    }
    assert exit_code(train, [*arguments(data_cache, **changes), f'--workdir={tmp_path}/w']) == 0
    rows = [json.loads(line) for line in (tmp_path / 'w' / 'metrics.jsonl').read_text().splitlines()]
    assert 0 < rows[-1]['sparse/kv_read_fraction'] <= 1.1


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'seed': 7}, 'its budgets were found on another model (random weights, hash '),
        ({'rollout.temperature': 0.7}, 'rollout.temperature=0.7: the budgets of'),
        ({'model.compute_dtype': 'bfloat16'}, "model.compute_dtype='bfloat16': the budgets of"),
        ({'rollout.page_tokens': 16, 'calibrate.budget_tokens': '()'}, 'rollout.page_tokens=16:'),
        ({'schedule.policy': 'quest'}, "schedule.policy='quest': the budgets of"),
        ({'schedule.kind': 'adaptive', 'schedule.start': 'file', 'seed': 7}, 'found on another model'),
    ],
)
def test_a_schedule_of_something_else_is_refused(changes, message, whole, tmp_path, data_cache, capsys):
    fields = {'schedule.kind': 'file', 'schedule.path': whole / 'schedule.json'} | changes
    assert exit_code(train, [*arguments(data_cache, **fields), f'--workdir={tmp_path}/new']) == 2
    said = capsys.readouterr().err
    assert message in said
    assert 'calibrate' in said or 'set it to' in said


def test_a_malformed_calibration_is_refused_and_a_file_without_one_is_taken(whole, tmp_path, data_cache):
    content = written(whole, 'schedule.json')
    config = lambda: resolve(
        commands.load_config(
            CONFIG,
            arguments(data_cache, **{'schedule.kind': 'file', 'schedule.path': tmp_path / 's.json', 'seed': 7})[1:],
        )
    )
    write = lambda value: (tmp_path / 's.json').write_text(json.dumps(content | {'calibration': value}))
    for value, message in ([3], 'calibration must be an object'), ({'model': 'm'}, 'model_hash is missing'):
        write(value)
        with pytest.raises(ValueError, match=message):
            assemble(config(), trains=False)
    del content['calibration']
    (tmp_path / 's.json').write_text(json.dumps(content))
    assert list(assemble(config(), trains=False).schedule.budget_pages) == content['budget_pages']


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'calibrate.contexts': 'samples'},
            "calibrate.contexts='samples': must be one of dense_samples, sparse_samples",
        ),
        ({'calibrate.sequences': 1}, 'calibrate.sequences=1: must be at least 2'),
        ({'calibrate.response_tokens': 999}, 'calibrate.response_tokens=999: must be from 2 to'),
        ({'calibrate.page_tokens': '(24,)'}, 'calibrate.page_tokens=(24,): must be powers of two from 8 to 128'),
        ({'calibrate.budget_tokens': '(8,12)'}, 'calibrate.budget_tokens=(8, 12): budgets are compared at whole pages'),
        ({'calibrate.budget_tokens': '(8,8)'}, 'calibrate.budget_tokens=(8, 8): names one twice'),
        ({'calibrate.policies': "('best',)"}, "calibrate.policies='best': must be one of block_mean"),
        ({'calibrate.target_p05': 1.5}, 'calibrate.target_p05=1.5: must be in (0, 1)'),
        ({'calibrate.texts': 'absent.jsonl'}, 'calibrate.texts=absent.jsonl: no such file'),
        ({'calibrate.texts': 'Makefile'}, 'calibrate.texts=Makefile: must end in .txt or .jsonl'),
        ({'calibrate.prompts': 'absent.txt'}, 'calibrate.prompts=absent.txt: no such file'),
        (
            {'calibrate.texts': 'a.txt', 'calibrate.prompts': 'b.txt'},
            "calibrate.prompts='b.txt': calibrate.texts='a.txt'",
        ),
        ({'calibrate.texts': 'a.txt', 'calibrate.contexts': 'sparse_samples'}, "calibrate.contexts='sparse_samples'"),
    ],
)
def test_mistakes_are_one_sentence_and_nothing_is_written(changes, message, tmp_path, data_cache, capsys):
    assert call(tmp_path / 'new', data_cache, **changes) == 2
    said = capsys.readouterr().err
    assert said.startswith(f'error: {message}')
    assert not (tmp_path / 'new').exists()


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('t.jsonl', '{"text": "a"}\n{', 'line 2 is not JSON'),
        ('t.jsonl', '[1]', 'line 1 must be a JSON object'),
        ('t.jsonl', '{"completion": "a"}', 'a row needs "text", or "prompt" and "completion", and has completion'),
        ('t.txt', 'a b', 'holds 0 texts of at least 2 tokens'),
    ],
)
def test_texts_that_cannot_be_used(name, content, message, tmp_path, data_cache, capsys):
    (tmp_path / name).write_text(content)
    assert call(tmp_path / 'new', data_cache, **{'calibrate.texts': tmp_path / name}) == 2
    assert message in capsys.readouterr().err


def test_tokens_are_joined_in_order():
    one = Tokens(*(np.asarray([i]) for i in range(4)))
    joined = Tokens.joined([one, one.of(np.asarray([False])), one])
    assert joined.length.tolist() == [2, 2]
