"""Sparsity schedules: how many pages a sequence may read at its length.

A schedule comes from the config (`load_schedule`), is checked there against the cache and the model, and goes to the
sampler as a small array: budgets are values, so changing them compiles nothing.
"""

import dataclasses
import importlib.resources
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.page_select.policies import SelectionPolicy, policy_names
from sparrow_jax.config import ConfigError, RolloutConfig, ScheduleConfig
from sparrow_jax.json_files import read_object

DEFAULT_BIN_WIDTH_TOKENS = 2000  # as the published tables have it
PUBLISHED_PAGE_TOKENS = 16
EVERY_PAGE = 1 << 20  # a budget that no sequence reaches
MOST = 1 << 30  # of a field: the device computes with int32, and budget and reserved pages are added up there
FILE_FIELDS = (
    'page_tokens',
    'bin_width_tokens',
    'reserved_first_pages',
    'reserved_last_pages',
    'dense_layers',
    'budget_pages',
)
CALIBRATION_FIELD = 'calibration'  # of a file that `sparrow_jax.calibrate` wrote: what its budgets were found with
POLICY_FIELD = 'policy'  # of a file, too: budgets found under one policy say nothing about another


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Pages read on top of the reserved ones, by bins of cached length.

    Attributes:
        kind: where it comes from, as in the config.
        page_tokens: C, the page size that the budgets count in.
        bin_width_tokens: cached tokens of one bin.
        reserved_first, reserved_last: pages that are always read, outside the budget.
        dense_layers: layers that read every page.
        budget_pages: budget of each bin, an adaptive schedule's first; the last one holds for every longer length.
        policy: how the pages of the budget are chosen.
    """

    kind: str
    page_tokens: int
    bin_width_tokens: int
    reserved_first: int
    reserved_last: int
    dense_layers: tuple[int, ...]
    budget_pages: tuple[int, ...]
    policy: SelectionPolicy = SelectionPolicy.BLOCK_MEAN

    @property
    def reserved_pages(self) -> int:
        return self.reserved_first + self.reserved_last

    def most_pages(self, pages_per_sequence: int, most_budget: int = 0) -> int:
        """M: the most pages that one sequence of at most `pages_per_sequence` pages reads in a sparse layer.

        most_budget: of an adaptive schedule; 0: as many as a sequence has.
        """
        if self.kind == 'adaptive':
            return min(pages_per_sequence, most_budget + self.reserved_pages) if most_budget else pages_per_sequence
        bins = -(-pages_per_sequence * self.page_tokens // self.bin_width_tokens)
        return min(pages_per_sequence, max(self.budget_pages[: max(bins, 1)]) + self.reserved_pages)

    def pages_read(self, length_tokens: int) -> int:
        """By a sparse layer (a dense sampler's: by every layer) at so many cached tokens, the current one included."""
        pages = -(-length_tokens // self.page_tokens)
        budget = self.budget_pages[min(length_tokens // self.bin_width_tokens, len(self.budget_pages) - 1)]
        return pages if self.kind == 'dense' else min(budget + self.reserved_pages, pages)

    def widened(self, times: int) -> 'Schedule':
        """With every budget doubled so many times."""
        wider = tuple(min(max(pages, 1) << times, EVERY_PAGE) for pages in self.budget_pages)
        return dataclasses.replace(self, budget_pages=wider) if times else self

    def budgets(self) -> jax.Array:
        """The budgets as int32 [bins], the form in which the sampler takes them."""
        return jnp.asarray(np.asarray(self.budget_pages, np.int32))


def budget_for_length(budget_bins: jax.Array, length_B: jax.Array, bin_width_tokens: int) -> jax.Array:
    """budget_B = budget_bins[min(length // bin_width, bins - 1)]; int32 in, int32 out."""
    return budget_bins[jnp.minimum(length_B // bin_width_tokens, budget_bins.shape[0] - 1)]


def load_schedule(
    config: ScheduleConfig, rollout: RolloutConfig, layers: int, bin_width_tokens: int = DEFAULT_BIN_WIDTH_TOKENS
) -> Schedule:
    """The schedule that a run asks for, checked against its cache and model.

    Args:
        config, rollout: settings; layers: of the model.
        bin_width_tokens: of an adaptive schedule whose start has a single budget for all lengths.

    Raises:
        ConfigError: an unknown table, a missing or malformed file, another page size than the cache's, another policy
            than the file's, a dense layer that the model lacks.
    """
    if config.kind == 'adaptive':
        start = load_schedule(dataclasses.replace(config, kind=config.start), rollout, layers)
        return _adaptive(start, rollout.pages_per_sequence, bin_width_tokens)
    if config.kind == 'published':
        raw, name = _published(config), f'the published schedule {config.model} at {config.target_p05}'
    elif config.kind == 'file':
        raw, name = _from_file(Path(config.path)), f'schedule.path={config.path}'
        _check_policy(config, raw.get(POLICY_FIELD), name)
    else:
        budget = EVERY_PAGE if config.kind == 'dense' else config.budget_pages
        raw = {
            'page_tokens': rollout.page_tokens,
            'bin_width_tokens': rollout.max_prompt_tokens + rollout.max_response_tokens,
            'reserved_first_pages': config.reserved_first_pages,
            'reserved_last_pages': config.reserved_last_pages,
            'dense_layers': config.dense_layers,
            'budget_pages': [budget],
        }
        name = f'schedule.kind={config.kind!r}'
    schedule = dataclasses.replace(_checked(config.kind, raw, name), policy=SelectionPolicy(config.policy))
    if schedule.page_tokens != rollout.page_tokens:
        raise ConfigError(
            f'rollout.page_tokens={rollout.page_tokens}: {name} counts in pages of {schedule.page_tokens} tokens; '
            f'set it to {schedule.page_tokens}'
        )
    beyond = [i for i in schedule.dense_layers if i >= layers]
    if beyond:
        raise ConfigError(
            f'schedule.dense_layers={schedule.dense_layers}: the model has {layers} layers, '
            f'there is no layer {beyond[0]}'
        )
    return schedule


def _adaptive(start: Schedule, pages_per_sequence: int, bin_width_tokens: int) -> Schedule:
    """The same budgets, one for each bin that a sequence can reach."""
    budgets, longest = start.budget_pages, pages_per_sequence * start.page_tokens
    width = start.bin_width_tokens if len(budgets) > 1 else bin_width_tokens
    bins = longest // width + 1
    return dataclasses.replace(
        start,
        kind='adaptive',
        bin_width_tokens=width,
        budget_pages=tuple(min(budgets[min(i, len(budgets) - 1)], pages_per_sequence) for i in range(bins)),
    )


def published_targets(model: str) -> list[float]:
    """Of the tables that there are for a model, ascending; none for other models."""
    return sorted(row['target_p05'] for row in _tables()['schedules'] if row['model'] == model)


def schedule_of_fields(fields: Mapping[str, Any], name: str) -> Schedule:
    """A schedule from the fields that `to_file` gives. name: begins the errors, as in `load_schedule`."""
    return dataclasses.replace(_checked('file', fields, name), policy=SelectionPolicy(fields[POLICY_FIELD]))


def _tables() -> dict[str, Any]:
    text = importlib.resources.files('sparrow_jax.sparsity').joinpath('published_schedules.json').read_text()
    return json.loads(text)


def _published(config: ScheduleConfig) -> dict[str, Any]:
    data = _tables()
    rows = data['schedules']
    models = sorted({row['model'] for row in rows})
    if config.model not in models:
        raise ConfigError(f'schedule.model={config.model!r}: published schedules exist for {", ".join(models)}')
    targets = {row['target_p05']: row for row in rows if row['model'] == config.model}
    if config.target_p05 not in targets:
        raise ConfigError(
            f'schedule.target_p05={config.target_p05}: {config.model} has {", ".join(map(str, sorted(targets)))}'
        )
    return {
        'page_tokens': data['page_size_tokens'],
        'bin_width_tokens': data['bin_width_tokens'],
        'reserved_first_pages': data['reserved_first_pages'],
        'reserved_last_pages': data['reserved_last_pages'],
        'dense_layers': data['dense_layers'],
        'budget_pages': targets[config.target_p05]['budget_pages'],
    }


def _from_file(path: Path) -> dict[str, Any]:
    return read_object(path, f'schedule.path={path}')


def _check_policy(config: ScheduleConfig, policy: Any, name: str) -> None:
    known = ', '.join(policy_names())
    if policy is None:
        raise ConfigError(f'{name}: field {POLICY_FIELD} is missing; it says how the budgets were found: {known}')
    if policy not in policy_names():
        raise ConfigError(f'{name}: {POLICY_FIELD}={policy!r} must be one of {known}')
    if policy != config.policy:
        raise ConfigError(
            f'schedule.policy={config.policy!r}: the budgets of {name} were found with {policy!r}; set it to that'
        )


def check_calibration(
    config: ScheduleConfig, *, model: str, model_hash: Callable[[], str], dtype: str, temperature: float
) -> None:
    """Refuses a calibrated file whose budgets were found with something else than the run has.

    A file without the field 'calibration' says nothing of that, and is taken as it is.

    Args:
        config: which file, if any.
        model: of the run, for the sentence; model_hash: makes its hash, where a file asks for one.
        dtype, temperature: that the run samples with.

    Raises:
        ConfigError: another model, dtype or temperature.
    """
    if 'file' not in (config.kind, config.start if config.kind == 'adaptive' else ''):
        return
    name = f'schedule.path={config.path}'
    facts = _from_file(Path(config.path)).get(CALIBRATION_FIELD)
    if facts is None:
        return
    wanted = ('model', 'model_hash', 'dtype', 'temperature')
    if not isinstance(facts, Mapping) or (missing := [field for field in wanted if field not in facts]):
        which = f'; {missing[0]} is missing' if isinstance(facts, Mapping) else ''
        raise ConfigError(f'{name}: {CALIBRATION_FIELD} must be an object with {", ".join(wanted)}{which}')
    anew = 'or calibrate anew (python -m sparrow_jax.calibrate)'
    for field, have, found in (
        ('model.compute_dtype', dtype, facts['dtype']),
        ('rollout.temperature', temperature, facts['temperature']),
    ):
        if have != found:
            raise ConfigError(
                f'{field}={have!r}: the budgets of {name} were found with {found!r}; set it to that, {anew}'
            )
    if (own := model_hash()) != facts['model_hash']:
        raise ConfigError(
            f'{name}: its budgets were found on another model ({facts["model"]}, hash {facts["model_hash"]!s:.12}) '
            f'than this run begins with ({model}, hash {own:.12}); calibrate it (python -m sparrow_jax.calibrate), '
            f'or take {CALIBRATION_FIELD!r} out of the file to use them all the same'
        )


def to_file(schedule: Schedule) -> dict[str, Any]:
    """The JSON object from which `schedule.kind` = 'file' reads the schedule back."""
    return {
        'page_tokens': schedule.page_tokens,
        'bin_width_tokens': schedule.bin_width_tokens,
        'reserved_first_pages': schedule.reserved_first,
        'reserved_last_pages': schedule.reserved_last,
        'dense_layers': list(schedule.dense_layers),
        'budget_pages': list(schedule.budget_pages),
        POLICY_FIELD: schedule.policy.value,
    }


def _checked(kind: str, raw: Mapping[str, Any], name: str) -> Schedule:
    for field in FILE_FIELDS:
        if field not in raw:
            raise ConfigError(f'{name}: field {field} is missing; a schedule holds {", ".join(FILE_FIELDS)}')

    def integer(field: str, value: Any, least: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f'{name}: {field}={value!r} must be an integer of at least {least}')
        if value > MOST:
            raise ConfigError(f'{name}: {field}={value!r} must be at most {MOST}')
        return value

    def integers(field: str, least: int) -> tuple[int, ...]:
        if not isinstance(raw[field], list | tuple):
            raise ConfigError(f'{name}: {field}={raw[field]!r} must be a list of integers')
        return tuple(integer(field, value, least) for value in raw[field])

    schedule = Schedule(
        kind=kind,
        page_tokens=integer('page_tokens', raw['page_tokens'], 8),
        bin_width_tokens=integer('bin_width_tokens', raw['bin_width_tokens'], 1),
        reserved_first=integer('reserved_first_pages', raw['reserved_first_pages'], 1),
        reserved_last=integer('reserved_last_pages', raw['reserved_last_pages'], 1),
        dense_layers=integers('dense_layers', 0),
        budget_pages=integers('budget_pages', 0),
    )
    if len(set(schedule.dense_layers)) < len(schedule.dense_layers):
        raise ConfigError(f'{name}: dense_layers={schedule.dense_layers} names a layer twice')
    if not schedule.budget_pages:
        raise ConfigError(f'{name}: budget_pages is empty')
    return schedule
