"""bench_rollout from its command line: the smoke run, the figures of a row by hand, an interruption, mistakes."""

import dataclasses
import json
import math
import re

import pytest
from tiny_run import exit_code

from configs import qwen3_8b
from sparrow_jax import bench_rollout
from sparrow_jax.config import resolve

SMOKE = '--config=configs/qwen3_1p7b.py:smoke'
FIELDS = {
    'model',
    'slots',
    'cached_tokens',
    'mode',
    'pages_read',
    'ms_per_step',
    'tokens_per_s',
    'limit_ms',
    'fraction_of_limit',
    'read_bandwidth_tb_s',
    'speedup_over_dense',
    'breakdown_ms',
}
FACTS = {'device', 'jax', 'kernels', 'read_bandwidth_tb_s', 'valid', 'command', 'rows'}
PARTS = {'attention', 'select', 'matmuls', 'sampling', 'cache_write', 'other'}


pytestmark = pytest.mark.usefixtures('in_the_repository')


def call(*arguments) -> int:
    return exit_code(bench_rollout.bench_rollout, arguments, workdir_required=False, define_flags=bench_rollout._flags)


def case(row) -> tuple:
    return tuple(row[name] for name in ('slots', 'cached_tokens', 'mode', 'pages_read'))


@pytest.mark.slow
def test_the_smoke_form_measures_every_case(tmp_path, capsys):
    """96 + 32 tokens in pages of 8, segments of 16 steps: half of the tokens, and as many as leave room for 8 more."""
    out = tmp_path / 'new' / 'bench.json'
    assert call(SMOKE, f'--out={out}') == 0
    written = json.loads(out.read_text())
    assert set(written) >= FACTS
    assert written['valid'] is True
    assert written['kernels'].startswith('reference (there are no kernels for cpu')
    rows = written['rows']
    assert [case(row) for row in rows] == [
        (4, 64, 'dense', 8),
        (4, 64, 'sparse', 4),
        (4, 120, 'dense', 15),
        (4, 120, 'sparse', 4),
    ]
    for row in rows:
        assert set(row) == FIELDS
        assert set(row['breakdown_ms']) == PARTS
        numbers = [value for name, value in row.items() if name not in ('model', 'mode', 'breakdown_ms')]
        assert all(math.isfinite(value) and value > 0 for value in numbers)
        parts = row['breakdown_ms']
        assert sum(parts.values()) == pytest.approx(row['ms_per_step'])
        assert all(parts[name] > 0 for name in ('attention', 'matmuls', 'sampling', 'cache_write'))
        assert (parts['select'] > 0) == (row['mode'] == 'sparse')
    shown = capsys.readouterr().out
    assert 'on a CPU the speeds mean nothing' in shown
    for row in rows:
        assert re.search(rf'^ +4 +{row["cached_tokens"]} +{row["mode"]} +{row["pages_read"]} ', shown, re.MULTILINE)
    assert not list(out.parent.glob('.*')), 'files left behind'


@pytest.fixture
def pretended(monkeypatch):
    """Times that are made up: 4 ms for the dense step, 1 ms for the sparse one. Set `after` to end the run there."""

    class Pretended:
        after = None
        measured = 0

    class Full:
        def __init__(self, engine, longest_tokens):
            assert engine.pool_pages * engine.rollout.page_tokens >= engine.slots_per_shard * longest_tokens

    def step_seconds(engine, *_):
        if Pretended.measured == Pretended.after:
            raise KeyboardInterrupt
        Pretended.measured += 1
        return 4e-3 if engine.schedule.kind == 'dense' else 1e-3

    others = {'matmuls': 3e-4, 'sampling': 1e-4, 'cache_write': 5e-5}
    monkeypatch.setattr(bench_rollout.memory, 'available_bytes', lambda _: None)
    monkeypatch.setattr(bench_rollout.Setup, 'random_weights', lambda *_: None)
    monkeypatch.setattr(bench_rollout, 'FullSlots', Full)
    monkeypatch.setattr(bench_rollout, 'step_seconds', step_seconds)
    monkeypatch.setattr(bench_rollout.StepParts, 'others', lambda *_: others)
    monkeypatch.setattr(bench_rollout.StepParts, 'reading', lambda *_: {'attention': 4e-4, 'select': 2e-4})
    return Pretended


@pytest.mark.usefixtures('pretended')
def test_the_figures_of_a_row_by_hand(tmp_path, capsys):
    """The 1.7B shape needs no checkpoint. 3,441,397,760 bytes of weights: 1,720,574,976 in two bytes, and two more for
    each of 123,904 norm scales. A page of 16 tokens has 8 * 16 * 2 * 128 * 2 bytes = 65,536, a landmark 2,048."""
    out = tmp_path / 'bench.json'
    assert call('--config=configs/qwen3_1p7b.py', '--slots=32', '--cached_tokens=30720', f'--out={out}') == 0
    written = json.loads(out.read_text())
    dense, few, many = written['rows']
    weights, page, landmark, pages = 3_441_397_760, 65_536, 2048, 1920
    read = {
        'dense': weights + 32 * 28 * pages * page,
        64: weights + 32 * (2 * pages * page + 26 * (64 * page + pages * landmark)),
        256: weights + 32 * (2 * pages * page + 26 * (256 * page + pages * landmark)),
    }
    assert [case(row) for row in (dense, few, many)] == [
        (32, 30_720, 'dense', pages),
        (32, 30_720, 'sparse', 64),
        (32, 30_720, 'sparse', 256),
    ]
    for row, size in zip((dense, few, many), read.values(), strict=True):
        assert row['limit_ms'] == pytest.approx(size / 4.3e9, rel=1e-9)
        assert row['fraction_of_limit'] == pytest.approx(row['limit_ms'] / row['ms_per_step'])
        assert row['read_bandwidth_tb_s'] == pytest.approx(size / row['ms_per_step'] / 1e9)
    assert (dense['ms_per_step'], few['ms_per_step']) == (4.0, 1.0)
    assert (dense['tokens_per_s'], few['tokens_per_s']) == (pytest.approx(8000), pytest.approx(32_000))
    assert (dense['speedup_over_dense'], few['speedup_over_dense'], many['speedup_over_dense']) == (1.0, 4.0, 4.0)
    assert few['breakdown_ms']['other'] == pytest.approx(1 - 0.4 - 0.2 - 0.3 - 0.1 - 0.05)
    assert few['model'] == 'qwen3 1.72B'
    assert written['dense_layers'] == [0, 1]
    assert re.search(
        r'^ +32 +30,720 +sparse +64 +1\.000 +32,000 +4\.246 +425% +18\.26 +4\.00 ', capsys.readouterr().out, re.M
    )


@pytest.mark.usefixtures('pretended')
def test_without_the_dense_sampler_nothing_is_compared(tmp_path):
    out = tmp_path / 'bench.json'
    assert call(SMOKE, '--modes=sparse', f'--out={out}') == 0
    assert [row['speedup_over_dense'] for row in json.loads(out.read_text())['rows']] == [None, None]


def test_an_interrupted_run_keeps_what_it_has(pretended, tmp_path):
    out = tmp_path / 'bench.json'
    out.write_text('{"rows": "of an earlier run"}')
    pretended.after = 3
    assert call(SMOKE, '--slots=2,4', f'--out={out}') == 130
    assert [case(row)[:3] for row in json.loads(out.read_text())['rows']] == [
        (2, 64, 'dense'),
        (2, 64, 'sparse'),
        (2, 120, 'dense'),
    ]


def test_an_embedding_that_is_no_head_is_not_read():
    setup = bench_rollout.make_setup(resolve(qwen3_8b.get_config('')))
    tied = dataclasses.replace(setup.shape, tie_embeddings=True)
    assert bench_rollout.weight_bytes(setup.shape, setup.dtype) == bench_rollout.weight_bytes(tied, setup.dtype)


def test_without_flags_the_usual_cases_that_the_configuration_has_room_for():
    setup = bench_rollout.make_setup(resolve(qwen3_8b.get_config('')))
    assert bench_rollout.read_grid(setup, '', '', 'sparse,dense', '') == bench_rollout.Grid(
        (16, 32), (16_384, 30_720), ('dense', 'sparse'), (64, 256)
    )


MISTAKES = {
    '--slots=many': 'must be whole numbers separated by commas',
    '--slots=2,0': 'must be positive$',
    '--slots=100000000': r'with --cached_tokens=120 needs about .* \(sampler weights .*, KV pool .*\), but only ',
    '--cached_tokens=64,7': 'must be 8 to 120; .* = 128',
    '--cached_tokens=121': 'must be 8 to 120; .* = 128',
    '--pages_read=2': r'must be 3 \(those that are always read\) to 8, the pages of 64 cached tokens',
    '--pages_read=9': r'must be 3 \(those that are always read\) to 8, the pages of 64 cached tokens',
    '--pages_read=1.5': 'must be whole numbers',
    '--modes=dense,fast': "'fast' is no mode",
    '--modes=': "'' is no mode",
    '--out={tmp}': 'Is a directory',
    '--out={tmp}/file/bench.json': 'File exists|Not a directory',
    '--workdir=w': 'this command takes none',
    '--beside=dense.json': 'give --lengths, too',
    '--learner=learner.json': 'give --lengths, too',
}


@pytest.mark.parametrize('flag', MISTAKES)
def test_a_mistake_is_one_sentence_before_anything_is_measured(flag, tmp_path, capsys):
    (tmp_path / 'file').touch()
    given = flag.format(tmp=tmp_path)
    assert call(SMOKE, f'--out={tmp_path}/bench.json', given) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.count('\n') == 1
    assert re.search(rf'^error: {given.split("=")[0]}=.*({MISTAKES[flag]})', captured.err.rstrip())
    assert [path.name for path in tmp_path.iterdir()] == ['file']
