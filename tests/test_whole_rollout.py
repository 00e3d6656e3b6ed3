"""bench_rollout --lengths: the roofline by hand, the committed lengths, a real run on the CPU, mistakes."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny_run import ROOT, exit_code

from sparrow_jax import bench_rollout, commands, whole_rollout
from sparrow_jax.bench_setup import dense_schedule, make_setup
from sparrow_jax.config import resolve
from sparrow_jax.occupancy_plot import tokens_per_s
from sparrow_jax.rollout.engine import Engine, Progress, Response
from sparrow_jax.step_reads import rollout_reads, step_bytes, weight_bytes

SMOKE = '--config=configs/qwen3_1p7b.py:smoke'
COMMITTED = ROOT / 'docs/measurements/rollout_lengths.json'
PROMPT, RESPONSES = 11, (32, 1, 9, 25, 2, 17, 17)


pytestmark = pytest.mark.usefixtures('in_the_repository')


@pytest.fixture
def lengths(tmp_path):
    file = tmp_path / 'lengths.json'
    file.write_text(json.dumps({'prompt_tokens': PROMPT, 'response_tokens': RESPONSES}))
    return file


def call(*arguments) -> int:
    return exit_code(bench_rollout.bench_rollout, arguments, workdir_required=False, define_flags=bench_rollout._flags)


# ---------------------------------------------------------------------- the roofline


@pytest.fixture(scope='module')
def setup():
    return make_setup(resolve(commands.load_config('configs/qwen3_1p7b.py')))


@pytest.mark.parametrize('dense', [False, True])
def test_a_rollout_reads_what_its_steps_read(setup, dense):
    """Two responses after 1,998 prompt tokens: 1 token is no step, 4 tokens are steps at 1,999 to 2,001 cached tokens,
    where the published budget goes from 29 to 61 pages."""
    schedule = dense_schedule(setup.schedule) if dense else setup.schedule
    assert [setup.schedule.pages_read(n) for n in (1999, 2000, 2001)] == [32, 64, 64]
    sizes = {'sequences': 1, 'weight_bytes': 0}
    steps = [step_bytes(setup.shape, schedule, setup.dtype, length_tokens=n, **sizes) for n in (1999, 2000, 2001)]
    page, landmark, pages = 65_536, 2048, [125, 125, 126]
    full = [124, 125, 125]
    by_hand = [
        28 * n * page if dense else 2 * n * page + 26 * (read * page + m * landmark)
        for n, read, m in zip(pages, (32, 64, 64), full, strict=True)
    ]
    assert steps == by_hand
    reads = rollout_reads(setup.shape, schedule, setup.dtype, prompt_tokens=1998, response_tokens=(1, 4), slots=8)
    assert reads.cache_bytes == sum(by_hand)
    assert reads.steps == 3
    assert reads.weight_bytes == weight_bytes(setup.shape, setup.dtype) == 3_441_397_760
    assert reads.total_bytes == sum(by_hand) + 3 * 3_441_397_760


@pytest.mark.parametrize(('slots', 'steps'), [(1, 31 + 0 + 8 + 24 + 1 + 16 + 16), (2, 48), (3, 32), (4, 31), (7, 31)])
def test_the_fewest_steps_are_the_longest_response_or_full_slots(setup, slots, steps):
    reads = rollout_reads(
        setup.shape, setup.schedule, setup.dtype, prompt_tokens=PROMPT, response_tokens=RESPONSES, slots=slots
    )
    assert reads.steps == steps


def test_the_committed_lengths_are_what_their_text_says():
    spec = importlib.util.spec_from_file_location('make_rollout_lengths', ROOT / 'scripts/make_rollout_lengths.py')
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = json.loads(COMMITTED.read_text())
    numbers = [written[name] for name in ('sigma', 'mean_tokens', 'cut_tokens', 'prompt_tokens', 'seed')]
    assert COMMITTED.read_text() == script.content(len(written['response_tokens']), *numbers)
    tokens = np.asarray(written['response_tokens'])
    assert len(tokens) == 96
    assert abs(tokens.mean() - 14_336) < 1
    assert tokens.max() == 32_768
    low, high = np.quantile(np.log(tokens), (0.1587, 0.8413))  # one sigma on each side; the cut is beyond
    assert (high - low) / 2 == pytest.approx(0.7, abs=0.1)
    read = whole_rollout.read_lengths(str(COMMITTED))
    assert (read.prompt_tokens, read.response_tokens) == (256, tuple(tokens))


# ---------------------------------------------------------------------- runs


@pytest.mark.slow
def test_both_samplers_on_a_cpu(lengths, tmp_path, capsys):
    """Seven responses by three slots and a pool for one longest sequence."""
    dense, sparse = tmp_path / 'dense.json', tmp_path / 'sparse.json'
    sizes = ('--slots=3', f'--lengths={lengths}')
    fields = {'segment_steps': 4, 'max_prompt_tokens': 32, 'pool_pages': 8}
    sizes += tuple(f'--config.rollout.{name}={value}' for name, value in fields.items())
    kind = '--config.schedule.kind=fixed'
    assert call(SMOKE, kind, *sizes, '--modes=dense', f'--out={dense}') == 0
    assert call(SMOKE, kind, *sizes, '--modes=sparse', f'--beside={dense}', f'--out={sparse}') == 0
    for file, mode in ((dense, 'dense'), (sparse, 'sparse')):
        written = json.loads(file.read_text())
        assert written['mode'] == mode
        assert written['complete'] is True
        assert written['tokens'] == sum(RESPONSES)
        assert written['tokens_per_s'] == pytest.approx(sum(RESPONSES) / written['seconds'])
        assert written['fraction_of_roofline'] == pytest.approx(written['roofline_s'] / written['seconds'])
        assert written['roofline_s'] == pytest.approx(
            (written['roofline']['cache_bytes'] + 32 * written['roofline']['weight_bytes_of_a_step']) / 4.3e12
        )
        assert written['prefill_s'] + written['decode_s'] == pytest.approx(written['seconds'])
        assert written['prefill_s'] > 0
        assert written['compiled_late'] == []
        assert written['parks'] > 0
        series = written['occupancy']
        assert len({len(values) for values in series.values()}) == 1
        assert 4 * len(series['time_s']) == written['steps'] >= written['roofline']['steps']
        assert max(series['running']) == 3
        assert max(series['parked']) >= 1
        assert 0 < max(series['pages']) <= 8
        assert series['tokens'][-1] == sum(RESPONSES)
        assert all(a <= b for a, b in itertools.pairwise(series['time_s']))
        for suffix in ('.png', '.svg'):
            assert file.with_suffix(suffix).stat().st_size > 1000
    held = tmp_path / 'held.json'
    kind, pool = '--config.schedule.kind=adaptive', '--config.rollout.pool_pages=24'
    assert call(SMOKE, kind, *sizes, pool, '--modes=sparse', f'--out={held}') == 0
    adaptive, fixed = (json.loads(file.read_text()) for file in (held, sparse))
    assert adaptive['compiled_late'] == []
    assert adaptive['probes'] == 1
    assert 0 < adaptive['probe_s'] < adaptive['seconds']
    assert adaptive['roofline_s'] == fixed['roofline_s'], 'budgets that moved'
    assert 'probe_s' not in fixed
    beside = json.loads(sparse.read_text())['beside']
    seconds = [json.loads(file.read_text())['seconds'] for file in (dense, sparse)]
    assert beside['speedup'] == pytest.approx(seconds[0] / seconds[1])
    assert beside['roofline_speedup'] == pytest.approx(
        json.loads(dense.read_text())['roofline_s'] / json.loads(sparse.read_text())['roofline_s']
    )
    assert re.search(r'sparse over dense +\d', capsys.readouterr().out)


@pytest.mark.slow
def test_both_samplers_on_four_data_shards_with_shared_prompts_and_a_learner(tmp_path):
    """Twelve responses of six prompts, on simulated devices."""
    responses = (9, 4, 1, 12, 7, 7, 3, 16, 2, 5, 8, 6)
    lengths, learner, out = (tmp_path / name for name in ('lengths.json', 'learner.json', 'out.json'))
    fields = {'prompt_tokens': PROMPT, 'samples_per_prompt': 2, 'response_tokens': responses}
    lengths.write_text(json.dumps(fields))
    of_rows = {'row_tokens': 16, 'rows': 2, 'ms': {'scoring': 30.0, 'gradients': 90.0, 'optimizer update': 5.0}}
    other = {'row_tokens': 4096, 'rows': 2, 'ms': dict.fromkeys(of_rows['ms'], 1e9)}
    here = {'model': 'qwen3 0.11M', 'device': 'cpu', 'devices': 2}
    learner.write_text(json.dumps(here | {'rows': [other, of_rows]}))
    flags = [
        '--slots=8',
        '--config.parallel.data=4',
        '--config.schedule.kind=fixed',
        '--config.rollout.segment_steps=4',
    ]
    files = [f'--lengths={lengths}', f'--learner={learner}', f'--out={out}']
    done = subprocess.run(
        [sys.executable, '-m', 'sparrow_jax.bench_rollout', SMOKE, *flags, *files],
        env=os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=4'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    dense, sparse = (json.loads((tmp_path / name).read_text()) for name in ('out.dense.json', 'out.json'))
    assert (dense['mode'], sparse['mode']) == ('dense', 'sparse')
    for figures in (dense, sparse):
        assert figures['mesh'] == {'data': 4, 'fsdp': 1, 'tensor': 1}
        assert figures['compiled_late'] == []
        assert figures['tokens'] == sum(responses)
        assert figures['roofline']['steps'] == 15
        assert max(figures['occupancy']['pages']) <= figures['pool_pages']
    beside = sparse['beside']
    assert beside['file'] == str(tmp_path / 'out.dense.json')
    tokens = sum(responses) + len(responses) * PROMPT
    assert beside['learner_s'] == pytest.approx((tokens * 120 / 32 * 2 / 4 + 5) / 1e3)
    steps = [figures['seconds'] + beside['learner_s'] for figures in (dense, sparse)]
    assert beside['step_speedup'] == pytest.approx(steps[0] / steps[1])
    assert 'steps of training' in done.stdout


def test_four_shards_share_what_is_read(setup):
    sizes = {'prompt_tokens': PROMPT, 'response_tokens': RESPONSES, 'slots': 4}
    one, four = (rollout_reads(setup.shape, setup.schedule, setup.dtype, **sizes, shards=n) for n in (1, 4))
    assert (four.cache_bytes, four.steps) == (one.cache_bytes // 4, one.steps)
    assert four.weight_bytes == one.weight_bytes


def test_responses_that_follow_each_other_share_a_prompt():
    lengths = whole_rollout.Lengths(PROMPT, (5, 6, 7, 8, 9), samples_per_prompt=2)
    requests = whole_rollout.forced_requests(lengths, 100, seed=0)
    assert [(r.prompt, r.sample, r.limit_tokens) for r in requests] == [
        (0, 0, 5),
        (0, 1, 6),
        (1, 0, 7),
        (1, 1, 8),
        (2, 0, 9),
    ]
    assert requests[0].prompt_ids == requests[1].prompt_ids != requests[2].prompt_ids


@pytest.fixture
def pretended(monkeypatch):
    """An engine that samples a segment of everything in no time. Set `cut` to a response to make it too short, `after`
    to end the run after so many segments."""

    class Pretended:
        cut, after = None, None

    def generate(engine, _weights, requests, *, on_progress, **_):
        left = np.asarray([request.limit_tokens for request in requests])
        for segment in itertools.count(1):
            left = np.maximum(left - engine.rollout.segment_steps, 0)
            running, tokens = int((left > 0).sum()), int(sum(RESPONSES) - left.sum())
            on_progress(Progress(len(left) - running, len(left), tokens, max(running, 1), 8, 0, 0, running, 0.0))
            if segment == Pretended.after:
                raise KeyboardInterrupt
            if not running:
                break
        lengths = [request.limit_tokens - (i == Pretended.cut) for i, request in enumerate(requests)]
        return [Response(np.zeros(n, np.int32), np.zeros(n), np.zeros(n), None, 'length') for n in lengths]

    monkeypatch.setattr(whole_rollout.Setup, 'random_weights', lambda *_: ())
    monkeypatch.setattr(Engine, 'warm_up', lambda *_: None)
    monkeypatch.setattr(Engine, 'generate', generate)
    return Pretended


def test_a_response_of_another_length_is_no_result(lengths, pretended, tmp_path):
    pretended.cut = 3
    with pytest.raises(RuntimeError, match='another length'):
        commands.run(
            bench_rollout.bench_rollout,
            workdir_required=False,
            define_flags=bench_rollout._flags,
            argv=['x', SMOKE, f'--lengths={lengths}', '--modes=dense', f'--out={tmp_path}/a.json'],
        )


def test_a_run_that_is_stopped_leaves_what_it_had(lengths, pretended, monkeypatch, tmp_path):
    monkeypatch.setattr(whole_rollout, 'WRITE_EVERY_S', -1.0)
    pretended.after = 1
    out = tmp_path / 'a.json'
    assert call(SMOKE, f'--lengths={lengths}', '--modes=dense', f'--out={out}') == 130
    written = json.loads(out.read_text())
    assert written['complete'] is False
    assert written['tokens'] == written['occupancy']['tokens'][-1] == 16 + 1 + 9 + 16 + 2 + 16 + 16
    pretended.after = None
    given = (f'--lengths={lengths}', '--modes=sparse', '--config.schedule.kind=fixed', f'--beside={out}')
    assert call(SMOKE, *given, f'--out={tmp_path}/b.json') == 2


def test_speed_over_windows_by_hand():
    """Segments of a second, 10 tokens each, then 30: windows of two seconds, the last one shorter."""
    time_s, tokens = np.arange(1.0, 7), np.asarray([10, 20, 30, 60, 90, 120])
    seconds, speed = tokens_per_s(time_s, tokens)
    assert seconds.tolist() == [1, 3, 5, 6]
    assert speed.tolist() == [10, 10, 30, 30]


BAD_FILES = {
    'no such file': None,
    'not JSON': '{',
    'field response_tokens is missing': '{"prompt_tokens": 3}',
    'prompt_tokens=0 must be a positive integer': '{"prompt_tokens": 0, "response_tokens": [1]}',
    'response_tokens must be a list of positive': '{"prompt_tokens": 3, "response_tokens": [1, 2.5]}',
    'response_tokens must be a list of positive integers$': '{"prompt_tokens": 3, "response_tokens": []}',
    'samples_per_prompt=-2 must be a positive integer': (
        '{"prompt_tokens": 3, "response_tokens": [1], "samples_per_prompt": -2}'
    ),
    'have 257 tokens, the model knows 256 positions': '{"prompt_tokens": 7, "response_tokens": [1, 250]}',
}


@pytest.mark.parametrize('said', BAD_FILES)
def test_a_bad_file_is_one_sentence(said, tmp_path, capsys):
    file = tmp_path / 'bad.json'
    if BAD_FILES[said] is not None:
        file.write_text(BAD_FILES[said])
    assert call(SMOKE, f'--lengths={file}', '--modes=dense', f'--out={tmp_path}/out.json') == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert re.search(rf'^error: --lengths={file}: .*{said}', captured.err.rstrip())
    assert not (tmp_path / 'out.json').exists()


MISTAKES = {
    ('--slots=2,3',): '--slots=2,3: must be one positive number',
    ('--slots=-1',): '--slots=-1: must be one positive number',
    ('--slots=100000000',): '--slots=100000000: needs about ',
    ('--modes=dense,sparse', '--config.schedule.kind=fixed', '--beside={tmp}/same.json'): (
        '--beside={tmp}/same.json: both samplers run here'
    ),
    ('--modes=dense,sparse', '--config.schedule.kind=dense'): "schedule.kind='dense': --modes=sparse needs another",
    ('--modes=dense,sparse', '--config.schedule.kind=fixed', '--learner={tmp}/none.json'): (
        '--learner={tmp}/none.json: no such file'
    ),
    ('--modes=dense,sparse', '--config.schedule.kind=fixed', '--learner={tmp}/same.json'): (
        '--learner={tmp}/same.json: holds no figures of sparrow_jax.bench_learner'
    ),
    ('--modes=dense,sparse', '--config.schedule.kind=fixed', '--learner={tmp}/learner.json'): (
        '--learner={tmp}/learner.json: is of llama 1B, not of qwen3 0.11M'
    ),
    ('--learner={tmp}/learner.json',): '--learner={tmp}/learner.json: compares two samplers; give both of --modes',
    ('--beside={tmp}/model.json',): '--beside={tmp}/model.json: was measured with model llama 1B, here it is qwen3',
    ('--beside={tmp}/many.json',): '--beside={tmp}/many.json: was measured with samples_per_prompt 8, here it is 1',
    ('--out={tmp}/run',): '--out={tmp}/run: must end in .json',
    ('--cached_tokens=64',): '--cached_tokens=64: is for single steps',
    ('--pages_read=4',): '--pages_read=4: is for single steps',
    ('--modes=sparse', '--config.schedule.kind=dense'): "schedule.kind='dense': --modes=sparse needs another schedule",
    ('--modes=sparse', '--config.schedule.kind=adaptive'): 'rollout.pool_pages=0: with probes, which need pages',
    ('--beside={tmp}/none.json',): '--beside={tmp}/none.json: no such file',
    ('--beside={tmp}/same.json',): '--beside={tmp}/same.json: is of the dense sampler, too',
    ('--beside={tmp}/longer.json',): '--beside={tmp}/longer.json: was measured with other lengths',
    ('--beside={tmp}/half.json',): '--beside={tmp}/half.json: holds no finished run',
    ('--out={tmp}/taken.json',): '--out={tmp}/taken.json: taken.png: Is a directory',
}


@pytest.mark.parametrize('flags', MISTAKES)
def test_a_mistake_is_said_before_anything_is_measured(flags, lengths, tmp_path, capsys):
    done = {'complete': True, 'roofline_s': 1.0, 'prompt_tokens': PROMPT, 'response_tokens': RESPONSES}
    done |= {'model': 'qwen3 0.11M', 'device': jax.devices()[0].device_kind, 'devices': jax.device_count()}
    for name, fields in (
        ('same', {'mode': 'dense'}),
        ('longer', {'mode': 'sparse', 'prompt_tokens': PROMPT + 1}),
        ('half', {'mode': 'sparse', 'complete': False}),
        ('model', {'mode': 'sparse', 'model': 'llama 1B'}),
        ('many', {'mode': 'sparse', 'samples_per_prompt': 8}),
    ):
        (tmp_path / f'{name}.json').write_text(json.dumps(done | fields))
    (tmp_path / 'learner.json').write_text(
        json.dumps(done | {'model': 'llama 1B', 'rows': [{'row_tokens': 1, 'rows': 1, 'ms': {}}]})
    )
    (tmp_path / 'taken.png').mkdir()
    given = [flag.format(tmp=tmp_path) for flag in flags]
    assert call(SMOKE, f'--lengths={lengths}', '--modes=dense', f'--out={tmp_path}/out.json', *given) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert f'error: {MISTAKES[flags].format(tmp=tmp_path)}' in captured.err
    assert not (tmp_path / 'out.json').exists()
