"""The comparison of runs, on logs of runs that never were."""

import copy
import json

import numpy as np
import pytest

from sparrow_jax.compare_runs import _flags, compare_runs
from sparrow_jax.report.logs import read_runs
from sparrow_jax.run_outcomes import auc, differing_settings, outcomes, rank
from tests.report.made_up_run import CONFIG, row, write_run
from tests.tiny_run import exit_code

# schedule, p05, mean alpha, final accuracy, final length
ARMS = {
    'dense': ({'kind': 'dense'}, 0.999, 0.9999, 0.9, 1300),
    'fixed_4': ({'kind': 'fixed', 'budget_pages': 4}, 0.30, 0.970, 0.3, 280),
    'fixed_12': ({'kind': 'fixed', 'budget_pages': 12}, 0.75, 0.980, 0.6, 900),
    'fixed_40': ({'kind': 'fixed', 'budget_pages': 40}, 0.95, 0.975, 0.88, 1290),
}


def write(folder, arm, seed, *, accuracy=None, length=None, **config):
    schedule, p05, mean, last_accuracy, last_length = ARMS[arm]
    settings = copy.deepcopy(CONFIG) | {'seed': seed, 'schedule': schedule} | config
    last_accuracy, last_length = accuracy or last_accuracy, length or last_length
    rows = []
    for step in range(41):
        more = {}
        if step:
            more = {
                'sparse/alpha_p05': p05 + 0.001 * seed,
                'sparse/alpha_p05/bin_0_2000': p05 + 0.02,
                'sparse/alpha_p05/bin_2000_4000': p05 - 0.01,
                'sparse/alpha_p05/bin_4000_6000': float('nan') if step < 3 else p05,
                'sparse/alpha_mean': mean,
                'response_length/mean': 500 + (last_length - 500) * (step >= 10),
            }
        if step % 10 == 0:
            more['val/accuracy'] = 0.3 + (last_accuracy - 0.3) * step / 40
        rows.append(row(step, **more))
    return write_run(folder / f'{arm}_{seed}', rows=rows, config=settings)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    for arm in ARMS:
        for seed in (0, 1):
            write(folder, arm, seed)
    return folder


def read(folder):
    return read_runs(sorted(map(str, folder.glob('*_*'))))


def test_outcomes_of_every_run(folder):
    found = outcomes(read(folder), margin=0.05)
    assert [(one.arm, one.seed) for one in found] == [
        (arm, seed) for arm in ('dense', 'fixed 4', 'fixed 12', 'fixed 40') for seed in (0, 1)
    ]
    assert [one.stable for one in found] == [True, True, False, False, False, False, True, True]
    one = found[2]
    assert (one.accuracy_first, one.accuracy_last, one.length_first, one.length_last) == (0.3, 0.3, 500, 280)
    assert one.measures == pytest.approx({'p05': 0.30, 'worst bin': 0.29, 'mean': 0.970})
    assert (one.kv_read_fraction, one.pages_read, one.rollout_s) == pytest.approx((0.25, 80, 8))


def test_a_run_whose_responses_shrank_is_not_stable(folder, tmp_path):
    runs = read_runs([str(folder / 'dense_0'), str(write(tmp_path, 'fixed_40', 7, length=640))])
    assert [one.stable for one in outcomes(runs, margin=0.05)] == [True, False]


def test_rankings_leave_dense_runs_out(folder):
    p05, worst, mean = rank(outcomes(read(folder), margin=0.05))
    assert (p05.measure, p05.auc, worst.auc) == ('p05', 1.0, 1.0)
    # 0.975 is above 0.970 and below 0.980.
    assert mean.auc == 0.5
    assert p05.interval == (1.0, 1.0)
    assert (mean.interval[0], mean.interval[1]) == (0.0, 1.0)
    assert p05.accuracy > 0.9 > mean.accuracy


def test_auc_by_hand():
    stable = np.asarray([True, True, False, False])
    assert auc(np.asarray([0.9, 0.5, 0.5, 0.1]), stable) == (1 + 1 + 0.5 + 1) / 4
    assert np.isnan(auc(np.asarray([0.9, 0.5]), np.asarray([True, True])))


def test_settings_that_should_not_differ(folder, tmp_path):
    other = write(tmp_path, 'fixed_4', 5, steps=80, guard={'action': 'stop'})
    assert differing_settings(read(folder)) == []
    assert differing_settings([*read(folder), *read_runs([str(other)])]) == ['guard.action', 'steps']


def command(*arguments):
    options = {'config_required': False, 'workdir_required': False, 'uses_jax': False, 'define_flags': _flags}
    return exit_code(compare_runs, arguments, **options)


def test_the_command_writes_table_picture_and_numbers(folder, tmp_path, capsys):
    out = tmp_path / 'out'
    assert command(f'--runs={folder}/dense_*,{folder}/fixed_*', f'--out={out}') == 0
    text = (out / 'comparison.md').read_text()
    assert '| fixed 4 | 2 | 0 / 2 |' in text
    assert '| 0.300 → 0.880 ± 0.000 | 500 → 1290 |' in text
    assert '4 of 6 sparse runs are not' in text
    assert '6 others are 3 arms' in text
    assert text.splitlines()[0] in capsys.readouterr().out
    facts = json.loads((out / 'comparison.json').read_text())
    assert [one['auc'] for one in facts['rankings']] == [1.0, 1.0, 0.5]
    assert (out / 'comparison.png').stat().st_size > 10_000


def test_one_seed_and_runs_that_all_came_out_alike(folder, tmp_path):
    out = tmp_path / 'out'
    assert command(f'--runs={folder}/dense_0,{folder}/fixed_40_1', f'--out={out}') == 0
    text = (out / 'comparison.md').read_text()
    assert 'All sparse runs came out alike' in text
    assert '| p05 | - | - | - | - |' in text


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['--runs={folder}/fixed_*'], 'none of them has a dense sampler'),
        (['--runs={folder}/dense_0'], 'names 1 runs; a comparison needs at least two'),
        (['--runs={folder}/none_*,{folder}/dense_0'], 'matches no folder'),
        (['--runs={folder}/dense_0,{folder}/gone'], 'gone: no such folder'),
        (['--runs={folder}/dense_*', '--margin=2'], '--margin=2.0: must be from 0 to below 1'),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(folder, tmp_path, capsys, arguments, message):
    out = tmp_path / 'out'
    assert command(*(one.format(folder=folder) for one in arguments), f'--out={out}') == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_same_arm_and_seed_twice(folder, tmp_path):
    again = write(tmp_path, 'dense', 0)
    runs = read_runs([str(folder / 'dense_0'), str(again)])
    with pytest.raises(ValueError, match='names two runs of dense with seed 0'):
        outcomes(runs, margin=0.05)
