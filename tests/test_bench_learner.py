"""bench_learner from its command line: the smoke run, its FLOPs by hand, mistakes."""

import json
import math

import pytest
from tiny_run import exit_code

from sparrow_jax import bench_learner, commands
from sparrow_jax.bench_setup import make_setup
from sparrow_jax.config import resolve

SMOKE = '--config=configs/qwen3_1p7b.py:smoke'

pytestmark = pytest.mark.usefixtures('in_the_repository')


def call(*arguments) -> int:
    return exit_code(bench_learner.bench_learner, arguments, workdir_required=False, define_flags=bench_learner._flags)


@pytest.mark.slow
def test_the_smoke_form_measures_every_part(tmp_path, capsys):
    out = tmp_path / 'new' / 'bench.json'
    assert call(SMOKE, f'--out={out}') == 0
    [row] = json.loads(out.read_text())['rows']
    assert (row['row_tokens'], row['rows'], row['pages_read'], row['microbatches_a_step']) == (128, 2, 8, 2)
    times = row['ms']
    assert set(times) == {*bench_learner.PLAIN, *bench_learner.ADAPTER}
    assert all(math.isfinite(value) and value > 0 for value in times.values())
    parts = row['adapter_gradients_ms']
    assert set(parts) == set(bench_learner.PARTS)
    assert sum(parts.values()) == pytest.approx(times['adapter gradients'])
    plain = 2 * (times['scoring'] + times['gradients']) + times['optimizer update']
    adapter = 2 * times['adapter gradients'] + times['adapter update']
    assert row['times_plain'] == pytest.approx(1 + adapter / plain)
    assert 'on a CPU the speeds mean nothing' in capsys.readouterr().out


def test_flops_by_hand():
    """Two layers of width 64 with 4 and 2 heads of 16, feed-forward 128, vocabulary 512; one row of 128 tokens, of
    which 16 are the prompt's; the second layer reads 8 pages of 8 tokens."""
    run = resolve(commands.load_config('configs/qwen3_1p7b.py:smoke', ['--config.distill.enabled=True']))
    setup = make_setup(run)
    run = bench_learner._run_of(setup, 128)
    flops = bench_learner.program_flops(setup, run, rows=1, row_tokens=128, pages_read=8)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    norms = 2 * (2 * 64 + 2 * 16) + 64
    layers, head = 2 * 128 * (2 * layer + norms), 2 * 128 * 512 * 64
    dense = 4 * 64 * 128 * 128 / 2
    assert flops['scoring']['done'] == layers + head + 2 * dense
    assert flops['gradients']['useful'] == 3 * (layers + head + 2 * dense)
    assert flops['gradients']['done'] == 3 * (layers + 2 * dense) + 4 * head  # the smoke form recomputes the head alone
    sparse = 4 * 64 * (16 * 16 / 2 + sum(min(t, 64) for t in range(16, 128)))
    factors = 2 * 4 * (3 * 64 + 64 + 2 * 32 + 64 + 64 + 2 * (64 + 128) + 128 + 64)
    expected = 3 * (layers + head + dense + sparse) + 2 * dense + 3 * 2 * 128 * factors
    assert flops['adapter gradients']['done'] == expected


MISTAKES = {
    ('--row_tokens=100',): '--row_tokens=100: must be a multiple of 128',
    ('--row_tokens=128,x',): '--row_tokens=128,x: must be whole numbers',
    ('--row_tokens=1280',): 'at most the 256 positions',
    ('--pages_read=1',): '--pages_read=1: must be 3 (those that are always read) to 16',
    ('--workdir=w',): '--workdir=w: this command takes none',
    ('--out=setup.cfg/x.json',): '--out=setup.cfg/x.json: ',
    ('--config.schedule.kind=dense',): "schedule.kind='dense': distill.enabled=True teaches",
    ('--config.distill.rank=100',): 'distill.rank=100: is above the smaller side of',
}


@pytest.mark.parametrize('flags', MISTAKES)
def test_a_mistake_is_an_error_before_anything_is_compiled(flags, capsys):
    assert call(SMOKE, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith('error: ')
    assert MISTAKES[flags] in captured.err
