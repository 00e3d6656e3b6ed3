"""plan from its command line; what it predicts where it was fitted; its bytes beside the arrays of an engine."""

import dataclasses
import re
import subprocess
import sys

import jax
import pytest
from tiny_run import ROOT, exit_code

from sparrow_jax import chips, commands, memory, plan
from sparrow_jax.bench_setup import make_setup
from sparrow_jax.config import resolve
from sparrow_jax.rollout.engine import Engine, Probing
from sparrow_jax.sparsity.controller import Control

QWEN = '--config=configs/qwen3_1p7b.py'
POOL = '--config.rollout.pool_pages=39936'
ONE = {'data': 1, 'fsdp': 1, 'tensor': 1}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in chips._SHARE_SETTINGS:
        monkeypatch.delenv(name, raising=False)


def call(*arguments) -> int:
    return exit_code(plan.plan, arguments, workdir_required=False, define_flags=plan._flags)


def predicted(chip='h200', mesh_sizes=ONE, lengths=(32_768,), **fields):
    run = resolve(commands.load_config('configs/qwen3_1p7b.py', [f'--config.{n}={v}' for n, v in fields.items()]))
    setup = make_setup(run)
    return plan.predict(run, setup.shape, setup.schedule, chips.CHIPS[chip], mesh_sizes, lengths)


def test_a_step_takes_what_was_measured_where_the_model_was_fitted():
    """16 sequences, 32K cached, 61 + 3 pages: 3.24 ms, 2.61 of them for reading; and the bytes by hand."""
    fields = {'schedule.kind': 'fixed', 'schedule.budget_pages': 61, 'rollout.slots': 16}
    [step] = predicted(**fields)
    page, landmark = 65_536, 2048
    assert step.sparse_bytes == 3_441_397_760 + 16 * (2 * 2048 * page + 26 * (64 * page + 2048 * landmark))
    assert step.dense_bytes == 3_441_397_760 + 16 * 28 * 2048 * page
    assert step.pages_read == 64
    assert step.sparse_limit_s == pytest.approx(2.61e-3, rel=0.005)
    assert step.sparse_s == pytest.approx(3.24e-3, rel=0.005)
    assert step.dense_s == pytest.approx(step.dense_bytes / 4.3e12 + 28 * chips.H200_DENSE_LAYER_OVERHEAD_S)


def test_the_mesh_divides_slots_and_heads():
    [whole], [split] = predicted(), predicted(mesh_sizes={'data': 2, 'fsdp': 1, 'tensor': 2})
    weights = 3_441_397_760
    assert split.sparse_bytes - weights // 2 == (whole.sparse_bytes - weights) // 4


def test_a_dense_schedule_gains_nothing():
    [step] = predicted(**{'schedule.kind': 'dense'})
    assert (step.sparse_bytes, step.sparse_s) == (step.dense_bytes, step.dense_s)


def test_a_layer_that_chooses_pages_may_lose_more_than_a_dense_one():
    chip = dataclasses.replace(chips.CHIPS['h200'], dense_layer_overhead_s=1.0, sparse_layer_overhead_s=10.0)
    assert chip.step_seconds(int(4.3e12), 2, 3) == pytest.approx(33.0)


def test_the_memory_that_jax_takes_can_be_set(monkeypatch):
    chip = chips.CHIPS['h200']
    assert chip.available_bytes == 0.75 * chip.memory_bytes
    monkeypatch.setenv('XLA_CLIENT_MEM_FRACTION', '0.5')
    assert chip.available_bytes == 0.5 * chip.memory_bytes
    assert chips.CHIPS['v5p'].available_bytes == chips.CHIPS['v5p'].memory_bytes


@pytest.mark.parametrize(
    'fields',
    [
        {},
        {'model.compute_dtype': 'bfloat16', 'rollout.pool_pages': 40, 'rollout.slots': 3},
        {'schedule.policy': 'quest', 'rollout.max_response_tokens': 100},
        {'schedule.kind': 'adaptive', 'rollout.slots': 7},
    ],
)
def test_the_bytes_are_those_of_the_engine_s_arrays(fields):
    overrides = [f'--config.{name}={value}' for name, value in fields.items()]
    run = resolve(commands.load_config('configs/qwen3_1p7b.py:smoke', overrides))
    setup = make_setup(run)
    adaptive = setup.schedule.kind == 'adaptive'
    control = Control(0.86, setup.schedule.bin_width_tokens, 40, 10, reserved_pages=setup.schedule.reserved_pages)
    engine = Engine(
        setup.graphdef,
        setup.shape,
        setup.mesh,
        run.rollout,
        setup.schedule,
        (0,),
        run.model.compute_dtype,
        Probing(control, run.controller.probes) if adaptive else None,
    )
    cache, slots = engine.functions.fresh(True)()
    size = lambda arrays: sum(array.nbytes for array in jax.tree.leaves(arrays))
    parts = memory.estimate(run, setup.shape, ONE, 'cpu')
    within = lambda name, arrays: size(arrays) == pytest.approx(parts[name], rel=0.03)
    assert within('rollout: KV pool', cache.pages)
    assert within('rollout: landmarks', cache.landmarks)
    assert within('rollout: hidden states', slots.hidden_BTD)
    assert size(slots) - slots.hidden_BTD.nbytes == pytest.approx(parts['rollout: slots'], rel=0.03)
    assert within('sampler weights', setup.random_weights(engine))


def test_a_plan_is_printed_whole(capsys, monkeypatch):
    monkeypatch.setenv('XLA_CLIENT_MEM_FRACTION', '0.95')
    assert call(QWEN, POOL, '--cached_tokens=16384,32768') == 0
    shown = capsys.readouterr().out
    assert re.search(r'^  rollout: KV pool +68\.2 GiB$', shown, re.MULTILINE)
    assert re.search(r'the KV pool has 39,936 pages of 16 tokens, 638,976 tokens, 16\.0 sequences', shown)
    assert 'takes the memory that is left' not in shown
    rows = [line.split() for line in shown.splitlines() if re.match(r' +(16,384|32,768) ', line)]
    assert [row[0] for row in rows] == ['16,384', '32,768']
    for cached, dense, dense_limit, _, sparse, sparse_limit, speedup, best in rows:
        assert cached
        assert float(speedup) == pytest.approx(float(dense) / float(sparse), abs=0.01)
        assert float(best) == pytest.approx(float(dense_limit) / float(sparse_limit), abs=0.01)
    assert [row[3] for row in rows] == ['224', '256']


def test_a_pool_that_is_not_given_takes_what_is_left(capsys, monkeypatch):
    monkeypatch.setenv('XLA_CLIENT_MEM_FRACTION', '0.6')
    assert call(QWEN, '--config.rollout.pool_pages=0') == 0
    shown = capsys.readouterr().out
    [pages] = re.findall(r'rollout\.pool_pages=0: the pool takes the memory that is left, ([\d,]+) pages', shown)
    assert f'the KV pool has {pages} pages' in shown
    assert 0 < int(pages.replace(',', '')) < 39_936


def test_a_run_that_does_not_fit_is_shown_with_its_parts(capsys):
    assert call(QWEN, POOL, '--chip=v6e') == plan.NO_FIT
    shown = capsys.readouterr().out
    assert 'warning: this run does not fit' in shown
    assert 'rollout: KV pool' in shown


MISTAKES = {
    ('--chip=h300',): '--chip=h300: is not known; there are h200, h100, v5e, v5p, v6e, tpu7x',
    ('--devices=0',): '--devices=0: must be at least 1',
    ('--devices=3', '--config.parallel.tensor=2'): 'must multiply to the 3 devices',
    ('--devices=3',): 'rollout.slots=32: must be a multiple of the 3 data shards',
    ('--cached_tokens=1,x',): '--cached_tokens=1,x: must be whole numbers separated by commas',
    ('--cached_tokens=0',): '--cached_tokens=0: must be 1 to 39936',
    ('--cached_tokens=39937',): '--cached_tokens=39937: must be 1 to 39936',
    ('--workdir=w',): '--workdir=w: this command takes none',
    ('--config.rollout.pool_pages=0', '--config.rollout.slots=4096'): 'the pool could have 0 pages, one longest ',
}


@pytest.mark.parametrize('flags', MISTAKES)
def test_a_mistake_is_an_error_and_nothing_is_planned(flags, capsys):
    assert call(QWEN, *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith('error: ')
    assert MISTAKES[flags] in captured.err


def test_it_runs_as_a_module_without_an_accelerator():
    """JAX_PLATFORMS names one that is not there."""
    command = [sys.executable, '-m', 'sparrow_jax.plan', '--config=configs/qwen3_1p7b.py:smoke']
    done = subprocess.run(command, capture_output=True, text=True, env={'JAX_PLATFORMS': 'cuda', 'HOME': '/'}, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert 'A decode step of 4 slots, predicted' in done.stdout
