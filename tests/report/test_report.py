"""Reports of made-up logs: what is read of them, what is not, and that the page holds no more than it should."""

import json
import re
import subprocess
import sys

import pytest
from made_up_run import CONFIG, lines, row, sample, write_run

from sparrow_jax import commands
from sparrow_jax.report import page, write_report
from sparrow_jax.report.__main__ import _flags, report
from sparrow_jax.report.figures import alpha_figures, figures
from sparrow_jax.report.headline import cards
from sparrow_jax.report.logs import read_runs


def data_of(file):
    """What the page's script draws."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', file.read_text('utf-8'), re.DOTALL)
    return json.loads(text)


def read(folder):
    [run] = read_runs([str(folder)])
    return run


def command(*arguments):
    """Exit code of the command with these arguments."""
    with pytest.raises(SystemExit) as exit_:
        commands.run(report, config_required=False, uses_jax=False, define_flags=_flags, argv=['report', *arguments])
    return exit_.value.code


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / 'first')


# ---------------------------------------------------------------------- what is shown


def test_the_command_writes_the_page_and_says_where(run, capsys):
    assert command(f'--workdir={run}') == 0
    assert f'wrote {run}/report.html (' in capsys.readouterr().out
    page = (run / 'report.html').read_text('utf-8')
    assert page.startswith('<!DOCTYPE html>')
    assert '<title>first · sparrow_jax</title>' in page
    assert not re.search(
        r'https?://(?!www\.w3\.org/2000/svg)', page
    )  # which names a kind of element and is never asked


def test_headline(run):
    facts = {card.title: card.facts[0] for card in cards([read(run)])}
    assert (facts['Held-out accuracy'].value, facts['Held-out accuracy'].detail) == (
        '0.800 ± 0.020',
        'after step 40, 256 problems; 0.300 after step 0',
    )
    assert facts['p05 of alpha'].value == f'{0.87 + 0.005 * (1 + 2 + 0 + 1 + 2 + 0 + 1 + 2 + 0 + 1) / 10:.4f}'
    assert facts['p05 of alpha'].verdict == 'good'
    assert facts['KV cache read'].value == '25.0%'
    assert facts['Sampling speed'].value == '21,000/s'
    assert facts['State'].detail == 'the guard doubled all budgets at step 7'
    assert 'Loss in training' not in facts  # of supervised training


def test_a_tail_under_the_target_is_said(tmp_path):
    low = write_run(tmp_path / 'low', rows=[row(step, **{'sparse/alpha_p05': 0.8}) for step in range(1, 5)])
    facts = {card.title: card.facts[0] for card in cards([read(low)])}
    assert facts['p05 of alpha'].verdict == 'bad'
    assert facts['p05 of alpha'].detail.startswith('below the target 0.86;')


def test_numbers_that_are_not_finite_are_said(tmp_path):
    rows = [row(step, **({'actor/grad_norm': None} if step in (5, 6) else {})) for step in range(1, 9)]
    facts = {card.title: card.facts[0] for card in cards([read(write_run(tmp_path / 'nan', rows=rows))])}
    assert facts['State'].detail == 'actor/grad_norm was not a finite number at steps 5 and 6'
    assert facts['State'].verdict == 'bad'


def test_p05_by_length_is_of_the_first_and_of_the_last_steps(tmp_path):
    name = 'sparse/alpha_p05/bin_2000_4000'
    run = read(write_run(tmp_path / 'run', rows=[row(step, **{name: 0.5 + step / 100}) for step in range(1, 41)]))
    lengths = figures([run], 600)['runs'][0]['lengths']
    assert lengths['bins'] == [[0, 2000], [2000, 4000], [4000, 6000]]
    assert (lengths['first_steps'], lengths['last_steps']) == ([1, 10], [31, 40])
    assert lengths['first'][1] == pytest.approx(0.5 + 5.5 / 100)
    assert lengths['last'][1] == pytest.approx(0.5 + 35.5 / 100)


def test_the_tail_is_drawn_with_its_beta_distribution(run):
    alpha = alpha_figures(read(run))
    assert alpha['steps'] == [21, 30]
    assert alpha['tokens'] == 40_000
    assert alpha['share'] == pytest.approx(0.3, abs=0.02)
    assert [alpha['a'], alpha['b']] == pytest.approx([4, 1], rel=0.1)
    assert alpha['ks'] < 0.03
    assert alpha['bars'] == pytest.approx(alpha['fit'], abs=0.02)
    assert sum(alpha['bars']) == pytest.approx(1, abs=1e-4)


def test_runs_are_laid_over_each_other(run, tmp_path):
    other = write_run(tmp_path / 'second', steps=20)
    assert command(f'--workdir={run},{other}', f'--out={tmp_path}/both.html') == 0
    drawn = data_of(tmp_path / 'both.html')['runs']
    assert [one['name'] for one in drawn] == ['first', 'second']
    assert [len(one['steps']) for one in drawn] == [41, 21]
    assert not (run / 'report.html').exists()
    # Without a file of its own it is the report of the first.
    assert write_report([run, other]) == run / 'report.html'


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / name / 'run', steps=2) for name in ('a', 'b')]
    assert [run.name for run in read_runs([str(folder) for folder in folders])] == ['a/run', 'b/run']


def test_a_comma_in_the_name_of_a_folder(tmp_path):
    assert command(f'--workdir={write_run(tmp_path / "a,b", steps=2)}') == 0
    assert (tmp_path / 'a,b/report.html').exists()


def test_of_several_evaluations_the_last_counts(run):
    rows = [
        {'step': 40, 'sampler': name, f'{name}/accuracy': value} for name, value in (('dense', 0.1), ('dense', 0.8))
    ]
    lines(run / 'evaluation.jsonl', rows)
    [evaluation] = figures([read(run)], 600)['runs'][0]['evaluations']
    assert evaluation == {'step': 40, 'sampler': 'dense', 'accuracy': 0.8, 'stderr': 0.0}


# ---------------------------------------------------------------------- logs as they come


def test_a_log_cut_in_the_middle_of_a_line_still_reports(run):
    for name in ('metrics.jsonl', 'samples.jsonl', 'alpha_histogram.jsonl'):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[:-30])
    found = read(run)
    assert found.steps[-1] == 39
    assert found.notes == ['The last line of metrics.jsonl was cut off and is left out.']
    assert list(found.samples.begins)[-1] == 40  # of two answers, the first
    assert len(found.samples.begins[40]) == 1
    assert list(found.histograms.begins)[-1] == 29
    assert 'was cut off and is left out' in write_report([run]).read_text('utf-8')


def test_steps_that_a_resumed_run_did_again_count_once(tmp_path):
    """Of 1 to 6, then 4 and 5 after a resume, the old 4, 5 and 6 are gone."""
    rows = [row(s, **{'critic/score/mean': 0.1}) for s in range(1, 7)]
    rows += [row(s, **{'critic/score/mean': 0.9}) for s in (4, 5)]
    samples = [sample(s, completion='old') for s in range(1, 7) for _ in 'ab']
    samples += [sample(s, completion='new') for s in (4, 5) for _ in 'ab']
    [drawn] = figures([read(write_run(tmp_path / 'run', rows=rows, samples=samples))], 600)['runs']
    assert drawn['steps'] == [[s, s] for s in range(1, 6)]
    assert drawn['series']['critic/score/mean']['v'] == [0.1, 0.1, 0.1, 0.9, 0.9]
    assert [(s['step'], s['completion']) for s in drawn['samples']][-6:] == [(3, 'old')] * 2 + [(4, 'new')] * 2 + [
        (5, 'new')
    ] * 2


def test_lines_that_are_no_rows_are_counted_and_left_out(tmp_path):
    odd = ['', '[1, 2]', '{"step": -1}', '{"step": true}', '{"no": "step"}', '\x00\x00', '{"step": ' + '9' * 30 + '}']
    found = read(write_run(tmp_path / 'run', rows=[row(1), *odd, row(2)]))
    assert found.steps.tolist() == [1, 2]
    assert found.notes == [f'{len(odd)} lines of metrics.jsonl are no rows of a run and were left out.']


def test_values_of_any_kind_do_no_harm(tmp_path):
    odd = {'text': 'x', 'flag': True, 'list': [1], 'large': 10**400, 'infinite': float('inf'), '</script><b>': 1.5}
    settings = {'steps': '9', 'phase': ['rl'], 'controller': {'target_p05': float('nan')}, 'guard': 3, 'schedule': None}
    folder = write_run(tmp_path / 'run', rows=[row(1, **odd), row(2)], config=settings)
    lines(folder / 'alpha_histogram.jsonl', [{'step': 1, 'tokens': 'many'}, {'step': 2, 'tokens': [1, 2]}])
    lines(folder / 'evaluation.jsonl', [{'step': 1, 'sampler': ['?']}, {'step': 1, 'sampler': 'x', 'x/accuracy': 'y'}])
    drawn = data_of(write_report([folder]))['runs'][0]
    assert {'text', 'flag', 'list'} & drawn['series'].keys() == set()
    assert drawn['series']['large']['v'] == drawn['series']['infinite']['v'] == [None, None]
    assert drawn['alpha'] is None


def test_without_config_and_answers_there_is_a_report_that_says_so(tmp_path):
    folder = write_run(tmp_path / 'bare', steps=3, config=None)
    (folder / 'samples.jsonl').unlink()
    (folder / 'alpha_histogram.jsonl').unlink()
    assert (
        'Without a readable config.json the target and the settings are unknown.' in write_report([folder]).read_text()
    )


def test_a_single_step_is_enough(tmp_path):
    assert data_of(write_report([write_run(tmp_path / 'run', rows=[row(1)], samples=[])]))['runs'][0]['steps'] == [
        [1, 1]
    ]


def test_texts_of_a_model_cannot_leave_their_place(tmp_path):
    evil = '</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>\u2028\x00'
    samples = [sample(1, prompt=evil, completion=evil, answer=evil, finish_reason=evil)]
    config = CONFIG | {'model': {'path': evil}}
    folder = write_run(tmp_path / 'run', steps=1, samples=samples, config=config)
    with open(folder / 'samples.jsonl', 'a') as file:
        file.write('{"step": 1, "prompt": "\\ud800 alone", "completion": "x", "answer": "", "reward": NaN}\n')
    text = write_report([folder]).read_text('utf-8')
    assert '<script>alert' not in text
    assert '<img' not in text
    assert text.count('</script>') == 2  # the data's and the page's own
    first, second = data_of(folder / 'report.html')['runs'][0]['samples']
    assert first['completion'] == evil
    assert (second['prompt'], second['reward']) == ('? alone', None)


# ---------------------------------------------------------------------- size


def test_a_long_run_is_drawn_in_few_points_between_extremes(tmp_path):
    rows = [row(step, **{'critic/score/mean': float(step == 777)}) for step in range(1, 1801)]
    folder = write_run(tmp_path / 'long', rows=rows, samples=[])
    drawn = data_of(write_report([folder]))
    series = drawn['runs'][0]['series']['critic/score/mean']
    assert drawn['width'] == 5
    assert len(series['v']) == 361  # buckets begin at multiples of five
    place = drawn['runs'][0]['steps'].index([775, 779])
    assert [series[part][place] for part in ('v', 'lo', 'hi')] == [0.2, 0, 1]
    # An evaluation of 30 s every ten steps.
    assert drawn['runs'][0]['series']['timing_s/testing']['v'][:4] == [0, 0, 6, 0]
    assert 'Curves show means over 5 steps' in (folder / 'report.html').read_text('utf-8')


def test_the_page_stays_small_whatever_the_logs(tmp_path, monkeypatch):
    """Runs with many more metrics and long answers of characters that take three bytes each."""
    assert page.MOST_BYTES <= 3_000_000
    monkeypatch.setattr(page, 'MOST_BYTES', 400_000)
    names = [f'extra/number_{i}' for i in range(60)]
    samples = [sample(step, completion='数' * 30_000) for step in range(1, 31)]
    rows = [row(step, **{name: step / 7 for name in names}) for step in range(1, 601, 3)]
    folders = [write_run(tmp_path / f'run_{i}', rows=rows, samples=samples) for i in range(3)]
    file = write_report(folders)
    assert 100_000 < file.stat().st_size <= 400_000
    drawn = data_of(file)
    assert drawn['width'] > 4
    assert all(one['series'].keys() >= set(names) for one in drawn['runs'])
    assert '26,000 characters left out' in drawn['runs'][0]['samples'][0]['completion']


# ---------------------------------------------------------------------- mistakes


def mistake(kind, folder):
    if kind == 'missing':
        return f'--workdir={folder}/none', f'--workdir={folder}/none: no such folder; give the folder of a run'
    if kind == 'file':
        (folder / 'file').write_text('')
        return f'--workdir={folder}/file', f'--workdir={folder}/file: is a file; give the folder of a run'
    if kind == 'no run':
        return f'--workdir={folder}', f'--workdir={folder}: holds no run (no metrics.jsonl); give the folder of a run'
    if kind == 'begun':
        (folder / 'config.json').write_text('{}')
        return f'--workdir={folder}', f'--workdir={folder}: has no metrics.jsonl yet; wait for its first step'
    if kind == 'empty log':
        (folder / 'metrics.jsonl').write_text('')
        wait = 'wait for the first, or give another --workdir'
        return f'--workdir={folder}', f'{folder}/metrics.jsonl: holds no step yet; {wait}'
    run = write_run(folder / 'run', steps=1)
    return {
        'twice': (f'--workdir={run},{run}/', f'--workdir: names {run} twice; give every run once'),
        'one missing': (
            f'--workdir={run},{folder}/none',
            f'--workdir={folder}/none: no such folder; give the folder of a run',
        ),
        'too many': (f'--workdir={",".join([str(run)] * 9)}', '--workdir: names 9 runs; a report can show 8'),
        'nothing': ('--workdir=,', '--workdir=,: names no folder; give that of a run'),
        'config': ('--config=configs/tiny.py', '--config: this command reads the configuration of --workdir; leave'),
        'out': (
            (f'--workdir={run}', f'--out={folder}/none/x.html'),
            f'--out={folder}/none/x.html: there is no folder {folder}/none; make it first',
        ),
        'out is a folder': ((f'--workdir={run}', f'--out={folder}'), f'--out={folder}: is a folder; give a file'),
    }[kind]


@pytest.mark.parametrize(
    'kind',
    [
        *('missing', 'file', 'no run', 'begun', 'empty log', 'twice', 'one missing', 'too many', 'nothing', 'config'),
        *('out', 'out is a folder'),
    ],
)
def test_a_mistake_is_one_sentence_and_writes_nothing(kind, tmp_path, capsys):
    arguments, words = mistake(kind, tmp_path)
    assert command(*([arguments] if isinstance(arguments, str) else arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: {words}')
    assert error.count('\n') == 1
    assert not list(tmp_path.rglob('*.html'))


def test_it_needs_no_jax(run):
    code = (
        'import sys; from sparrow_jax.report import write_report; '
        f'write_report([{str(run)!r}]); sys.exit(bool({{"jax", "tensorboardX"}} & set(sys.modules)))'
    )
    assert subprocess.run([sys.executable, '-c', code], check=False).returncode == 0
