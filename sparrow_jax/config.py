"""The frozen, validated form of a run's configuration.

`configs/*.py` give an ml_collections ConfigDict (see `configs/base.py` for the meaning and unit of every field);
`resolve` turns it into `RunConfig`, once, at the start of each command. No ConfigDict goes further than this file.
Checks that need a checkpoint or a data file stand where those are read; everything that can be known from the fields
alone is checked here, before any weight is read.
"""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any

from sparrow_jax.config_checks import validate_run
from sparrow_jax.console import notice_once

LANDMARK_ROWS = 8  # landmarks that a kernel's copy takes at once
ROW_MULTIPLE = 128  # tokens of a learner row
INT32 = 2**31 - 1  # the device counts with int32
MOST = {'seed': 2**63 - 1, 'data.seed': 2**63 - 1}
# Limits that then do nothing.
MAY_BE_INFINITE = (
    'learner.correction_high',
    'learner.clip_high',
    'critic.clip',
    'optimizer.max_grad_norm',
    'distill.tis_cap',
    'distill.clip_high',
    'distill.max_grad_norm',
)


class ConfigError(ValueError):
    """A setting, file or folder that the user can mend; the commands print it as one sentence, without a traceback."""


@dataclasses.dataclass(frozen=True)
class ShapeConfig:
    """Sizes of a decoder, in elements; `max_positions` in tokens, `rope_theta` is the base of the rotary embedding."""

    family: str
    vocab_size: int
    d_model: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool
    max_positions: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    path: str
    random_weights: bool
    compute_dtype: str
    param_dtype: str
    remat: bool
    shape: ShapeConfig


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    path: str
    chat_template: str
    system_prompt: str
    template_options: Mapping[str, Any]
    end_tokens: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    source: str
    layout: str
    options: str
    train_examples: int
    seed: int
    eval_source: str
    eval_examples: int
    cache_dir: str
    instruction: str
    answer_format: str


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    function: str
    correct_threshold: float
    format_bonus: float
    workers: int
    timeout_s: float
    overlong_buffer_tokens: int
    overlong_penalty: float


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    prompts_per_step: int
    samples_per_prompt: int
    extra_batches: int
    slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    page_tokens: int
    pool_pages: int
    temperature: float
    segment_steps: int
    prefill_rows: int
    halvings: int
    kernels: str

    @property
    def pages_per_sequence(self) -> int:
        """N: logical pages of the longest sequence, rounded up so that bulk copies of landmarks need no padding."""
        pages = -(-(self.max_prompt_tokens + self.max_response_tokens) // self.page_tokens)
        return -(-pages // LANDMARK_ROWS) * LANDMARK_ROWS


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    kind: str
    start: str
    budget_pages: int
    model: str
    target_p05: float
    path: str
    reserved_first_pages: int
    reserved_last_pages: int
    dense_layers: tuple[int, ...]
    policy: str


@dataclasses.dataclass(frozen=True)
class ControllerConfig:
    target_p05: float
    probes: int
    min_count: int
    urgent_count: int
    tolerance: float
    least_pages: int
    most_pages: int


@dataclasses.dataclass(frozen=True)
class GuardConfig:
    action: str
    window_steps: int
    least_p05: float
    least_length_share: float
    least_entropy_share: float


@dataclasses.dataclass(frozen=True)
class MismatchConfig:
    every_steps: int
    bin_width_tokens: int
    min_count: int
    floor_every_steps: int
    floor_sequences: int


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    advantage: str
    updates_per_step: int
    rows_per_microbatch: int
    row_tokens: int
    packing: str
    head_chunk_tokens: int
    ratio: str
    clip_low: float
    clip_high: float
    aggregation: str
    correction: str
    correction_low: float
    correction_high: float
    kl_coef: float
    kl_placement: str
    mask_truncated: bool


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    kind: str
    learning_rate: float
    clip: float
    gamma: float
    lam: float
    passes: int
    warmup_steps: int


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    learning_rate: float
    warmup_steps: int
    decay_steps: int
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    enabled: bool
    rank: int
    alpha: float
    targets: tuple[str, ...]
    pg_coef: float
    kl_coef: float
    clip_low: float
    clip_high: float
    tis_cap: float
    updates_per_step: int
    learning_rate: float
    warmup_steps: int
    max_grad_norm: float


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    every_steps: int
    samples: int
    temperature: float
    top_p: float


@dataclasses.dataclass(frozen=True)
class CalibrateConfig:
    contexts: str
    prompts: str
    texts: str
    sequences: int
    response_tokens: int
    forced_lengths: bool
    budget_tokens: tuple[int, ...]
    page_tokens: tuple[int, ...]
    policies: tuple[str, ...]
    target_p05: float


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int
    keep: int


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    data: int
    fsdp: int
    tensor: int
    distributed: str = 'off'
    coordinator: str = ''
    processes: int = 0
    process: int = -1


@dataclasses.dataclass(frozen=True)
class LogConfig:
    samples_per_step: int


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All settings of one run."""

    seed: int
    steps: int
    phase: str
    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    reward: RewardConfig
    rollout: RolloutConfig
    schedule: ScheduleConfig
    controller: ControllerConfig
    guard: GuardConfig
    mismatch: MismatchConfig
    learner: LearnerConfig
    critic: CriticConfig
    optimizer: OptimizerConfig
    distill: DistillConfig
    evaluate: EvaluateConfig
    calibrate: CalibrateConfig
    checkpoint: CheckpointConfig
    parallel: ParallelConfig
    log: LogConfig

    @property
    def row_tokens(self) -> int:
        """Tokens of a learner row."""
        return self.learner.row_tokens or self.longest_row_tokens

    @property
    def longest_row_tokens(self) -> int:
        """Tokens of a row that holds the longest prompt and response, and no more."""
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        return -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE


def resolve(config: Mapping[str, Any]) -> RunConfig:
    """Turns a ConfigDict (or a plain nested mapping, as in a workdir's config.json) into a validated RunConfig.

    Raises ConfigError that names the field, its value and what to set instead.
    """
    run = _build(RunConfig, config, '')
    validate(run)
    return run


def to_json(run: RunConfig) -> str:
    """The canonical text of a configuration, as `config.json` of a workdir holds it."""
    return json.dumps(dataclasses.asdict(run), indent=2, sort_keys=True) + '\n'


def with_new_fields(stored: Mapping[str, Any], file: str, run: RunConfig | None = None) -> dict[str, Any]:
    """A configuration that an earlier version stored, with the fields that have come since.

    They are said on the console: what that version did may have been something else.

    Args:
        file: where it is stored, for messages.
        run: has their values, as where a run goes on; by default they are those of configs/base.py.

    Raises:
        ConfigError: it is no configuration, as where the folder is a checkpoint's.
    """
    from configs import base  # the defaults; it imports no more than ml_collections

    fields = base.get_config().to_dict() if run is None else dataclasses.asdict(run)
    if foreign := [name for name in stored if name not in fields]:
        raise ConfigError(f'{file}: is not the configuration of a run (there is no field {foreign[0]})')
    if not all(section in stored for section in ('model', 'rollout')):
        raise ConfigError(f'{file}: is not the configuration of a run (it has no model or no rollout)')
    added: list[str] = []

    def fill(values: Mapping[str, Any], whole: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        filled = dict(values)
        for name, value in whole.items():
            if name not in values:
                filled[name] = value
                added.append(f'{prefix}{name}={value}')
            # Options of a chat template are free: none of them is missing.
            elif isinstance(value, Mapping) and isinstance(values[name], Mapping) and name != 'template_options':
                filled[name] = fill(values[name], value, f'{prefix}{name}.')
        return filled

    complete = fill(stored, fields, '')
    if added:
        notice_once(f'{file}: of an earlier version, which had no {", ".join(added)}')
    return json.loads(json.dumps(complete))


def differing_fields(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = '') -> list[str]:
    """Lines 'field: old -> new' for every leaf in which two nested mappings differ."""
    lines = []
    for key in sorted(set(old) | set(new)):
        name, a, b = f'{prefix}{key}', old.get(key, '(absent)'), new.get(key, '(absent)')
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differing_fields(a, b, f'{name}.')
        elif a != b:
            lines.append(f'{name}: {a!r} -> {b!r}')
    return lines


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ConfigError(f'{prefix}{unknown[0]}: no such field; configs/base.py lists them all')
    built = {}
    for name in names:
        if name not in values:
            raise ConfigError(f'{prefix}{name}: missing; start the config from configs/base.py')
        built[name] = _convert(hints[name], values[name], f'{prefix}{name}')
    return cls(**built)


def _convert(kind: Any, value: Any, name: str) -> Any:
    origin = typing.get_origin(kind)
    if (dataclasses.is_dataclass(kind) or origin is Mapping) and not hasattr(value, 'keys'):
        raise ConfigError(f'{name}={value!r}: must be a section with fields of its own')
    if dataclasses.is_dataclass(kind):
        return _build(typing.cast(type, kind), value, f'{name}.')
    if origin is tuple:
        if isinstance(value, str) or not hasattr(value, '__iter__'):
            raise ConfigError(f'{name}={value!r}: must be a tuple')
        return tuple(_convert(typing.get_args(kind)[0], v, name) for v in value)
    if origin is Mapping:
        return dict(value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (kind is int and isinstance(value, bool)) or not isinstance(value, kind):
        raise ConfigError(f'{name}={value!r}: must be of type {kind.__name__}')
    if kind is int and abs(value) > MOST.get(name, INT32):
        raise ConfigError(f'{name}={value!r}: must be at most {MOST.get(name, INT32)}')
    if kind is float and math.isinf(value) and name not in MAY_BE_INFINITE:
        raise ConfigError(f'{name}={value!r}: must be finite')
    return value


def validate(run: RunConfig) -> None:
    """Checks every field and combination that can be judged without files. Raises ConfigError."""

    def need(ok: bool, field: str, value: Any, what: str) -> None:
        if not ok:
            raise ConfigError(f'{field}={value!r}: {what}')

    def one_of(field: str, value: Any, choices: tuple[str, ...]) -> None:
        need(value in choices, field, value, f'must be one of {", ".join(choices)}')

    validate_run(run, need, one_of)
