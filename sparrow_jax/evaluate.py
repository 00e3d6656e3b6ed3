"""python -m sparrow_jax.evaluate --config=... --workdir=W

avg@k and unbiased pass@k on the held-out problems, by the dense and by the sparse sampler side by side. Judges the
policy of W's newest checkpoint, or the start weights where W holds no run. Results go to W/evaluation.jsonl, answers
to W/evaluation_samples.jsonl.
"""

from pathlib import Path
from typing import Any

import jax

from sparrow_jax import commands
from sparrow_jax.assembly import assemble, load_policy
from sparrow_jax.config import RunConfig
from sparrow_jax.console import Console
from sparrow_jax.evaluation import encode_held_out, evaluate
from sparrow_jax.metrics import append_row
from sparrow_jax.rollout.engine import Progress, Sampling
from sparrow_jax.tasks.problems import load_problems
from sparrow_jax.tasks.verifiers import Verifier
from sparrow_jax.workdir import results_folder


def evaluate_run(run: RunConfig, workdir: str) -> int:
    """Evaluates with both samplers; returns the exit code."""
    folder = results_folder(workdir)
    parts = assemble(run, trains=False)
    held_out = encode_held_out(parts, load_problems(run.data, 'held_out'))
    with Console() as console, Verifier(run.reward, run.data, prompt_opens_think=parts.encoder.opens_think) as verifier:
        console.status('reading weights')
        policy = load_policy(parts, workdir)
        parts, step = policy.parts, policy.step
        engine = parts.engine()
        weights = engine.weights(policy.params)
        rows = {}
        samplers = ['dense'] if parts.schedule.kind == 'dense' else ['dense', 'sparse']
        for sampler in samplers:
            sampling = Sampling(run.evaluate.temperature, run.evaluate.top_p, sparse=sampler == 'sparse')

            def show(progress: Progress, sampler: str = sampler) -> None:
                console.status(f'{sampler} sampler', done=progress.finished, total=progress.total, unit='answers')

            outcome = evaluate(
                parts,
                engine,
                weights,
                verifier,
                held_out,
                sampling=sampling,
                samples=run.evaluate.samples,
                adapter=policy.adapter,
                on_progress=show,
            )
            rows[sampler] = outcome.metrics(parts, sampler, sampling.sparse)
            if jax.process_index() == 0:
                _write(folder, {'step': step, 'sampler': sampler}, rows[sampler], outcome.rows(parts))
        console.finish('Evaluation', _table(run, parts.run.model.path, step, rows, folder))
    return 0


def _write(folder: Path, origin: dict[str, Any], metrics: dict[str, float], answers: list[dict[str, Any]]) -> None:
    with open(folder / 'evaluation.jsonl', 'a', encoding='utf-8') as file:
        append_row(file, origin | metrics)
    with open(folder / 'evaluation_samples.jsonl', 'a', encoding='utf-8') as file:
        for answer in answers:
            append_row(file, origin | answer)


def _table(run: RunConfig, model: str, step: int, rows: dict[str, dict[str, float]], folder: Path) -> dict[str, str]:
    k = run.evaluate.samples
    facts = {'policy': f'after step {step}' if step else f'start weights ({model or "random"})'}
    for sampler, metrics in rows.items():
        get = lambda name: metrics[f'{sampler}/{name}']  # noqa: B023
        parts = [f'avg@{k} {get("accuracy"):.3f} ± {get("accuracy_stderr"):.3f}']
        parts += [f'pass@{j} {get(f"pass@{j}"):.3f}' for j in (2, 4, 8, 16, 32, 64) if f'{sampler}/pass@{j}' in metrics]
        parts += [f'format valid {get("format_valid"):.1%}', f'{get("response_length/mean"):.0f} tokens']
        if sampler == 'sparse':
            parts.append(f'{get("kv_read_fraction"):.0%} of the KV read')
        facts[f'{sampler} sampler'] = ', '.join(parts)
    count, how = rows['dense']['dense/problems'], run.evaluate
    facts['problems'] = f'{count:.0f} held out, temperature {how.temperature}, top-p {how.top_p}'
    facts['written'] = f'{folder}/evaluation.jsonl, {folder}/evaluation_samples.jsonl'
    return facts


if __name__ == '__main__':
    commands.run(evaluate_run)
