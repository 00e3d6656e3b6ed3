"""Pictures and claims about alpha, from files whose right answers are known."""

import copy
import json

import numpy as np
import pytest

from sparrow_jax.analysis import alphas, costs, drift
from sparrow_jax.analysis.__main__ import PICTURES, _flags, analysis
from sparrow_jax.analysis.claims import FAILS, HOLDS, OPEN, markdown
from sparrow_jax.analysis.inputs import Lacking, read_calibrations, read_closed_loop
from sparrow_jax.calibrate.results import FILE, MEASURED
from sparrow_jax.json_files import without_nan
from sparrow_jax.report.logs import read_runs
from sparrow_jax.sparsity.calibration import Tokens
from tests.analysis.made_up_calibration import BUDGETS, FLOOR, LENGTHS, gap, write_calibration, write_closed_loop
from tests.report.made_up_run import CONFIG, row, write_run
from tests.tiny_run import exit_code

TARGETS = (0.86, 0.9)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return write_calibration(tmp_path_factory.mktemp('made_up') / 'plain')


@pytest.fixture(scope='module')
def source(folder):
    return read_calibrations(str(folder))[0]


def verdict(picture, numbers, claim):
    """What the summary says of a claim, by the beginning of its words."""
    line = next(
        line for line in markdown({picture: {'one': numbers}}, []).splitlines() if line.startswith(f'| {claim}')
    )
    return line.split(' | ')[3]


def test_p05_by_length_is_the_one_that_was_put_in(source):
    found = alphas.by_length(source, TARGETS)
    assert found['mean_length_of_bins'] == {length // 512: length for length in LENGTHS}
    for line, budget in zip(found['budgets'], [*BUDGETS, None], strict=True):
        assert line['budget_tokens'] == budget
        expected = [1 - (0.05 * (length / budget) ** 0.5 if budget else FLOOR) for length in LENGTHS]
        assert [b['p05'][0] for b in line['bins']] == pytest.approx(expected, abs=2e-3)
    assert [b['p05'][0] for b in found['floor']] == pytest.approx([1 - FLOOR] * 3, abs=1e-3)
    assert verdict('by_length', found, 'at a fixed budget p05 falls') == HOLDS
    flat = copy.deepcopy(found)
    flat['budgets'][0]['bins'].reverse()
    assert verdict('by_length', flat, 'at a fixed budget p05 falls') == FAILS


def test_budgets_grow_as_the_length_does(source):
    found = costs.budget_by_length(source, TARGETS)
    for target in TARGETS:
        at = found['targets'][f'{target:g}']
        # 1 - target = 0.05 sqrt(length / budget)
        expected = [length * (0.05 / (1 - target)) ** 2 for length in LENGTHS]
        assert [r['budget_tokens'][0] for r in at['bins']] == pytest.approx(expected, rel=0.06)
        assert at['exponent'][0] == pytest.approx(1, abs=0.06)
        for r in at['bins']:
            value, low, high = r['budget_tokens']
            assert low < value < high < 1.5 * low
    assert [e['eta'] for e in found['eta']] == pytest.approx([2] * 3, abs=0.3)
    assert verdict('budget_by_length', found, 'budgets must grow') == HOLDS
    assert verdict('budget_by_length', found, 'budget ~ ') == FAILS


def test_targets_outside_the_measured_budgets_are_said_to_be(source):
    found = costs.budget_by_length(source, (0.5, 0.9, 0.9999))['targets']
    why = lambda target: {r['why_not'] for r in found[target]['bins']}
    assert why('0.5') == {'the smallest measured budget reaches it'}
    assert why('0.9999') == {'the largest measured budget misses it'}
    assert why('0.9') == {None}
    with pytest.raises(Lacking, match='no target lies between measured budgets'):
        costs.budget_by_length(source, (0.9999,))


# 1 - p05 grows with this power of the page size, so that budgets grow with twice of it.
@pytest.mark.parametrize(('power', 'least', 'said'), [(0.3, 16, HOLDS), (-0.3, 64, FAILS)])
def test_the_page_size_that_reads_least(tmp_path, power, least, said):
    worse = lambda point, length: gap(point, length) * (point.page_tokens / 16) ** power
    budgets = (128, 256, 512, 1024, 2048)
    folder = write_calibration(tmp_path / 'pages', gap=worse, pages=(16, 64), budgets=budgets)
    [source] = read_calibrations(str(folder))
    found = costs.page_sizes(source, (0.9,))
    at = found['targets']['0.9']
    assert at['least'] == least
    assert verdict('page_sizes', found, 'pages of 16 beat') == said
    # Of 4,096 cached tokens 1,024 and 3 pages, in 8 of 10 layers; the landmark of a page is half a token.
    expected = {page: 0.2 + 0.8 * (1024 + 3 * page + 4096 / page / 2) / 4096 for page in (16, 64)}
    for curve in found['curves']:
        [point] = (p for p in curve['points'] if p['budget_tokens'] == 1024)
        assert point['bins'][-1]['share'] == pytest.approx(expected[curve['of']])


def test_a_single_page_size_or_policy_is_not_compared(source):
    with pytest.raises(Lacking, match=r'pages of 16 tokens alone; .* calibrate.page_tokens'):
        costs.page_sizes(source, TARGETS)
    with pytest.raises(Lacking, match=r'block_mean alone; .* calibrate.policies'):
        costs.policies(source, TARGETS)


def test_policies_by_their_draws_and_a_closed_loop_without(tmp_path):
    worse = lambda point, length: gap(point, length) * (1.5 if point.policy == 'group_softmax' else 1)
    folder = write_calibration(
        tmp_path / 'policies', gap=worse, policies=('block_mean', 'group_softmax'), budgets=BUDGETS[1::3]
    )
    found = costs.policies(read_calibrations(str(folder))[0], (0.88,))
    assert verdict('policies', found, '(ours) block_mean') == HOLDS
    [ratio] = (r['ratio'] for r in found['targets']['0.88']['ratios'] if r['of'] == 'block_mean')
    assert ratio[1] < ratio[0] < ratio[2] < 1
    file = write_closed_loop(tmp_path / 'loop.json', {'block_mean': {'0.9': 0.5}, 'quest': {'0.9': 0.4, '0.8': 0.3}})
    loop = costs.policies_of_loop(read_closed_loop(str(file)), ())
    assert [(name, at['least']) for name, at in loop['targets'].items()] == [('0.9', 'quest')]
    assert verdict('policies', without_nan(loop), '(ours) block_mean') == OPEN


def test_skew_of_a_known_beta_distribution(tmp_path):
    rng = np.random.default_rng(1)

    def tokens(point):
        # Six of ten tokens agree entirely, the others follow Beta(a, 2); a larger budget has a larger a.
        number = 8000
        alpha = 0.999 * rng.beta(point.budget_tokens / 32 or 90, 2, number)
        alpha[: number * 6 // 10] = 1
        rng.shuffle(alpha)
        return Tokens(alpha.astype(np.float32), alpha.astype(np.float32), np.full(number, 600), np.arange(number) % 4)

    [source] = read_calibrations(str(write_calibration(tmp_path / 'beta', tokens=tokens, budgets=(64, 128, 256))))
    found = alphas.skew(source, TARGETS)
    assert [b['budget_tokens'] for b in found['budgets']] == [64, 128, 256, None]
    for one in found['budgets'][:3]:
        a, whole = one['budget_tokens'] / 32, one['budget_tokens'] / 32 + 2
        assert one['share_above_0.999'] == pytest.approx(0.6, abs=0.01)
        assert one['tail']['a'] == pytest.approx(a, rel=0.15)
        assert one['tail']['variance'] == pytest.approx(2 * a / (whole**2 * (whole + 1)), rel=0.1)
        assert one['mean'][0] == pytest.approx(0.6 + 0.4 * 0.999 * a / whole, abs=0.01)
        assert sum(one['share_of_tokens']) == pytest.approx(1)
    for claim in ('most tokens', 'alpha below 0.999 follows', 'the tail is narrower'):
        assert verdict('skew', found, claim) == HOLDS
    # Its p05 moves less than four times as far as its mean.
    assert verdict('skew', found, 'the mean hardly') == FAILS


def test_estimate_and_floor(source):
    found = alphas.top20(source, TARGETS)
    for one in found['budgets']:
        assert one['alpha_p05'][0] - one['top20_p05'][0] == pytest.approx(0.1, abs=1e-4)
    assert found['share_of_tokens_above_exact'] == 0
    assert verdict('top20', found, 'alpha from 20') == HOLDS
    assert verdict('top20', found, '(ours) the estimate orders') == HOLDS
    # The estimate is 0.1 below alpha everywhere.
    assert all(c['gap_top20'][0] == pytest.approx(c['gap_exact'] + 0.1, rel=0.05) for c in found['at_exact_alpha'])
    floors = alphas.floor(source, TARGETS)['floors']
    assert set(floors) == {'dense sampler', 'pass over every page'}
    assert floors['dense sampler']['lost_of_p05'] == pytest.approx(FLOOR, abs=1e-3)
    assert floors['dense sampler']['share_of_what_a_target_allows']['0.9'] == pytest.approx(0.1, abs=0.01)


def run_of(folder, *, slope=0.0, noise=0.002, **schedule):
    rng = np.random.default_rng(0)
    bins = {f'sparse/alpha_p05/bin_{low}_{low + 2000}': 0.9 - low / 1e5 for low in (0, 2000, 4000)}
    rows = [
        row(
            step,
            **{'guard/acted': 0.0} | {n: p + slope * step + noise * rng.standard_normal() for n, p in bins.items()},
        )
        for step in range(1, 41)
    ]
    config = copy.deepcopy(CONFIG) | {'schedule': {'kind': 'fixed', 'budget_pages': 12} | schedule}
    [run] = read_runs([str(write_run(folder, rows=rows, config=config))])
    return run


@pytest.mark.parametrize(
    ('slope', 'noise', 'said'), [(0.0, 0.002, HOLDS), (0.001, 0.002, FAILS), (-0.001, 0.002, FAILS), (0.0, 0.1, OPEN)]
)
def test_drift_over_training(tmp_path, slope, noise, said):
    found = drift.training(run_of(tmp_path / 'run', slope=slope, noise=noise), ())
    assert len(found['bins']) == 3
    for one in found['bins']:
        assert one['change'][1] < 39 * slope < one['change'][2]
    assert found['drifts'] is (said == FAILS)
    assert ('p05 drifts over the run, in 3 of 3 bins' in found['says']) is (said == FAILS)
    assert verdict('training', found, 'p05 does not depend') == said


def test_budgets_that_move_say_nothing_of_drift(tmp_path):
    with pytest.raises(Lacking, match=r"schedule\.kind='adaptive', not a fixed budget"):
        drift.training(run_of(tmp_path / 'adaptive', kind='adaptive'), ())
    [guarded] = read_runs([str(write_run(tmp_path / 'guarded', config=CONFIG | {'schedule': {'kind': 'fixed'}}))])
    with pytest.raises(Lacking, match='changed its budgets at step 7'):
        drift.training(guarded, ())


def command(*arguments):
    options = {'config_required': False, 'workdir_required': False, 'uses_jax': False, 'define_flags': _flags}
    return exit_code(analysis, arguments, **options)


def test_the_command_draws_everything_that_it_can(tmp_path, capsys):
    both = {'pages': (8, 16), 'policies': ('block_mean', 'quest'), 'budgets': BUDGETS[1::3]}
    folder, out = write_calibration(tmp_path / 'made', **both), tmp_path / 'out'
    run_of(tmp_path / 'run')
    loop = write_closed_loop(tmp_path / 'loop.json', {'block_mean': {'0.9': 0.5}, 'quest': {'0.9': 0.4}})
    flags = [f'--calibration={folder}', f'--run={tmp_path / "run"}', f'--closed_loop={loop}', f'--out={out}']
    assert command(*flags) == 0
    wanted = {f'{name}.{kind}' for name in PICTURES for kind in ('png', 'json')} | {'summary.md'}
    assert {file.name for file in out.iterdir()} == wanted
    for name in PICTURES:
        assert (out / f'{name}.png').stat().st_size > 5_000
        found = json.loads((out / f'{name}.json').read_text())
        assert set(found) == {'training': {'run'}, 'policies': {'made', 'closed loop'}}.get(name, {'made'})
    assert (out / 'summary.md').read_text() in capsys.readouterr().out
    assert command(*flags) == 2
    assert 'is not empty' in capsys.readouterr().err


def test_what_is_left_out_is_said(folder, tmp_path, capsys):
    """A calibration of texts, with one page size, one policy, and a point that knows less than the others."""
    content = json.loads((folder / FILE).read_text()) | {'dense_floor': None}
    content['points'][2]['bins'][-1]['enough'] = False
    (tmp_path / FILE).write_text(json.dumps(content))
    (tmp_path / MEASURED).symlink_to(folder / MEASURED)
    out, name = tmp_path / 'out', tmp_path.name
    assert command(f'--calibration={tmp_path}', f'--out={out}') == 0
    said = capsys.readouterr()
    for sentence in (
        'training.png: not drawn, needs --run',
        f'page_sizes.png: without {name}, which has pages of 16 tokens alone',
        f'policies.png: without {name}, which has the policy block_mean alone',
    ):
        assert sentence in said.out + said.err
    assert not {'training.png', 'page_sizes.png', 'policies.json'} & {file.name for file in out.iterdir()}
    summary = (out / 'summary.md').read_text()
    assert '| not measured | needs page_sizes.png |' in summary
    assert '| not measured | no dense sampler |' in summary
    assert set(json.loads((out / 'floor.json').read_text())[name]['floors']) == {'pass over every page'}
    lines = json.loads((out / 'by_length.json').read_text())[name]['budgets']
    assert [line['budget_tokens'] for line in lines if len(line['bins']) < 3] == [BUDGETS[1]]


@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('', '--calibration: missing'),
        ('--calibration={tmp}/gone', 'no such folder'),
        ('--calibration={tmp}/half.json', 'is a file; give the folder of a calibration'),
        ('--calibration={tmp}', 'holds no calibration (no calibration.json)'),
        ('--calibration={tmp}/begun', 'has not ended'),
        ('--calibration={tmp}/half', 'not JSON'),
        ('--calibration={tmp}/other', 'is no file of python -m sparrow_jax.calibrate'),
        ('--calibration={tmp}/raw', 'needs the folder measured of the calibration'),
        ('--calibration={tmp}/torn', 'cannot be read'),
        ('--calibration={made},{made}', 'names a folder twice'),
        ('--calibration={made} --targets=high', 'must be numbers separated by commas'),
        ('--run={tmp}', 'holds no run'),
        ('--closed_loop={tmp}/gone.json', 'no such file'),
        ('--closed_loop={tmp}/half.json', 'not JSON'),
        ('--closed_loop={made}/calibration.json', 'is no file of python -m sparrow_jax.closed_loop'),
        ('--closed_loop={tmp}/lone.json', 'nothing can be drawn'),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(folder, tmp_path, capsys, flag, message):
    whole = (folder / FILE).read_text()
    (tmp_path / 'half.json').write_text('{"best": {')
    write_closed_loop(tmp_path / 'lone.json', {'quest': {'0.9': 0.4}})
    contents = {'begun': '{"settings": {}}', 'half': whole[: len(whole) // 2], 'other': '{"rows": []}'}
    for name, text in (contents | {'raw': whole, 'torn': whole}).items():
        (tmp_path / name / MEASURED).mkdir(parents=True)
        (tmp_path / name / FILE).write_text(text)
    for point in (folder / MEASURED).iterdir():
        (tmp_path / 'torn' / MEASURED / point.name).write_bytes(point.read_bytes()[:1000])
    out = tmp_path / 'out'
    assert command(*flag.format(tmp=tmp_path, made=folder).split(), f'--out={out}') == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count('\n') == 1
    assert not out.exists()
