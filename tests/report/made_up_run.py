"""Logs of a run that never was, as training writes them, for tests of what reads them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparrow_jax.sparsity.tail import histogram

CONFIG = {
    'steps': 40,
    'seed': 3,
    'phase': 'rl',
    'model': {'path': 'weights/model'},
    'data': {'source': 'reasoning_gym:chain_sum'},
    'schedule': {'kind': 'adaptive'},
    'controller': {'target_p05': 0.86, 'tolerance': 0.01},
    'guard': {'action': 'widen'},
    'reward': {'correct_threshold': 0.99},
}
BINS = ((0, 2000), (2000, 4000), (4000, 6000))


def row(step: int, **more: Any) -> dict[str, Any]:
    """A row of metrics.jsonl; step 0 has the evaluation alone."""
    progress = step / 40
    values: dict[str, Any] = {'step': step}
    if step:
        values |= {
            'critic/score/mean': 0.2 + 0.6 * progress,
            'reward/format_valid': 0.97,
            'critic/groups_with_signal': 0.5,
            'response_length/mean': 2500 + 50.0 * step,
            'response_length/min': 900.0,
            'response_length/max': 5900.0,
            'response_length/clip_ratio': 0.02,
            'actor/entropy': 0.4 - 0.2 * progress,
            'actor/pg_loss': -0.01,
            'actor/grad_norm': 0.1,
            'rollout_corr/kl': 0.002,
            'sparse/kv_read_fraction': 0.25,
            'sparse/pages_read/mean': 80.0,
            'sparse/budget_pages/mean': 77.0,
            'sparse/probe_overhead': 0.05,
            'sparse/alpha_p05': 0.87 + 0.005 * (step % 3),
            'sparse/alpha_p01': 0.6,
            **{f'sparse/alpha_p05/bin_{low}_{high}': 0.9 - low / 1e5 for low, high in BINS},
            **{f'sparse/budget_pages/bin_{low}_{high}': 40 + low / 100 + step for low, high in BINS},
            'perf/rollout_tokens_per_s': 21_000.0,
            'perf/throughput': 9_000.0,
            'timing_s/gen': 8.0,
            'timing_s/old_log_prob': 1.5,
            'timing_s/update_actor': 4.0,
            'timing_s/step': 14.0,
            'guard/acted': float(step == 7),
        }
    if step % 10 == 0:
        values |= {'val/accuracy': 0.3 + 0.5 * progress, 'val/accuracy_stderr': 0.02, 'val/problems': 256.0}
        values |= {'sparse/alpha_floor_p05': 0.995, 'timing_s/testing': 30.0}
    return values | more


def sample(step: int, **more: Any) -> dict[str, Any]:
    facts = {'prompt': '1 + 1 = ?', 'completion': f'At step {step} it is \\boxed{{2}}.', 'answer': '2'}
    return {'step': step, **facts, 'reward': 1.0, 'finish_reason': 'stop', 'tokens': 12} | more


def write_run(
    folder: Path,
    *,
    steps: int = 40,
    rows: Iterable[Mapping[str, Any]] | None = None,
    samples: Iterable[Mapping[str, Any]] | None = None,
    config: Mapping[str, Any] | None = CONFIG,
) -> Path:
    """Writes the logs into a new folder; returns it. The texts of a line may be given as they are."""
    folder.mkdir(parents=True)
    if config is not None:
        (folder / 'config.json').write_text(json.dumps(config))
    lines(folder / 'metrics.jsonl', [row(step) for step in range(steps + 1)] if rows is None else rows)
    lines(
        folder / 'samples.jsonl', [sample(s) for s in range(1, steps + 1) for _ in 'ab'] if samples is None else samples
    )
    random = np.random.default_rng(0)
    counts = [
        histogram(np.where(random.uniform(size=4000) < 0.3, 0.999 * random.beta(4, 1, 4000), 1.0)) for _ in range(3)
    ]
    lines(
        folder / 'alpha_histogram.jsonl',
        [{'step': step, 'tokens': counts[step % 3].tolist()} for step in range(1, min(steps, 30) + 1)],
    )
    return folder


def lines(file: Path, rows: Iterable[Mapping[str, Any] | str]) -> None:
    file.write_text(''.join(f'{row if isinstance(row, str) else json.dumps(row)}\n' for row in rows))
