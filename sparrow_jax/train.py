"""python -m sparrow_jax.train --config=configs/X.py[:args] [--config.field=value ...] --workdir=W

The loop: prompts -> rollout (sparse sampler) -> rewards -> dense log-probs -> advantages -> policy update -> weights to
the sampler. Everything that a step computes is a function of (configuration, step, learner state, data position, state
of controller and guard), so that a run killed at any moment repeats itself exactly from its last checkpoint.
"""

import dataclasses
import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax

from sparrow_jax import commands, compile_cache, memory
from sparrow_jax.assembly import Parts, assemble
from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.console import RL_COLUMNS, SUPERVISED_COLUMNS, Console
from sparrow_jax.interrupts import Interrupts
from sparrow_jax.metrics import CompileCounter, MetricsWriter, read_rows
from sparrow_jax.models.adapter import adapter_parameter_count
from sparrow_jax.parallel import transfer
from sparrow_jax.report import write_report
from sparrow_jax.tasks.verifiers import Verifier
from sparrow_jax.trainer import Trainer
from sparrow_jax.workdir import Workdir

STOPPED_BY_GUARD = 3  # exit code


def train(run: RunConfig, workdir_path: str) -> int:
    """Trains to `run.steps`; returns the exit code."""
    parts = assemble(run)
    columns = RL_COLUMNS if run.phase == 'rl' else SUPERVISED_COLUMNS
    primary = jax.process_index() == 0
    with (
        Verifier(run.reward, run.data, prompt_opens_think=parts.encoder.opens_think) as verifier,
        Workdir.open(workdir_path, run, 'train', primary=primary) as workdir,
        Console(run.steps, columns, quiet=not primary) as console,
        CompileCounter() as compiles,
        Checkpoints(workdir.checkpoints, run.checkpoint.keep) as checkpoints,
        Interrupts(console.stopping, transfer.any_of_all if jax.process_count() > 1 else None) as interrupts,
        _failures_told(),
    ):
        if checkpoints.latest_step() is None:
            _refuse_lost_checkpoints(workdir, run.checkpoint.every_steps)
        trainer = Trainer(parts, verifier, console)
        restored = trainer.start(checkpoints)
        with MetricsWriter(workdir, restored) as writer:
            console.start(*_start_block(run, parts, trainer, workdir, restored))
            try:
                return _steps(trainer, writer, checkpoints, compiles, interrupts, workdir)
            except KeyboardInterrupt as error:
                if interrupts.forced:
                    commands.tell_others(error)  # who know nothing of it, and wait
                # The step under way left state and data position as they were: it is done again. Unless the person
                # would not wait for its end; then the last checkpoint counts.
                if trainer.position.step > 0 and not interrupts.forced:
                    trainer.save(checkpoints)
                checkpoints.wait()
                saved = checkpoints.latest_step()
                console.interrupted(saved or 0, saved=saved is not None)
                if not interrupts.forced:
                    _report(console, workdir)
                return 130


def _steps(
    trainer: Trainer,
    writer: MetricsWriter,
    checkpoints: Checkpoints,
    compiles: CompileCounter,
    interrupts: Interrupts,
    workdir: Workdir,
) -> int:
    run, console, position = trainer.run, trainer.console, trainer.position
    _warn_of_rate_zero(run, console)
    if position.step >= run.steps:
        console.message(f'this run has all of its {run.steps} steps; raise --config.steps to go on')
        return 0
    trainer.warm_up()
    interrupts.between_steps()
    first_accuracy = last_accuracy = None
    if position.step == 0 and trainer.evaluated(0):
        metrics = trainer.evaluation()
        first_accuracy = metrics['val/accuracy']
        writer.write(0, {**metrics, **trainer.timings, **compiles.take()})
    compiles.warmed_up()
    compiles.take()  # where no row of step 0 took them: they are not the first step's
    while position.step < run.steps:
        console.begin_step(position.step + 1)
        began = time.perf_counter()
        trainer.timings.clear()
        before = dataclasses.replace(position)
        try:
            interrupts.between_steps()
            prepared = trainer.prepare_rl() if run.phase == 'rl' else trainer.prepare_supervised()
        except KeyboardInterrupt:
            position.problem, position.skipped_overlong = before.problem, before.skipped_overlong
            raise
        with interrupts.deferred():
            metrics = {**prepared.metrics, **trainer.update(prepared)}
            position.step += 1
            stops = run.phase == 'rl' and trainer.judge(metrics)
            metrics['data/skipped_overlong'] = position.skipped_overlong
            metrics.update(_speed(trainer, metrics, time.perf_counter() - began))
            console.row(position.step, metrics)
            if trainer.evaluated(position.step):
                metrics.update(trainer.evaluation())
                last_accuracy = metrics['val/accuracy']
            metrics.update(trainer.timings, **compiles.take())
            writer.write(position.step, metrics)
            writer.write_samples(position.step, prepared.answers)
            if prepared.alpha_X is not None:
                writer.write_histogram(position.step, prepared.alpha_X)
            if compiles.late:
                console.warn(f'compiled after warm-up: {", ".join(compiles.late)}')
                compiles.late.clear()
            if position.step % run.checkpoint.every_steps == 0 or position.step == run.steps or stops:
                trainer.save(checkpoints)
        if stops and position.step < run.steps:
            checkpoints.wait()
            _report(console, workdir)
            console.message('the same command goes on from here, until the guard stops it again; guard.* may change')
            return STOPPED_BY_GUARD
    checkpoints.wait()
    _report(console, workdir)
    _finish(console, workdir, first_accuracy, last_accuracy)
    return 0


@contextmanager
def _failures_told() -> Iterator[None]:
    """The other processes hear of a failure before this one waits for them to close the checkpoints."""
    try:
        yield
    except Exception as error:
        commands.tell_others(error)
        raise


def _warn_of_rate_zero(run: RunConfig, console: Console) -> None:
    updates, schedule = run.steps * run.learner.updates_per_step, run.optimizer
    last = schedule.warmup_steps + schedule.decay_steps
    if schedule.decay_steps and updates > last:
        console.warn(
            f'optimizer.decay_steps={schedule.decay_steps}: the learning rate is 0 after update {last} of {updates}; '
            'a longer run in a new workdir needs more'
        )


def _speed(trainer: Trainer, metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """How fast a step of so many seconds was, its evaluation left out.

    The times of its parts, tokens a second per device, sampled tokens a second.
    """
    speed = {
        **trainer.timings,
        'timing_s/step': seconds,
        'perf/throughput': metrics['perf/total_num_tokens'] / seconds / len(jax.devices()),
    }
    if 'timing_s/gen' in trainer.timings:
        rollout = trainer.run.rollout
        responses = metrics['rollout/batches'] * rollout.prompts_per_step * rollout.samples_per_prompt
        sampled = metrics['response_length/mean'] * responses
        speed['perf/rollout_tokens_per_s'] = sampled / trainer.timings['timing_s/gen']
    return speed


def _refuse_lost_checkpoints(workdir: Workdir, every_steps: int) -> None:
    """Beginning anew would remove the rows of a run that has had checkpoints.

    The first one is whole when the second begins to be written, which is before the row after it.
    """
    rows = read_rows(workdir.metrics_file)
    if rows and rows[-1]['step'] > 2 * every_steps:
        raise ConfigError(
            f'{workdir.checkpoints}: holds no checkpoint, though the run has done {rows[-1]["step"]} steps; put them '
            f'back, or give another --workdir, or remove {workdir.metrics_file} to begin anew'
        )


def _start_block(
    run: RunConfig, parts: Parts, trainer: Trainer, workdir: Workdir, restored: int | None
) -> tuple[str, dict[str, str]]:
    schedule, shape, engine = trainer.schedule_in_force(), parts.shape, trainer.engine
    why = engine.why_kernels
    low, high = min(schedule.budget_pages), max(schedule.budget_pages)
    if schedule.kind == 'dense':
        sampler = 'dense'
    else:
        budget = str(low) if low == high else f'{low} to {high}'
        layers = ', '.join(map(str, schedule.dense_layers)) or 'none'
        sampler = (
            f'{schedule.kind} schedule, {budget} + {schedule.reserved_pages} reserved pages of '
            f'{schedule.page_tokens} tokens, chosen by {schedule.policy}, dense layers {layers}'
        )
    count, device = f'{shape.parameter_count() / 1e6:,.2f}M parameters', jax.devices()[0].device_kind
    facts = {
        'model': f'{shape.family} {count}, {run.model.path or "random weights"}',
        'devices': f'{jax.device_count()} x {device}, mesh {dict(parts.mesh.shape)}',
        'memory': f'{memory.show_bytes(memory.peak_bytes(parts.memory_bytes))} estimated on each device',
        'sampler': sampler,
        'attention': f'{trainer.learner.attention} in the learner, {engine.kernels} in the sampler ({why})',
        'data': f'{run.data.source}, {len(trainer.train_set):,} problems, {len(trainer.held_out):,} held out',
        'workdir': str(workdir.path),
        'compiled code': compile_cache.describe(),
    }
    if trainer.distiller is not None:
        spec = trainer.distiller.spec
        size = f'{adapter_parameter_count(shape, spec):,} parameters'
        facts['adapter'] = f'rank {spec.rank} on {", ".join(spec.targets)}, {size}, in the sparse sampler alone'
    if restored is not None:
        facts['resumed'] = f'from the checkpoint of step {restored}'
    title = 'Reinforcement learning' if run.phase == 'rl' else 'Supervised training'
    return title, facts


def _report(console: Console, workdir: Workdir) -> None:
    """Writes the report of what the logs hold so far, if anything; a run does not fail for it."""
    if not workdir.primary or not read_rows(workdir.metrics_file):
        return
    console.status('writing the report')
    try:
        console.message(f'report: {write_report([workdir.path], workdir.report_file)}')
    except Exception as error:
        console.warn(f'no report was written ({error}); the run is complete without it')


def _python() -> str:
    """This interpreter, as one would type it here."""
    here = f'{os.getcwd()}/'
    return sys.executable.removeprefix(here)


def _finish(console: Console, workdir: Workdir, first: float | None, last: float | None) -> None:
    facts = {}
    if first is not None and last is not None:
        facts['held-out accuracy'] = f'{first:.3f} -> {last:.3f}'
    install = '' if importlib.util.find_spec('tensorboard') else f'{_python()} -m pip install tensorboard; '
    facts |= {
        'metrics': str(workdir.metrics_file),
        'samples': str(workdir.samples_file),
        'checkpoints': str(workdir.checkpoints),
        'TensorBoard': f'{install}tensorboard --logdir {workdir.tensorboard}',
        'export': f'{_python()} -m sparrow_jax.export --workdir={workdir.path} --out={workdir.path}/hf',
    }
    console.finish('Done', facts)


if __name__ == '__main__':
    commands.run(train)
