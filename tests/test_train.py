"""Whole training runs of a tiny random model: what they log, that they repeat, and that they go on after any end."""

import json
import shutil
import signal

import numpy as np
import pytest
from tiny_run import (
    ROOT,
    TinyRuns,
    assert_same_run,
    contents,
    newest_checkpoint,
    rows_of,
    same_everywhere,
)

from sparrow_jax import commands, trainer
from sparrow_jax.assembly import assemble, load_policy
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.metrics import read_rows
from sparrow_jax.sparsity.tail import CELLS, gap_edges
from sparrow_jax.train import STOPPED_BY_GUARD, _report, train
from sparrow_jax.workdir import Workdir

pytestmark = pytest.mark.slow

CONTRACT = (
    *('critic/score/mean', 'actor/pg_loss', 'actor/ppo_kl', 'actor/entropy', 'actor/grad_norm'),
    *('response_length/mean', 'response_length/clip_ratio', 'rollout_corr/kl'),
    *('sparse/alpha_p05', 'sparse/alpha_p05_top20', 'sparse/alpha_floor_p05', 'sparse/alpha_mean'),
    *('sparse/alpha_p05/bin_0_64', 'sparse/alpha_p05/bin_64_128'),
    *('sparse/budget_pages/mean', 'sparse/kv_read_fraction'),
    *('timing_s/gen', 'timing_s/reward', 'timing_s/old_log_prob', 'timing_s/update_actor', 'timing_s/step'),
    *('perf/throughput', 'perf/total_num_tokens', 'compile/count'),
)

# Steps 1 and 4 of `whole` (float32 on a CPU). A change that moves them changes what training computes: write in the
# log why before writing new numbers here. A new reasoning-gym may bring other problems, and thereby other numbers.
GOLDEN = {
    1: {
        'critic/score/mean': 0.63355,
        'response_length/mean': 50.25,
        'actor/pg_loss': 0.03141,
        'actor/entropy': 5.72644,
        'actor/grad_norm': 0.99811,
        'rollout_corr/kl': 0.01982,
        'sparse/alpha_p05': 0.84129,
        'sparse/alpha_p05_top20': 0.13496,
        'sparse/alpha_mean': 0.93569,
        'sparse/kv_read_fraction': 0.86814,
    },
    4: {
        'critic/score/mean': 0.60186,
        'response_length/mean': 64.0,
        'actor/pg_loss': -0.00207,
        'actor/entropy': 5.70279,
        'actor/grad_norm': 0.72413,
        'rollout_corr/kl': 0.02222,
        'sparse/alpha_p05': 0.87076,
        'sparse/alpha_p05_top20': 0.14914,
        'sparse/alpha_mean': 0.94051,
        'sparse/kv_read_fraction': 0.85298,
    },
}


@pytest.fixture(scope='module', autouse=True)
def in_the_repository():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        yield


@pytest.fixture(scope='module')
def runs(tmp_path_factory, data_cache, compile_cache):
    return TinyRuns(tmp_path_factory.mktemp('runs'), data_cache, compile_cache)


@pytest.fixture(scope='module')
def whole(runs):
    """The work directory of an undisturbed run."""
    return runs.train('whole')


# ---------------------------------------------------------------------- what a run logs


def test_every_number_of_the_contract_is_logged_and_finite(whole):
    rows = rows_of(whole)
    assert [row['step'] for row in rows] == list(range(13))
    for row in rows[1:]:
        assert [name for name in CONTRACT if name not in row] == []
        assert [name for name, value in row.items() if not np.isfinite(value)] == []
    assert [row['step'] for row in rows if 'val/accuracy' in row] == [0, 2, 4, 6, 8, 10, 12]
    for row in rows[1:]:
        assert 0 < row['sparse/alpha_p05'] <= row['sparse/alpha_mean'] <= 1
        assert row['sparse/alpha_p05_top20'] <= row['sparse/alpha_p05']
        assert row['sparse/alpha_floor_p05'] > 0.9999
        assert 0.5 < row['sparse/kv_read_fraction'] < 1
        assert 0 < row['actor/entropy'] < np.log(512)
        assert row['actor/grad_norm'] > 0
        assert 0 < row['critic/score/mean'] < 1


def test_nothing_is_compiled_after_the_warm_up(whole):
    rows = rows_of(whole)
    assert rows[0]['compile/count'] > 10
    assert [row['compile/count'] for row in rows[1:]] == [0] * 12


def test_answers_are_kept_beside_the_numbers(whole):
    answers = read_rows(whole / 'samples.jsonl')
    assert [answer['step'] for answer in answers] == [step for step in range(1, 13) for _ in range(8)]
    scores = {row['step']: row['critic/score/mean'] for row in rows_of(whole)[1:]}
    for step, score in scores.items():
        rewards = [answer['reward'] for answer in answers if answer['step'] == step]
        assert np.mean(rewards) == pytest.approx(score)
        assert len({answer['prompt'] for answer in answers if answer['step'] == step}) == 4


def test_histograms_of_alpha_agree_with_the_numbers(whole):
    rows, histograms = rows_of(whole)[1:], read_rows(whole / 'alpha_histogram.jsonl')
    assert [h['step'] for h in histograms] == [row['step'] for row in rows]
    edges = gap_edges()
    for row, histogram in zip(rows, histograms, strict=True):
        tokens_X = np.asarray(histogram['tokens'])
        assert tokens_X.sum() == 8 * (row['response_length/mean'] - 1)  # of 8 answers all but the first token
        cell = CELLS - 1 - np.argmax(np.cumsum(tokens_X[::-1]) > np.floor(0.05 * (tokens_X.sum() - 1)))
        assert 1 - edges[cell + 1] - 1e-6 <= row['sparse/alpha_p05'] <= 1 - edges[cell] + 1e-6


def test_it_ends_with_a_report(whole):
    assert '<title>whole · sparrow_jax</title>' in (whole / 'report.html').read_text('utf-8')


def test_a_run_does_not_fail_for_its_report(runs, whole, tmp_path, capsys, monkeypatch):
    shutil.copytree(whole, tmp_path / 'copy')
    (tmp_path / 'copy/report.html').unlink()
    monkeypatch.setattr('sparrow_jax.report.page.MOST_BYTES', 10)
    with Workdir.open(str(tmp_path / 'copy'), runs.config({}), 'train') as workdir, Console() as console:
        _report(console, workdir)
    assert 'warning: no report was written (the logs have too many different metrics' in capsys.readouterr().out
    assert not (tmp_path / 'copy/report.html').exists()


def test_golden_metrics(whole):
    rows = {row['step']: row for row in rows_of(whole)}
    measured = {step: {name: rows[step][name] for name in values} for step, values in GOLDEN.items()}
    assert measured == {step: pytest.approx(values, rel=1e-3, abs=1e-3) for step, values in GOLDEN.items()}


# ---------------------------------------------------------------------- what the settings do


def test_a_dense_sampler_and_no_learning_leave_every_ratio_at_one(runs, whole):
    """The temperature means the same in sampler and learner, and no token is compared with its neighbour."""
    workdir = runs.train(
        'dense',
        {
            'steps': 2,
            'schedule.kind': 'dense',
            'rollout.temperature': 0.6,
            'optimizer.learning_rate': 0.0,
            'learner.updates_per_step': 2,
        },
    )
    for row in rows_of(workdir)[1:]:
        assert row['actor/ratio_mean'] == pytest.approx(1, abs=1e-6)
        assert row['actor/ppo_kl'] == pytest.approx(0, abs=1e-6)
        assert row['rollout_corr/rollout_is_mean'] == pytest.approx(1, abs=1e-5)
        assert row['rollout_corr/rollout_is_max'] == pytest.approx(1, abs=1e-4)
        assert row['rollout_corr/kl'] == pytest.approx(0, abs=1e-5)
        assert row['sparse/alpha_p05'] > 0.9999
        assert row['sparse/kv_read_fraction'] == 1
        assert row['actor/grad_norm'] > 0
        assert row['compile/count'] == 0
    # The same numbers do move where the sampler is sparse.
    assert all(row['rollout_corr/rollout_is_max'] > 1.2 for row in rows_of(whole)[1:])


def test_several_updates_of_a_step_keep_groups_whole(runs, monkeypatch):
    updates = []
    split = trainer.micro_batches

    def spy(samples, layout):
        updates.append(samples)
        return split(samples, layout)

    monkeypatch.setattr(trainer, 'micro_batches', spy)
    workdir = runs.train('updates', {'steps': 2, 'learner.updates_per_step': 2, 'mismatch.floor_every_steps': 0})
    assert [len(samples) for samples in updates] == [4, 4, 4, 4]
    for samples in updates:
        for first, second in (samples[:2], samples[2:]):
            np.testing.assert_array_equal(first.prompt_ids, second.prompt_ids)
            assert first.advantage == pytest.approx(-second.advantage, rel=1e-2)
            assert first.advantage != 0
    for row in rows_of(workdir)[1:]:
        assert abs(row['actor/ratio_mean'] - 1) > 1e-6  # the second update meets weights that the first one moved
        assert 'sparse/alpha_floor_p05' not in row
        assert row['compile/count'] == 0
    assert newest_checkpoint(workdir)[1]['updates'] == 4


def test_distance_to_the_start_policy_also_after_a_resume(runs):
    changes = {
        'learner.kl_coef': 0.1,
        'mismatch.every_steps': 2,
        'mismatch.floor_every_steps': 3,
        'evaluate.every_steps': 1,
        'evaluate.temperature': 1.0,
        'evaluate.samples': 2,
    }
    whole = runs.train('kl', changes | {'steps': 4})
    rows = rows_of(whole)
    assert rows[1]['actor/kl_loss'] == pytest.approx(0, abs=1e-9)
    assert all(row['actor/kl_loss'] > 1e-5 for row in rows[2:])
    assert [row['step'] for row in rows if 'sparse/alpha_p05' in row] == [2, 4]
    assert [row['step'] for row in rows if 'sparse/alpha_floor_p05' in row] == [1, 3]
    assert all({'val/pass@1', 'val/pass@2'} < row.keys() for row in rows)
    assert [row['compile/count'] for row in rows[1:]] == [0] * 4
    # The start policy is read again, not taken from the checkpoint.
    runs.train('kl_resumed', changes | {'steps': 2})
    assert_same_run(runs.train('kl_resumed', changes | {'steps': 4}), whole)


PPO = {
    'learner.advantage': 'gae',
    'learner.updates_per_step': 2,
    'learner.kl_coef': 0.1,
    'learner.kl_placement': 'reward',
    'critic.kind': 'trunk',
    'critic.learning_rate': 1e-2,
    'critic.passes': 2,
    'critic.warmup_steps': 1,
}


def test_a_critic_learns_first_alone_and_resumes_exactly(runs):
    whole = runs.train('ppo', PPO | {'steps': 4})
    rows = rows_of(whole)
    assert 'actor/pg_loss' not in rows[1]
    assert rows[2]['actor/reward_kl_penalty'] == pytest.approx(0, abs=1e-6)  # the policy has not moved before
    assert all(abs(row['actor/reward_kl_penalty']) > 1e-5 for row in rows[3:])
    assert rows[1]['critic/values/mean'] == 0
    # No KL yet, and gamma and lambda are 1: what follows each token is its response's score.
    assert rows[1]['critic/returns/mean'] == pytest.approx(rows[1]['critic/score/mean'], abs=0.1)
    assert all(row['critic/values/max'] > row['critic/values/min'] for row in rows[2:])
    losses = [row['critic/vf_loss'] for row in rows[1:]]
    assert losses[-1] < 0.5 * losses[0]
    for row in rows[1:]:
        assert row['critic/vf_explained_var'] < 1
        assert row['critic/grad_norm'] > 0
        assert row['compile/count'] == 0
    arrays = newest_checkpoint(whole)[1]
    assert arrays['updates'] == 6
    assert not np.array_equal(arrays['critic.params.trunk.embed'], arrays['params.embed'])
    runs.train('ppo_resumed', PPO | {'steps': 2})
    assert_same_run(runs.train('ppo_resumed', PPO | {'steps': 4}), whole)
    # Other commands read the policy alone.
    assert load_policy(assemble(runs.config(PPO)), str(whole)).step == 4


def test_prompts_without_signal_are_replaced_and_truncated_answers_left_out(runs):
    changes = {
        'steps': 4,
        'reward.function': 'reward_functions:rare',
        'rollout.extra_batches': 2,
        'reward.overlong_buffer_tokens': 16,
        'learner.mask_truncated': True,
    }
    whole = runs.train('dynamic', changes)
    rows = rows_of(whole)[1:]
    batches = [row['rollout/batches'] for row in rows]
    assert 1 < np.mean(batches) <= 3
    for row in rows:
        assert row['rollout/prompts_left_out'] == 4 * (row['rollout/batches'] - 1)
        assert 0 < row['critic/groups_with_signal'] < 1
        assert row['compile/count'] == 0
        assert row['critic/rewards/mean'] != row['critic/score/mean']
        assert 0 < row['actor/left_out_fraction'] < 1
    position = newest_checkpoint(whole)[2]['position']
    assert position['problem'] == 4 * sum(batches) + position['skipped_overlong']
    runs.train('dynamic_resumed', changes | {'steps': 2})
    assert_same_run(runs.train('dynamic_resumed', changes), whole)


def test_an_adaptive_run_moves_its_budgets_and_resumes_exactly(runs):
    changes = {
        'schedule.kind': 'adaptive',
        'controller.probes': 2,
        'controller.min_count': 60,
        'controller.urgent_count': 20,
    }
    whole = runs.train('adaptive', changes | {'steps': 4})
    rows = rows_of(whole)[1:]
    assert sum(row['sparse/budget_moves'] for row in rows) > 0
    assert rows[-1]['sparse/budget_pages/bin_0_64'] < 2  # where it began
    assert all(0 < row['sparse/probe_overhead'] < 1 for row in rows)
    assert [row['compile/count'] for row in rows] == [0] * 4
    runs.train('adaptive_resumed', changes | {'steps': 2})
    resumed = runs.train('adaptive_resumed', changes | {'steps': 4})
    assert_same_run(resumed, whole)
    assert [row['compile/count'] for row in rows_of(resumed)[1:]] == [0] * 4
    # What other commands see.
    found = load_policy(assemble(runs.config(changes)), str(whole)).parts.schedule
    assert found.budget_pages[0] == rows[-1]['sparse/budget_pages/bin_0_64']
    with pytest.raises(ConfigError, match=r"schedule\.policy='quest': the run has found its budgets with 'block_mean'"):
        load_policy(assemble(runs.config(changes | {'schedule.policy': 'quest'})), str(whole))


def test_adaptive_runs_whose_probes_leave_for_host_memory_resume_exactly(runs):
    changes = {
        'schedule.kind': 'adaptive',
        'controller.probes': 2,
        'controller.min_count': 60,
        'controller.urgent_count': 20,
        'rollout.pool_pages': 32,  # of 16 a sequence
        'rollout.segment_steps': 4,
    }
    whole = runs.train('crowded', changes | {'steps': 4})
    rows = rows_of(whole)[1:]
    assert sum(row['rollout/parked'] for row in rows) > 0
    assert [row['compile/count'] for row in rows] == [0] * 4
    runs.train('crowded_resumed', changes | {'steps': 2})
    assert_same_run(runs.train('crowded_resumed', changes | {'steps': 4}), whole)


def test_other_length_bins_are_refused_on_resume(runs, tmp_path):
    path = tmp_path / 'schedule.json'
    fields = {'page_tokens': 8, 'reserved_first_pages': 1, 'reserved_last_pages': 3, 'dense_layers': [0]}
    fields |= {'budget_pages': [2, 3], 'policy': 'block_mean'}
    write = lambda width: path.write_text(json.dumps(fields | {'bin_width_tokens': width}))
    changes = {'schedule.kind': 'adaptive', 'schedule.start': 'file', 'schedule.path': str(path), 'steps': 1}
    write(64)
    runs.train('bins', changes)
    write(32)
    with pytest.raises(ConfigError, match=r"schedule\.start='file': has other length bins now"):
        runs.train('bins', changes | {'steps': 2})


GUARDED = {'guard.window_steps': 2, 'guard.least_p05': 0.999999, 'steps': 6}


@pytest.mark.parametrize('kind', ['fixed', 'adaptive'])
def test_a_guard_widens_every_budget(runs, kind, capsys):
    changes = GUARDED | {'guard.action': 'widen', 'schedule.kind': kind, 'controller.min_count': 1_000_000}
    changes |= {'controller.urgent_count': 1_000_000}  # the guard alone moves budgets
    whole = runs.train(f'widened_{kind}', changes)
    rows = rows_of(whole)[1:]
    assert [row['guard/acted'] for row in rows] == [0, 1, 0, 1, 0, 1]
    read = [row['sparse/pages_read/mean'] for row in rows]
    assert max(read[:2]) < min(read[2:4]) < min(read[4:])
    assert 'all budgets are doubled' in capsys.readouterr().out
    assert [row['compile/count'] for row in rows] == [0] * 6
    runs.train(f'widened_{kind}_resumed', changes | {'steps': 4})
    assert_same_run(runs.train(f'widened_{kind}_resumed', changes), whole)
    if kind == 'fixed':
        found = load_policy(assemble(runs.config(changes)), str(whole)).parts.schedule
        assert found.budget_pages == (2 << 3,)


def test_a_guard_makes_the_sampler_dense_also_after_a_resume(runs, capsys):
    changes = GUARDED | {'guard.action': 'dense', 'mismatch.every_steps': 2}
    whole = runs.train('made_dense', changes)
    rows = rows_of(whole)[1:]
    read = [row['sparse/kv_read_fraction'] for row in rows]
    acted = next(i for i, row in enumerate(rows) if row['guard/acted'])
    assert 0 < acted < 5
    assert max(read[: acted + 1]) < 1
    assert read[acted + 1 :] == [1.0] * (5 - acted)
    assert 'the sampler is dense from here on' in capsys.readouterr().out
    assert [row['compile/count'] for row in rows] == [0] * 6
    runs.train('made_dense_resumed', changes | {'steps': acted + 1})
    assert_same_run(runs.train('made_dense_resumed', changes), whole)


def test_a_guard_stops_the_run_with_a_checkpoint_from_which_it_can_go_on(runs, capsys):
    changes = GUARDED | {'guard.action': 'stop', 'checkpoint.every_steps': 4}
    workdir = runs.train('stopped', changes, expected_code=STOPPED_BY_GUARD)
    assert newest_checkpoint(workdir)[0] == 2
    assert 'stopping after step 2' in capsys.readouterr().out
    runs.train('stopped', changes, expected_code=STOPPED_BY_GUARD)
    assert [row['step'] for row in rows_of(workdir)] == [0, 1, 2, 3, 4]


def test_packing_changes_nothing_but_rounding(runs, whole):
    rows = same_everywhere(rows_of(runs.train('unpacked', {'steps': 2, 'learner.packing': 'off'})))
    packed = same_everywhere(rows_of(whole)[:3])
    assert rows[:2] == [pytest.approx(row, rel=1e-4, abs=1e-5) for row in packed[:2]]
    assert rows[2] == pytest.approx(packed[2], rel=1e-3, abs=1e-4)


SUPERVISED = {
    'phase': 'supervised',
    'data.options': '{"min_n": 100, "max_n": 1000}',
    'reward.function': '',
    'rollout.prompts_per_step': 8,
    'optimizer.learning_rate': 1e-2,
    'evaluate.every_steps': 0,
}


def test_supervised_training_lowers_its_loss(runs):
    rows = rows_of(runs.train('supervised', SUPERVISED))
    losses = [row['supervised/loss'] for row in rows[1:]]
    assert len(losses) == 12
    assert losses[0] > np.log(512)  # random weights know nothing
    assert losses[-1] < 0.5 * losses[0]
    assert [row['compile/count'] for row in rows[1:]] == [0] * 12
    assert not any(name.startswith(('actor/pg', 'sparse/', 'rollout_corr/')) for row in rows for name in row)


def test_problems_of_a_file_which_must_not_change_under_the_run(runs, tmp_path):
    file = tmp_path / 'problems.jsonl'
    problems = [{'problem': f'{i} + {i} = ?', 'answer': str(2 * i)} for i in range(12)]
    file.write_text(''.join(json.dumps(problem) + '\n' for problem in problems))
    changes = {'data.source': str(file), 'data.train_examples': 0, 'data.eval_examples': 4}
    workdir = runs.train('file', changes | {'steps': 1})
    prompts = {answer['prompt'] for answer in read_rows(workdir / 'samples.jsonl')}
    assert len(prompts) == 4
    assert all(any(problem['problem'] in prompt for problem in problems) for prompt in prompts)
    before = contents(workdir / 'checkpoints'), rows_of(workdir)
    file.write_text(''.join(json.dumps(problem) + '\n' for problem in problems[1:]))
    with pytest.raises(ConfigError, match=r'problems\.jsonl.*: has other problems now than when this run began'):
        runs.train('file', changes | {'steps': 2})
    assert (contents(workdir / 'checkpoints'), rows_of(workdir)) == before


# ---------------------------------------------------------------------- going on


def test_more_steps_later_are_the_same_run(runs, whole):
    """Rows that a killed process wrote after its last checkpoint are replaced."""
    workdir = runs.train('raised', {'steps': 4})
    for file in ('metrics.jsonl', 'samples.jsonl'):
        with open(workdir / file, 'a') as late:
            late.write(json.dumps({'step': 5, 'critic/score/mean': 9.0}) + '\n{"step": 6, "crit')
    runs.train('raised')
    assert_same_run(workdir, whole)
    assert [row['compile/count'] for row in rows_of(workdir)[5:]] == [0] * 8


def test_another_configuration_is_refused_and_nothing_changes(runs, whole, capsys):
    before = contents(whole)
    argv = ['train', *runs.flags({'optimizer.learning_rate': 1e-3, 'seed': 5}), f'--workdir={whole}']
    with pytest.raises(SystemExit) as exit_:
        commands.run(train, argv=argv)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith('error: --workdir=')
    assert '\n  optimizer.learning_rate: 0.003 -> 0.001\n  seed: 0 -> 5\n' in error
    assert contents(whole) == before


def test_lost_checkpoints_are_said_before_any_row_is_removed(runs, whole, tmp_path):
    shutil.copytree(whole, tmp_path / 'lost')
    shutil.rmtree(tmp_path / 'lost/checkpoints')
    rows = (tmp_path / 'lost/metrics.jsonl').read_bytes()
    with pytest.raises(ConfigError, match=r'holds no checkpoint, though the run has done 12 steps'):
        train(runs.config({}), str(tmp_path / 'lost'))
    assert (tmp_path / 'lost/metrics.jsonl').read_bytes() == rows


def test_a_finished_run_says_so_and_stays_as_it_is(runs, whole, capsys):
    before = contents(whole)
    runs.train('whole')
    assert 'this run has all of its 12 steps; raise --config.steps to go on' in capsys.readouterr().out
    after = contents(whole)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize(
    ('where', 'signals', 'every_steps', 'saved'),
    [
        ('score', 1, 100, 2),  # the step under way is thrown away and done again
        ('update', 1, 100, 3),  # the step under way is finished first
        ('update', 2, 1, 2),  # twice: ended at once, in the middle of the update
    ],
)
def test_interrupted_at_step_3(where, signals, every_steps, saved, runs, whole, capsys, monkeypatch):
    name = f'interrupted_{where}_{signals}'
    with monkeypatch.context() as patch:
        interrupt(patch, where, signals, at_step=2)
        workdir = runs.train(name, {'checkpoint.every_steps': every_steps}, expected_code=130)
    assert f'Stopped. Saved at step {saved}; run the same command to go on.' in capsys.readouterr().out
    assert newest_checkpoint(workdir)[0] == saved
    assert (workdir / 'report.html').exists() == (signals == 1)  # not where a person would not wait
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_same_run(runs.train(name), whole)


def test_interrupted_before_the_first_step(runs, capsys, monkeypatch):
    interrupt(monkeypatch, 'warm_up', 1, at_step=0)
    workdir = runs.train('interrupted_early', expected_code=130)
    out = capsys.readouterr().out
    assert 'Stopped before anything was saved (step 0); run the same command to begin again.' in out
    assert rows_of(workdir) == []
    assert not (workdir / 'report.html').exists()


def interrupt(patch, where: str, signals: int, at_step: int) -> None:
    original = getattr(trainer.Trainer, where)

    def interrupting(self, *args):
        if self.position.step == at_step:
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
        return original(self, *args)

    patch.setattr(trainer.Trainer, where, interrupting)


def test_killed_while_saving_and_then_stopped(runs, whole):
    """A SIGKILL and a Ctrl-C, each of a process of its own; the rest of the run in this one."""
    with runs.start('killed') as process:
        process.wait_for_save(after_step=2)
        assert process.end(signal.SIGKILL)[0] == -signal.SIGKILL
    with runs.start('killed') as process:
        process.wait_for_step(rows_of(process.workdir)[-1]['step'] + 1)
        code, out, err = process.end(signal.SIGINT)
    assert code == 130
    assert 'Stopped. Saved at step ' in out
    assert 'Traceback' not in err
    assert rows_of(process.workdir)[-1]['step'] < 12, 'the signals came too late to show anything'
    assert_same_run(runs.train('killed'), whole)
