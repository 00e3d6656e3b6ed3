"""Finished calibrations that never were, whose right answers are known, for tests of what reads them."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pallas_kernels.page_select.policies import SelectionPolicy
from sparrow_jax.calibrate.results import FILE, MEASURED, Point
from sparrow_jax.sparsity.calibration import Tokens, statistics
from sparrow_jax.sparsity.cost import kv_bytes_per_token, kv_read_fraction, pages_read
from sparrow_jax.sparsity.schedules import EVERY_PAGE, Schedule

LENGTHS = (1024, 2048, 4096)  # each in a bin of its own, all tokens of a bin at the same length
WIDTH = 512
SEQUENCES, TOKENS = 4, 100  # of each length
BUDGETS = tuple(int(64 * 2 ** (i / 2)) // 16 * 16 for i in range(1, 10))
SHAPE = {'layers': 10, 'kv_heads': 2, 'head_dim': 32, 'value_bytes': 2}
FLOOR = 0.01  # 1 - p05 of the dense sampler

Gap = Callable[[Point, int], float]  # 1 - p05 at a point and a length


def gap(point: Point, length: int) -> float:
    """1 - p05 = 0.05 sqrt(length / budget): a target needs a budget that grows as the length, and eta is 2."""
    return 0.05 * (length / point.budget_tokens) ** 0.5 if point.budget_tokens else FLOOR


def tokens_of(gaps: dict[int, float], rng: np.random.Generator) -> Tokens:
    """1 - alpha uniform from 0 to gap / 0.95, so that 5% of the tokens are beyond the gap."""
    length = np.repeat(list(gaps), SEQUENCES * TOKENS).astype(np.int32)
    even = (np.arange(SEQUENCES * TOKENS) + 0.5) / (SEQUENCES * TOKENS) / 0.95
    alpha = np.concatenate([1 - gap_ * rng.permutation(even) for gap_ in gaps.values()]).astype(np.float32)
    sequence = np.tile(np.repeat(np.arange(SEQUENCES), TOKENS), len(gaps)).astype(np.int32)
    return Tokens(alpha, np.maximum(alpha - np.float32(0.1), 0), length, sequence)


def write_calibration(
    folder: Path,
    *,
    gap: Gap = gap,
    policies: tuple[str, ...] = ('block_mean',),
    pages: tuple[int, ...] = (16,),
    budgets: tuple[int, ...] = BUDGETS,
    tokens: Callable[[Point], Tokens] | None = None,
) -> Path:
    """Writes calibration.json and measured/ into a new folder; returns it."""
    (folder / MEASURED).mkdir(parents=True)
    rng, points = np.random.default_rng(0), [Point(policies[0], pages[0], 0)]
    points += [Point(policy, page, budget) for policy in policies for page in pages for budget in budgets]
    found = []
    for point in points:
        some = tokens(point) if tokens else tokens_of({length: gap(point, length) for length in LENGTHS}, rng)
        np.savez(folder / MEASURED / f'{point.name}.npz', **dataclasses.asdict(some))  # type: ignore[arg-type]
        budget = point.budget_tokens // point.page_tokens or EVERY_PAGE
        schedule = Schedule('fixed', point.page_tokens, WIDTH, 1, 2, (0, 1), (budget,), SelectionPolicy(point.policy))
        figures = statistics(some, WIDTH, 50)
        bytes_of = lambda length, schedule=schedule: kv_bytes_per_token(schedule, **SHAPE, length_tokens=length)
        for z, part in enumerate([figures['all'], *figures['bins']]):
            inside = some.length[some.length // WIDTH == z - 1] if z else some.length
            part['kv_bytes_per_token'] = bytes_of(inside) if inside.size else None
        read = pages_read(schedule, some.length)
        share = kv_read_fraction(schedule, SHAPE['layers'], some.length, read)
        facts = dataclasses.asdict(point) | {'every_page': not point.budget_tokens, 'kv_read_fraction': share}
        found.append(facts | figures)
    floor = statistics(tokens_of(dict.fromkeys(LENGTHS, FLOOR), rng), WIDTH, 50)
    content = {
        'settings': {},
        'facts': {'model': 'made up', 'device': '1 x none', 'min_count': 50},
        'dense_floor': floor,
        'points': found,
        'chosen': [{'file': 'schedule.json', 'policy': policies[0], 'page_tokens': pages[0]}],
        'schedules': {},
    }
    (folder / FILE).write_text(json.dumps(content))
    return folder


def write_closed_loop(file: Path, shares: dict[str, dict[str, float]]) -> Path:
    """A closed loop's file, with the share that each policy reads at each target."""
    best = {p: {t: {'kv_read_fraction': share} for t, share in targets.items()} for p, targets in shares.items()}
    file.write_text(json.dumps({'config': {'rollout': {'page_tokens': 16}}, 'best': best, 'closed': {}}))
    return file
