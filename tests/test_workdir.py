"""A work directory takes up its own run, refuses everything else before anything is written, and has one writer."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap

import pytest

from configs import base
from sparrow_jax import console
from sparrow_jax import workdir as workdir_module
from sparrow_jax.config import ConfigError, RunConfig, resolve, to_json
from sparrow_jax.workdir import Workdir, empty_folder, results_folder, write_atomically


def make_run(**changes) -> RunConfig:
    config = base.get_config()
    config.model.path = 'weights'
    config.update_from_flattened_dict(changes)
    return resolve(config)


def contents(folder):
    """Every file's text, the lock file aside (it names the last holder)."""
    return {p.name: p.read_text() for p in folder.rglob('*') if p.is_file() and p.name != '.lock'}


def test_a_new_run_writes_its_configuration_and_the_same_run_resumes(tmp_path):
    run = make_run()
    with Workdir.open(str(tmp_path / 'a/b'), run, 'train') as workdir:
        assert not workdir.resumed
        assert workdir.path == tmp_path / 'a/b'
        assert resolve(json.loads(workdir.config_file.read_text())) == run
    before = contents(tmp_path / 'a/b')
    with Workdir.open(str(tmp_path / 'a/b'), run, 'train') as workdir:
        assert workdir.resumed
    assert contents(tmp_path / 'a/b') == before
    reader, stored = Workdir.existing(str(tmp_path / 'a/b'))
    assert stored == run
    assert reader.metrics_file == tmp_path / 'a/b/metrics.jsonl'


def start_with_a_result(folder) -> None:
    with Workdir.open(str(folder), make_run(), 'train') as workdir:
        workdir.metrics_file.write_text('{"step": 0}\n')


def test_another_configuration_is_refused_with_its_differences(tmp_path):
    start_with_a_result(tmp_path)
    before = contents(tmp_path)
    other = make_run(**{'optimizer.learning_rate': 2e-6, 'seed': 5, 'steps': 7})
    with pytest.raises(ConfigError) as caught:
        Workdir.open(str(tmp_path), other, 'train')
    assert '\n  optimizer.learning_rate: 1e-06 -> 2e-06\n  seed: 0 -> 5' in str(caught.value)
    assert 'steps' not in str(caught.value)
    assert contents(tmp_path) == before


def test_a_start_that_failed_on_a_setting_may_be_mended(tmp_path):
    mended = make_run(**{'reward.function': 'rewards:length'})
    with Workdir.open(str(tmp_path), make_run(**{'reward.function': 'rewrads:length'}), 'train') as workdir:
        workdir.metrics_file.touch()
        workdir.checkpoints.mkdir()
    with Workdir.open(str(tmp_path), mended, 'train') as workdir:
        assert not workdir.resumed
        assert workdir.config_file.read_text() == to_json(mended)
        (workdir.checkpoints / '1').mkdir()
    with pytest.raises(ConfigError, match='belongs to another configuration'):
        Workdir.open(str(tmp_path), make_run(), 'train')


def test_what_no_step_depends_on_may_change_and_is_stored(tmp_path):
    Workdir.open(str(tmp_path), make_run(), 'train').close()
    longer = make_run(**{'steps': 500, 'log.samples_per_step': 1, 'checkpoint.keep': 9, 'parallel.fsdp': 2})
    with Workdir.open(str(tmp_path), longer, 'train') as workdir:
        assert workdir.resumed
        assert workdir.config_file.read_text() == to_json(longer)


def test_a_command_may_allow_other_differences_without_storing_them(tmp_path):
    start_with_a_result(tmp_path)
    before = contents(tmp_path)
    sampled = make_run(**{'evaluate.samples': 8})
    with Workdir.open(str(tmp_path), sampled, 'evaluate', may_change=('evaluate',)) as workdir:
        assert workdir.resumed
    assert contents(tmp_path) == before
    with pytest.raises(ConfigError, match=r'seed: 0 -> 1'):
        Workdir.open(str(tmp_path), make_run(seed=1), 'evaluate', may_change=('evaluate',))


def test_fields_that_came_after_a_run_are_filled_in_and_said(tmp_path, capsys, monkeypatch):
    """By those who only read with the defaults, where it goes on with what its own configuration says today."""
    monkeypatch.setattr(console, '_told', set())
    run = make_run(**{'rollout.halvings': 0})
    with Workdir.open(str(tmp_path), run, 'train') as workdir:
        workdir.metrics_file.write_text('{"step": 0}\n')
    stored = json.loads((tmp_path / 'config.json').read_text())
    del stored['rollout']['halvings'], stored['guard']
    (tmp_path / 'config.json').write_text(json.dumps(stored))
    assert Workdir.existing(str(tmp_path))[1] == make_run()
    said = capsys.readouterr().err
    assert 'of an earlier version, which had no guard={' in said
    assert 'rollout.halvings=4' in said
    with Workdir.open(str(tmp_path), run, 'train') as workdir:
        assert workdir.resumed
    assert 'rollout.halvings=0' in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match=r'rollout.halvings: 0 -> 4\nthese flags undo them: --config.rollout.halvings=0$'
    ):
        Workdir.open(str(tmp_path), make_run(), 'train')


@pytest.mark.parametrize(
    ('text', 'what'),
    [
        ('{"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}', 'there is no field architectures'),
        ('{}', 'it has no model or no rollout'),
    ],
)
def test_the_folder_of_a_checkpoint_is_left_alone(text, what, tmp_path):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ConfigError, match=rf'is not the configuration of a run \({what}\); give another --workdir'):
        Workdir.open(str(tmp_path), make_run(), 'train')
    assert contents(tmp_path) == {'config.json': text}


@pytest.mark.parametrize(
    ('path', 'words'),
    [
        ('', '--workdir: missing'),
        ('gs://bucket/run', 'must be a local or mounted folder'),
        ('{tmp}/file', 'is a file; give a folder'),
        ('{tmp}/file/below', 'is a file; give a folder'),
        ('{tmp}/full', r'holds something else \(thesis\.txt, no config\.json\)'),
        ('/proc/1/run', 'cannot write there'),
    ],
)
def test_folders_that_cannot_be_the_run_s_are_left_alone(path, words, tmp_path):
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full/thesis.txt').write_text('mine too')
    before = sorted(tmp_path.rglob('*'))
    with pytest.raises(ConfigError, match=words):
        Workdir.open(path.format(tmp=tmp_path), make_run(), 'train')
    assert sorted(tmp_path.rglob('*')) == before
    assert (tmp_path / 'full/thesis.txt').read_text() == 'mine too'


@pytest.mark.skipif(os.geteuid() == 0, reason='root may write everywhere')
def test_a_folder_without_permission_is_refused(tmp_path):
    (tmp_path / 'locked').mkdir(mode=stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ConfigError, match=r'cannot write there \(Permission denied\)'):
        Workdir.open(str(tmp_path / 'locked'), make_run(), 'train')


@pytest.mark.parametrize('text', ['', '{"seed": ', '[1]'])
def test_a_spoiled_configuration_is_named_not_replaced(text, tmp_path):
    (tmp_path / 'config.json').write_text(text)
    with pytest.raises(ConfigError, match=r'config\.json: '):
        Workdir.open(str(tmp_path), make_run(), 'train')
    assert contents(tmp_path) == {'config.json': text}


def test_reading_needs_an_earlier_run(tmp_path):
    with pytest.raises(ConfigError, match=r'no config\.json there'):
        Workdir.existing(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_one_writer_at_a_time_also_within_a_process(tmp_path):
    run = make_run()
    with Workdir.open(str(tmp_path), run, 'train'):
        with pytest.raises(ConfigError, match='in use by this process'):
            Workdir.open(str(tmp_path), run, 'train')
        Workdir.existing(str(tmp_path))
        with Workdir.open(str(tmp_path), run, 'train', primary=False) as other:
            assert not other.primary
    Workdir.open(str(tmp_path), run, 'train').close()


HOLDER = """
    import multiprocessing, sys, time
    from sparrow_jax.config import resolve
    from sparrow_jax.workdir import Workdir
    from configs import base
    config = base.get_config()
    config.model.path = 'weights'
    workdir = Workdir.open(sys.argv[1], resolve(config), 'train')
    worker = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,))
    worker.start()
    print(worker.pid, flush=True)
    time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_ends_even_by_a_kill(tmp_path):
    command = [sys.executable, '-c', textwrap.dedent(HOLDER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=rf'in use by train, process {holder.pid} on '):
                Workdir.open(str(tmp_path), make_run(), 'train')
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            os.kill(worker, 0)  # its worker is still alive, and must not keep the lock
            Workdir.open(str(tmp_path), make_run(), 'train').close()
        finally:
            os.kill(worker, signal.SIGKILL)
            holder.kill()


def test_a_start_killed_before_its_configuration_was_whole_begins_anew(tmp_path):
    (tmp_path / '.lock').write_text('train, process 1 on x\n')
    (tmp_path / '.config.json.1').write_text('{"se')
    with Workdir.open(str(tmp_path), make_run(), 'train') as workdir:
        assert not workdir.resumed


def test_a_failed_write_leaves_the_old_text(tmp_path, monkeypatch):
    file = tmp_path / 'config.json'
    write_atomically(file, 'old')
    monkeypatch.setattr(
        workdir_module.os, 'fsync', lambda _: (_ for _ in ()).throw(OSError(28, 'No space left on device'))
    )
    with pytest.raises(OSError, match='No space left'):
        write_atomically(file, 'new')
    assert contents(tmp_path) == {'config.json': 'old'}


def test_results_go_into_a_run_s_folder_even_while_it_trains_or_into_a_new_one(tmp_path):
    with Workdir.open(str(tmp_path / 'run'), make_run(), 'train'):
        assert results_folder(str(tmp_path / 'run')) == tmp_path / 'run'
    new = results_folder(str(tmp_path / 'new'))
    assert list(new.iterdir()) == []
    (new / 'evaluation.jsonl').write_text('{}\n')
    assert results_folder(str(new)) == new
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine/thesis.txt').write_text('')
    with pytest.raises(ConfigError, match='holds something else'):
        results_folder(str(tmp_path / 'mine'))


def test_an_output_folder_must_be_new_or_empty(tmp_path):
    assert empty_folder(str(tmp_path / 'a/b'), '--out') == tmp_path / 'a/b'
    assert empty_folder(str(tmp_path / 'a/b'), '--out').is_dir()
    with pytest.raises(ConfigError, match=r'--out=.*a: is not empty'):
        empty_folder(str(tmp_path / 'a'), '--out')
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=r'--out=.*file: is a file'):
        empty_folder(str(tmp_path / 'file'), '--out')
    with pytest.raises(ConfigError, match=r'--out=.*cannot be written'):
        empty_folder(str(tmp_path / 'file/below'), '--out')


def test_a_folder_that_cannot_be_written_is_refused_though_it_exists(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'access', lambda *_: False)  # root may write everywhere
    for refused in (lambda: results_folder(str(tmp_path)), lambda: empty_folder(str(tmp_path), '--out')):
        with pytest.raises(ConfigError, match=r'cannot be written \(no permission, or read-only\)'):
            refused()


def test_a_home_folder_of_nobody_is_refused():
    with pytest.raises(ConfigError, match=r'--workdir=~no_such_user/x: no such user'):
        results_folder('~no_such_user/x')
    with pytest.raises(ConfigError, match=r'--out=~no_such_user/x: no such user'):
        empty_folder('~no_such_user/x', '--out')
