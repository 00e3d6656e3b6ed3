"""plan from its command line; what it predicts where it was fitted; its bytes beside the arrays of an engine."""

import dataclasses
import json
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from tiny_run import ROOT, exit_code

from sparrow_jax import chips, commands, console, memory, plan, plan_rollout
from sparrow_jax.bench_setup import make_setup
from sparrow_jax.config import resolve
from sparrow_jax.rollout.engine import Engine, Probing
from sparrow_jax.sparsity.controller import Control
from sparrow_jax.sparsity.schedules import EVERY_PAGE
from sparrow_jax.whole_rollout import Lengths

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
    ('--chip=h300',): '--chip=h300: is not known; there are h200, h100, a100, b200, v4, v5e, v5p, v6e, tpu7x',
    ('--devices=0',): '--devices=0: must be at least 1',
    ('--devices=3', '--config.parallel.tensor=2'): 'must multiply to the 3 devices',
    ('--devices=3',): 'rollout.slots=32: must be a multiple of the 3 data shards',
    ('--cached_tokens=1,x',): '--cached_tokens=1,x: must be whole numbers separated by commas',
    ('--cached_tokens=0',): '--cached_tokens=0: must be 1 to 39936',
    ('--cached_tokens=39937',): '--cached_tokens=39937: must be 1 to 39936',
    ('--workdir=w',): '--workdir=w: this command takes none',
    ('--target=1.2',): '--target=1.2: must be between 0 and 1',
    ('--lengths=absent.json',): '--lengths=absent.json: no such file',
    ('--calibration=absent.json',): '--calibration=absent.json: no such file',
    ('--calibration=docs/measurements/rollout_lengths.json',): 'is no finished calibration; give the calibration.json',
    ('--plot=absent/plan.png',): '--plot=absent/plan.png: there is no such folder',
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


def small(**fields):
    """The smoke form: 4 responses of at most 32 tokens on 4 slots, 2 layers of which one is dense, pages of 8."""
    return resolve(
        commands.load_config('configs/qwen3_1p7b.py:smoke', [f'--config.{n}={v}' for n, v in fields.items()])
    )


def test_a_rollout_is_its_reads_and_the_time_of_its_layers():
    """Responses of 3 and 50 tokens (cut at 32) after 40: by hand, token by token."""
    run, chip = small(), chips.CHIPS['h200']
    setup = make_setup(run)
    lengths = Lengths(40, (3, 50))
    assert plan_rollout.responses_of(run, lengths).tolist() == [3, 32, 3, 32]
    seen = plan_rollout.forecast(run, setup.shape, setup.schedule, chip, ONE, lengths)
    page, landmark = 2 * 8 * 2 * 16 * 4, 2 * 16 * 4  # bytes of a layer: two KV heads of 16 in float32
    steps = [n for response in (3, 32, 3, 32) for n in range(41, 40 + response)]
    pages = lambda n: -(-n // 8)
    cache = sum((pages(n) + min(pages(n), 2 + 3)) * page + n // 8 * landmark for n in steps)
    assert seen.cache_s == pytest.approx(cache / chip.read_bytes_per_s)
    assert seen.layers_s == pytest.approx(31 * (chips.H200_DENSE_LAYER_OVERHEAD_S + chips.H200_SPARSE_LAYER_OVERHEAD_S))
    assert seen.kv_read_fraction == pytest.approx(cache / (2 * page * sum(map(pages, steps))))
    # Two data shards have half the responses each, and half the products.
    half = plan_rollout.forecast(run, setup.shape, setup.schedule, chip, ONE | {'data': 2}, lengths)
    assert half.cache_s == pytest.approx(seen.cache_s / 2)
    assert half.learner_s == pytest.approx(seen.learner_s / 2)


def test_products_by_hand():
    run = small(**{'model.remat': True})
    shape = make_setup(run).shape
    tokens, prompt = 42.0, 40.0
    forward = lambda n: 2 * shape.parameter_count() * n + 2 * 2 * 4 * 16 * n**2
    flops = plan_rollout.learner_flops(run, shape, np.asarray([2, 2]), 40)
    # Two prompts; scoring, and an update of forward, twice that backward, and the layers once more.
    assert flops == pytest.approx(2 * forward(prompt) + 2 * 5 * forward(tokens))


def test_published_tables_that_hold_the_target_are_compared(capsys, tmp_path):
    """Those of p05 0.88 and more hold 0.87; of these the least one reads least."""
    assert call(QWEN, POOL, '--target=0.87', f'--plot={tmp_path}/plan.png', '--chip=h200', '--devices=8') in (0, 1)
    shown = capsys.readouterr().out
    assert 'published, p05 0.75 (top-20)' in shown
    assert 'best at p05 0.87: published, p05 0.88 (top-20), pages of 16 tokens, budgets ' in shown
    assert (tmp_path / 'plan.png').stat().st_size > 10_000


def calibration(target, chosen):
    bin_ = lambda low: {'enough': True, 'alpha': {'p05': [low + 0.01, low, low + 0.02]}}
    points = [
        {'policy': 'block_mean', 'page_tokens': page, 'budget_tokens': budget, 'every_page': False, 'bins': [bin_(low)]}
        for page, budget, low in ((16, 256, 0.8), (16, 512, 0.9), (32, 256, 0.7), (32, 512, 0.8))
    ]
    fields = {'bin_width_tokens': 2000, 'reserved_first_pages': 1, 'reserved_last_pages': 2, 'dense_layers': [0, 1]}
    named = {
        f'{page}.json': fields | {'page_tokens': page, 'budget_pages': budgets, 'policy': 'block_mean'}
        for page, budgets in chosen
    }
    return {
        'settings': {'model': 'weights/Qwen3-1.7B'},
        'facts': {'target_p05': target},
        'points': points,
        'chosen': [
            {'file': f'{page}.json', 'policy': 'block_mean', 'page_tokens': page, 'missed_bins': [], 'unmet_bins': []}
            for page, _ in chosen
        ],
        'schedules': named,
    }


def test_a_calibration_gives_its_schedules_and_those_of_another_target(tmp_path):
    run = resolve(commands.load_config('configs/qwen3_1p7b.py'))
    shape, file = make_setup(run).shape, tmp_path / 'calibration.json'
    file.write_text(json.dumps(calibration(0.86, [(16, [32, 40]), (32, [9])])))
    found = plan_rollout.candidates(run, shape, str(file), 0.86)[2:]
    assert [(c.schedule.page_tokens, c.schedule.budget_pages, c.holds) for c in found] == [
        (16, (32, 40), True),
        (32, (9,), True),
    ]
    found = plan_rollout.candidates(run, shape, str(file), 0.78)[2:]
    assert [(c.schedule.page_tokens, c.schedule.budget_pages, c.holds) for c in found] == [
        (16, (16,), True),
        (32, (16,), True),
    ]
    # No budget of 32-token pages reaches 0.85: every page is read.
    budgets = [c.schedule.budget_pages for c in plan_rollout.candidates(run, shape, str(file), 0.85)[2:]]
    assert budgets == [(32,), (EVERY_PAGE,)]


def test_a_calibration_of_another_model_is_refused_and_a_short_one_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(console, '_told', set())
    file = tmp_path / 'calibration.json'
    file.write_text(json.dumps(calibration(0.86, [(16, [32, 40])])))
    assert call(QWEN, f'--calibration={file}') == 0
    assert 'measured up to 4,000 cached tokens; beyond, up to 39,936, its last budget' in ' '.join(
        ''.join(capsys.readouterr()).split()
    )
    other = calibration(0.86, [(16, [32, 40])]) | {'settings': {'model': 'weights/other'}}
    file.write_text(json.dumps(other))
    assert call(QWEN, f'--calibration={file}') == 2
    assert 'is of weights/other, the plan of weights/Qwen3-1.7B; give one of this model' in capsys.readouterr().err


def test_the_best_schedule_may_be_none_at_all():
    forecast = lambda cache_s: plan_rollout.Forecast(0.5, cache_s, 1.0, 1.0, 1.0)
    schedule = make_setup(small()).schedule
    candidate = lambda name, holds: plan_rollout.Candidate(name, schedule, holds)
    last = lambda *found: plan_rollout.lines([(candidate('dense', True), forecast(4.0)), *found], 0.9)[-1]
    assert last((candidate('fast', False), forecast(1.0))).startswith('no schedule here is known to hold p05 at 0.9')
    assert last((candidate('slow', True), forecast(5.0))).startswith('best at p05 0.9: the dense sampler')
    best = last((candidate('wide', True), forecast(2.0)), (candidate('tight', True), forecast(1.0)))
    assert best.startswith('best at p05 0.9: tight, pages of 8 tokens')
    assert best.endswith('2.00 times the rollouts, 1.75 times the steps')
