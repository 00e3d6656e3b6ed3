"""closed_loop from its command line: the smoke form, going on, mistakes, and how a step is judged."""

import dataclasses
import json

import numpy as np
import pytest
from tiny_run import exit_code

from sparrow_jax import closed_loop, commands
from sparrow_jax.closed_loop_steps import Steps
from sparrow_jax.config import resolve
from sparrow_jax.sparsity.schedules import load_schedule

CONFIG = 'configs/smollm2_long.py:smoke'
SMOKE = f'--config={CONFIG}'


pytestmark = pytest.mark.usefixtures('in_the_repository')


def call(*arguments) -> int:
    return exit_code(closed_loop.closed_loop, arguments, workdir_required=False, define_flags=closed_loop._flags)


def written(folder):
    return json.loads((folder / 'closed_loop.json').read_text())


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Everything of one target at once."""
    folder = tmp_path_factory.mktemp('whole')
    assert call(SMOKE, f'--out={folder}', '--targets=0.93', '--number=2', '--part=offline,closed') == 0
    return folder


def without_times(steps):
    return [{k: v for k, v in step.items() if k not in ('sampling_s', 'scoring_s', 'probe_overhead')} for step in steps]


@pytest.mark.slow
def test_the_smoke_form_measures_everything(whole):
    data = written(whole)
    points = data['offline']['block_mean']
    assert [point['name'] for point in points[:3]] == ['4 pages', '8 pages', '16 pages']
    assert set(data['closed']) == {'0.93/config', '0.93/small', '0.93/large'}
    best = data['best']['block_mean']['0.93']
    for loop in data['closed'].values():
        assert [step['step'] for step in loop['steps']] == [1, 2]
        for step in loop['steps']:
            assert sum(step['tokens']) == 4 * 31  # four responses of 32, the first token is prefill's
            assert step['probe_overhead'] > 0
    small, large = (data['closed'][f'0.93/{start}']['steps'][0]['budget_pages_before'] for start in ('small', 'large'))
    np.testing.assert_array_equal(small, np.maximum(np.asarray(best['budget_pages']) // 8, 1))
    np.testing.assert_array_equal(large, np.minimum(np.asarray(best['budget_pages']) * 8, data['facts']['most_pages']))
    assert (whole / 'closed_loop.png').stat().st_size > 10_000
    assert '<svg' in (whole / 'closed_loop.svg').read_text()
    # The schedule that it leaves behind is one that a run can take.
    run = resolve(commands.load_config(CONFIG, [f'--config.schedule.path={whole}/schedule_block_mean_0.93.json']))
    schedule = load_schedule(dataclasses.replace(run.schedule, kind='file'), run.rollout, 2)
    assert list(schedule.budget_pages) == best['budget_pages']


@pytest.mark.slow
def test_what_a_schedule_reads_is_known_without_a_rollout(whole):
    steps = Steps(resolve(commands.load_config(CONFIG)))
    for point in written(whole)['offline']['block_mean']:
        assert steps.read_fraction(np.asarray(point['budget_pages'])) == pytest.approx(point['kv_read_fraction'])


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(whole, tmp_path, capsys):
    common = SMOKE, f'--out={tmp_path}', '--targets=0.93', '--part=closed', '--starts=config'
    assert call(*common, '--number=1') == 0
    assert call(*common, '--number=2') == 0
    loop, of_whole = (written(folder)['closed']['0.93/config'] for folder in (tmp_path, whole))
    assert without_times(loop['steps']) == without_times(of_whole['steps'])
    assert loop['controller'] == of_whole['controller']
    assert call(*common, '--number=3', '--minutes=0.0001') == 0
    assert 'the same command goes on from here' in capsys.readouterr().out
    assert len(written(tmp_path)['closed']['0.93/config']['steps']) == 2
    assert call(*common[:-1], '--starts=small') == 2
    assert '--starts=small: no best budgets for 0.93 yet; run --part=offline first' in capsys.readouterr().err
    assert call(*common, '--config.seed=1') == 2
    assert 'was begun with another configuration (seed: 0 -> 1); give another folder' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('--part=online',), "--part=online: 'online' is none of offline, closed, policies"),
        (('--starts=far',), "--starts=far: 'far' is none of config, small, large"),
        (('--targets=0.9,1.2',), '--targets=0.9,1.2: must be between 0 and 1'),
        (('--targets=high',), '--targets=high: must be numbers separated by commas'),
        (('--number=0',), '--number=0: must be at least 1'),
        (('--minutes=-1',), '--minutes=-1.0: must be positive, or 0 for no limit'),
        (('--workdir=W',), '--workdir=W: this command takes none; --out names its folder'),
        (('--config.schedule.kind=fixed',), "schedule.kind='fixed': it is the controller that is measured"),
    ],
)
def test_mistakes(arguments, message, tmp_path, capsys):
    assert call(SMOKE, f'--out={tmp_path}/new', *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'new').exists()


def test_the_farthest_bin_is_judged():
    step = {'p05': [0.99, 0.85, 0.91, None], 'at_least': [True, False, False, False], 'at_most': [False] * 4}
    assert closed_loop.farthest(step, 0.9) == pytest.approx(-0.05)
    dense = step | {'at_most': [False, True, False, False]}
    assert closed_loop.farthest(dense, 0.9) == pytest.approx(0.01)
