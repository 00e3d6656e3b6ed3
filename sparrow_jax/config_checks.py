"""What a run's settings must be, alone and together, as far as can be known without files: `config.resolve` asks.

Imports no JAX: a mistake need not wait for it. Algorithms have a file of their own, `algorithm_checks`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING

from pallas_kernels.implementation import Implementation
from sparrow_jax.algorithm_checks import OF_RESPONSES, Need, OneOf, validate_algorithm

if TYPE_CHECKING:
    from sparrow_jax.config import RunConfig

GUARD_ACTIONS = ('none', 'widen', 'dense', 'stop')
# The operations' own ones; they import JAX, for which a mistake need not wait.
POLICIES = ('block_mean', 'quest', 'group_softmax')
MOST_CHUNK_TOKENS = 256
CONTEXTS = ('dense_samples', 'sparse_samples')
ADAPTER_TARGETS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
SCHEDULE_STARTS = ('dense', 'fixed', 'published', 'file')
SCHEDULE_KINDS = (*SCHEDULE_STARTS, 'adaptive')
DAY_S = 86_400.0
DTYPES = ('bfloat16', 'float32')
DISTRIBUTED = ('off', 'auto', 'address')
LAYOUTS = ('auto', 'polaris', 'dapo_math', 'gsm8k', 'aime', 'amc', 'math500', 'problem_answer')


def validate_run(run: RunConfig, need: Need, one_of: OneOf) -> None:
    """Checks every field and combination. need, one_of: raise ConfigError, see `config.validate`."""
    one_of('phase', run.phase, ('rl', 'supervised'))
    need(run.steps >= 0, 'steps', run.steps, 'must not be negative')
    _validate_model(run, need, one_of)
    _validate_rollout(run, need, one_of)
    _validate_schedule(run, need, one_of)
    _validate_guard(run, need, one_of)
    _validate_mismatch(run, need)
    validate_algorithm(run, need, one_of)
    _validate_learner(run, need, one_of)
    _validate_optimizer(run, need)
    _validate_distill(run, need, one_of)
    _validate_data(run, need, one_of)
    _validate_reward(run, need)
    _validate_evaluate(run, need)
    _validate_calibrate(run, need, one_of)
    need(run.checkpoint.keep >= 1, 'checkpoint.keep', run.checkpoint.keep, 'must be at least 1')
    need(run.checkpoint.every_steps >= 1, 'checkpoint.every_steps', run.checkpoint.every_steps, 'must be at least 1')
    need(run.log.samples_per_step >= 0, 'log.samples_per_step', run.log.samples_per_step, 'must not be negative')
    _validate_parallel(run, need, one_of)


def _validate_model(run: RunConfig, need: Need, one_of: OneOf) -> None:
    one_of('model.compute_dtype', run.model.compute_dtype, DTYPES)
    one_of('model.param_dtype', run.model.param_dtype, DTYPES)
    shape = run.model.shape
    if run.model.random_weights:
        need(
            not run.model.path,
            'model.path',
            run.model.path,
            'is set beside model.random_weights=True; keep one of them',
        )
        one_of('model.shape.family', shape.family, ('qwen3', 'llama'))
        for field, value in dataclasses.asdict(shape).items():
            if field not in ('family', 'tie_embeddings'):
                need(value > 0, f'model.shape.{field}', value, 'must be positive for random weights')
        need(
            shape.query_heads % shape.kv_heads == 0,
            'model.shape.query_heads',
            shape.query_heads,
            f'must be a multiple of model.shape.kv_heads={shape.kv_heads}',
        )
        need(shape.head_dim % 2 == 0, 'model.shape.head_dim', shape.head_dim, 'must be even (rotary embedding)')
    else:
        need(
            bool(run.model.path),
            'model.path',
            '',
            'set it to a checkpoint folder or .gguf file, or a name of one (or set model.random_weights=True)',
        )


def _validate_rollout(run: RunConfig, need: Need, one_of: OneOf) -> None:
    r = run.rollout
    for field in (
        'prompts_per_step',
        'samples_per_prompt',
        'slots',
        'max_prompt_tokens',
        'max_response_tokens',
        'segment_steps',
        'prefill_rows',
    ):
        need(getattr(r, field) > 0, f'rollout.{field}', getattr(r, field), 'must be positive')
    need(r.halvings >= 0, 'rollout.halvings', r.halvings, 'must not be negative; 0 compiles one segment, for all slots')
    need(
        8 <= r.page_tokens <= 128 and r.page_tokens & (r.page_tokens - 1) == 0,
        'rollout.page_tokens',
        r.page_tokens,
        'must be a power of two from 8 to 128',
    )
    need(
        r.pool_pages == 0 or r.pool_pages >= r.pages_per_sequence,
        'rollout.pool_pages',
        r.pool_pages,
        f'cannot hold one longest sequence, which needs {r.pages_per_sequence} pages; 0 makes the pool fit',
    )
    need(
        r.temperature > 0,
        'rollout.temperature',
        r.temperature,
        'must be positive: training samples from the full softmax',
    )

    one_of('rollout.kernels', r.kernels, ('auto', *Implementation))


def _validate_schedule(run: RunConfig, need: Need, one_of: OneOf) -> None:
    r, s, shape = run.rollout, run.schedule, run.model.shape
    one_of('schedule.kind', s.kind, SCHEDULE_KINDS)
    one_of('schedule.policy', s.policy, _known_policies(s.policy))
    need(
        r.kernels in ('auto', Implementation.REFERENCE) or s.policy == POLICIES[0],
        'rollout.kernels',
        r.kernels,
        f'schedule.policy={s.policy} has no kernels, JAX definitions choose its pages; set it to auto or reference',
    )
    need(
        s.reserved_first_pages >= 1,
        'schedule.reserved_first_pages',
        s.reserved_first_pages,
        'must be at least 1: the first page holds the attention sink',
    )
    need(
        s.reserved_last_pages >= 1,
        'schedule.reserved_last_pages',
        s.reserved_last_pages,
        'must be at least 1: the page being written has no landmark yet',
    )
    need(all(i >= 0 for i in s.dense_layers), 'schedule.dense_layers', s.dense_layers, 'layer numbers start at 0')
    if run.model.random_weights:
        need(
            all(i < shape.layers for i in s.dense_layers),
            'schedule.dense_layers',
            s.dense_layers,
            f'the model has {shape.layers} layers',
        )
    one_of('schedule.start', s.start, SCHEDULE_STARTS)
    if s.kind == 'adaptive':
        _validate_controller(run, need)
    start = s.start if s.kind == 'adaptive' else s.kind
    if start == 'fixed':
        need(s.budget_pages >= 1, 'schedule.budget_pages', s.budget_pages, 'must be at least 1')
    if start == 'file':
        need(bool(s.path), 'schedule.path', '', 'a schedule from a file needs the path of a schedule.json')


def _validate_controller(run: RunConfig, need: Need) -> None:
    c = run.controller
    need(0 < c.target_p05 < 1, 'controller.target_p05', c.target_p05, 'must be in (0, 1)')
    need(c.probes >= 1, 'controller.probes', c.probes, 'must be at least 1')
    need(
        c.probes < run.rollout.slots,
        'controller.probes',
        c.probes,
        f'must be fewer than rollout.slots={run.rollout.slots}: some sequences go without',
    )
    pages, longest = run.rollout.pool_pages, run.rollout.pages_per_sequence
    need(
        pages == 0 or pages >= 2 * longest,
        'rollout.pool_pages',
        pages,
        f'must hold both caches of one longest probe, 2 x {longest} pages; 0 makes the pool fit',
    )
    need(c.urgent_count >= 1, 'controller.urgent_count', c.urgent_count, 'must be at least 1')
    need(
        c.min_count >= c.urgent_count,
        'controller.min_count',
        c.min_count,
        f'must be at least controller.urgent_count={c.urgent_count}',
    )
    need(0 <= c.tolerance < 1, 'controller.tolerance', c.tolerance, 'must be in [0, 1)')
    need(
        1 <= c.least_pages <= longest,
        'controller.least_pages',
        c.least_pages,
        f'must be at least 1 and at most the {longest} pages of a sequence',
    )
    need(
        c.most_pages == 0 or c.least_pages <= c.most_pages <= longest,
        'controller.most_pages',
        c.most_pages,
        f'must be 0 (no limit), or from controller.least_pages={c.least_pages} to the {longest} pages of a sequence',
    )
    width = run.mismatch.bin_width_tokens
    need(
        width >= run.rollout.page_tokens,
        'mismatch.bin_width_tokens',
        width,
        f'a length bin of an adaptive schedule holds at least a page, rollout.page_tokens={run.rollout.page_tokens}',
    )
    need(
        run.rollout.segment_steps <= MOST_CHUNK_TOKENS,
        'rollout.segment_steps',
        run.rollout.segment_steps,
        f'an adaptive schedule scores a segment at once: set at most {MOST_CHUNK_TOKENS}',
    )


def _validate_guard(run: RunConfig, need: Need, one_of: OneOf) -> None:
    one_of('guard.action', run.guard.action, GUARD_ACTIONS)
    if run.guard.action in ('widen', 'dense'):
        need(
            run.schedule.kind != 'dense',
            'guard.action',
            run.guard.action,
            "schedule.kind='dense' reads everything already",
        )
    need(run.guard.window_steps >= 1, 'guard.window_steps', run.guard.window_steps, 'must be at least 1')
    for field in ('least_p05', 'least_length_share', 'least_entropy_share'):
        value = getattr(run.guard, field)
        need(0 <= value < 1, f'guard.{field}', value, 'must be in [0, 1) (0 = not watched)')


def _validate_mismatch(run: RunConfig, need: Need) -> None:
    need(run.mismatch.every_steps >= 0, 'mismatch.every_steps', run.mismatch.every_steps, 'must not be negative')
    need(
        run.mismatch.bin_width_tokens > 0,
        'mismatch.bin_width_tokens',
        run.mismatch.bin_width_tokens,
        'must be positive',
    )
    need(run.mismatch.min_count > 0, 'mismatch.min_count', run.mismatch.min_count, 'must be positive')
    floor = run.mismatch.floor_every_steps
    need(floor >= 0, 'mismatch.floor_every_steps', floor, 'must not be negative (0 = never)')
    need(run.mismatch.floor_sequences > 0, 'mismatch.floor_sequences', run.mismatch.floor_sequences, 'must be positive')


def _validate_learner(run: RunConfig, need: Need, one_of: OneOf) -> None:
    r, le = run.rollout, run.learner
    need(le.updates_per_step >= 1, 'learner.updates_per_step', le.updates_per_step, 'must be at least 1')
    need(
        r.prompts_per_step % le.updates_per_step == 0,
        'learner.updates_per_step',
        le.updates_per_step,
        f'must divide rollout.prompts_per_step={r.prompts_per_step}, so that groups stay whole',
    )
    need(le.rows_per_microbatch >= 1, 'learner.rows_per_microbatch', le.rows_per_microbatch, 'must be at least 1')
    one_of('learner.packing', le.packing, ('on', 'off', 'auto'))
    longest = r.max_prompt_tokens + r.max_response_tokens
    need(
        run.row_tokens >= longest,
        'learner.row_tokens',
        le.row_tokens,
        f'must hold the longest prompt + response, {longest} tokens (0 sets it)',
    )
    need(le.head_chunk_tokens >= 1, 'learner.head_chunk_tokens', le.head_chunk_tokens, 'must be at least 1')


def _validate_optimizer(run: RunConfig, need: Need) -> None:
    o = run.optimizer
    for field in ('learning_rate', 'warmup_steps', 'decay_steps', 'weight_decay'):
        need(getattr(o, field) >= 0, f'optimizer.{field}', getattr(o, field), 'must not be negative')
    for field in ('beta1', 'beta2'):
        need(0 <= getattr(o, field) < 1, f'optimizer.{field}', getattr(o, field), 'must be in [0, 1)')
    need(o.eps > 0, 'optimizer.eps', o.eps, 'must be positive: a weight without gradient would become NaN')
    need(o.max_grad_norm > 0, 'optimizer.max_grad_norm', o.max_grad_norm, 'must be positive')


def _validate_distill(run: RunConfig, need: Need, one_of: OneOf) -> None:
    d = run.distill
    need(d.rank >= 1, 'distill.rank', d.rank, 'must be at least 1')
    need(d.alpha > 0, 'distill.alpha', d.alpha, 'must be positive')
    for target in d.targets:
        one_of('distill.targets', target, ADAPTER_TARGETS)
    need(0 < len(d.targets) == len(set(d.targets)), 'distill.targets', d.targets, 'must be one or more, each once')
    for field in ('pg_coef', 'kl_coef', 'clip_high', 'tis_cap', 'learning_rate', 'warmup_steps'):
        need(getattr(d, field) >= 0, f'distill.{field}', getattr(d, field), 'must not be negative')
    need(d.pg_coef > 0 or d.kl_coef > 0, 'distill.kl_coef', d.kl_coef, 'must be positive where distill.pg_coef is 0')
    need(0 <= d.clip_low < 1, 'distill.clip_low', d.clip_low, 'must be in [0, 1)')
    need(d.updates_per_step >= 1, 'distill.updates_per_step', d.updates_per_step, 'must be at least 1')
    need(d.max_grad_norm > 0, 'distill.max_grad_norm', d.max_grad_norm, 'must be positive')
    if not d.enabled:
        return
    instead = 'set distill.enabled=False or another'
    need(run.phase == 'rl', 'phase', run.phase, f'there is no sampler for distill.enabled=True; {instead} phase')
    kind, policy = run.schedule.kind, run.schedule.policy
    need(
        kind != 'dense',
        'schedule.kind',
        kind,
        f'distill.enabled=True teaches a sparse sampler; {instead} schedule.kind',
    )
    need(
        policy == POLICIES[0],
        'schedule.policy',
        policy,
        f'distill.enabled=True needs a teacher-forced pass, which there is for {POLICIES[0]} alone; {instead} policy',
    )
    need(
        d.pg_coef == 0 or run.learner.advantage in OF_RESPONSES,
        'distill.pg_coef',
        d.pg_coef,
        f"the adapter's update has the advantages of {', '.join(OF_RESPONSES)}, not of learner.advantage="
        f'{run.learner.advantage!r}; set 0 or one of those',
    )


def _validate_data(run: RunConfig, need: Need, one_of: OneOf) -> None:
    need(
        bool(run.data.source), 'data.source', '', "set 'reasoning_gym:<task>' or the path of a .jsonl or .parquet file"
    )
    one_of('data.layout', run.data.layout, LAYOUTS)
    one_of('data.answer_format', run.data.answer_format, ('boxed', 'tag'))
    try:
        options = json.loads(run.data.options or '{}')
    except (ValueError, RecursionError) as error:
        need(False, 'data.options', run.data.options, f'must be a JSON object ({error})')
    else:
        need(isinstance(options, dict), 'data.options', run.data.options, 'must be a JSON object')


def _validate_reward(run: RunConfig, need: Need) -> None:
    need(run.reward.workers >= 1, 'reward.workers', run.reward.workers, 'must be at least 1')
    timeout_s = run.reward.timeout_s
    need(0 < timeout_s <= DAY_S, 'reward.timeout_s', timeout_s, f'must be positive, and at most a day ({DAY_S:.0f})')
    for field in ('correct_threshold', 'format_bonus'):
        value = getattr(run.reward, field)
        need(math.isfinite(value), f'reward.{field}', value, 'must be a finite number')
    if run.reward.function:
        parts = run.reward.function.split(':')
        names = [part.replace('.', '') for part in parts]
        need(
            len(parts) == 2 and all(name.isidentifier() for name in names) and not parts[0].startswith('.'),
            'reward.function',
            run.reward.function,
            "must be 'module:function'",
        )


def _validate_evaluate(run: RunConfig, need: Need) -> None:
    e = run.evaluate
    need(e.every_steps >= -1, 'evaluate.every_steps', e.every_steps, 'must be at least -1 (-1 = never)')
    need(e.samples >= 1, 'evaluate.samples', e.samples, 'must be at least 1')
    need(e.temperature >= 0, 'evaluate.temperature', e.temperature, 'must not be negative (0 = greedy)')
    need(0 < e.top_p <= 1, 'evaluate.top_p', e.top_p, 'must be in (0, 1]')


def _validate_calibrate(run: RunConfig, need: Need, one_of: OneOf) -> None:
    c, r = run.calibrate, run.rollout
    one_of('calibrate.contexts', c.contexts, CONTEXTS)
    need(
        not c.texts or c.contexts == 'dense_samples',
        'calibrate.contexts',
        c.contexts,
        f'calibrate.texts={c.texts!r} says what to measure on, nothing is sampled; set one of the two',
    )
    need(
        not c.texts or not c.prompts,
        'calibrate.prompts',
        c.prompts,
        f'calibrate.texts={c.texts!r} takes the place of prompts; set one of the two',
    )
    need(c.sequences >= 2, 'calibrate.sequences', c.sequences, 'must be at least 2: no confidence comes from one')
    need(
        c.response_tokens == 0 or 2 <= c.response_tokens <= r.max_response_tokens,
        'calibrate.response_tokens',
        c.response_tokens,
        f'must be from 2 to rollout.max_response_tokens={r.max_response_tokens}, or 0 for that many',
    )
    for page in c.page_tokens:
        need(
            8 <= page <= 128 and page & (page - 1) == 0,
            'calibrate.page_tokens',
            c.page_tokens,
            'must be powers of two from 8 to 128',
        )
    largest = max(c.page_tokens or (r.page_tokens,))
    need(
        all(budget > 0 and budget % largest == 0 for budget in c.budget_tokens),
        'calibrate.budget_tokens',
        c.budget_tokens,
        f'budgets are compared at whole pages: must be multiples of {largest}, the largest page size',
    )
    for field in ('budget_tokens', 'page_tokens', 'policies'):
        values = getattr(c, field)
        need(len(set(values)) == len(values), f'calibrate.{field}', values, 'names one twice')
    for policy in c.policies:
        one_of('calibrate.policies', policy, _known_policies(policy))
    need(
        r.kernels in ('auto', Implementation.REFERENCE) or set(c.policies) <= {POLICIES[0]},
        'calibrate.policies',
        c.policies,
        f'only {POLICIES[0]} has kernels, and rollout.kernels={r.kernels!r} insists on them; set that to auto',
    )
    need(0 < c.target_p05 < 1, 'calibrate.target_p05', c.target_p05, 'must be in (0, 1)')


def _validate_parallel(run: RunConfig, need: Need, one_of: OneOf) -> None:
    p = run.parallel
    for axis in ('data', 'fsdp', 'tensor'):
        value = getattr(p, axis)
        need(value == -1 or value >= 1, f'parallel.{axis}', value, 'must be positive, or -1 for all remaining devices')
    one_of('parallel.distributed', p.distributed, DISTRIBUTED)
    if p.distributed != 'address':
        unused = f"is for parallel.distributed='address', which is {p.distributed!r}; leave it out"
        need(not p.coordinator, 'parallel.coordinator', p.coordinator, unused)
        need(p.processes == 0, 'parallel.processes', p.processes, unused)
        need(p.process == -1, 'parallel.process', p.process, unused)
        return
    host, _, port = p.coordinator.rpartition(':')
    need(
        bool(host) and port.isdecimal() and 0 < int(port) < 2**16,
        'parallel.coordinator',
        p.coordinator,
        "must be 'host:port', where the first process listens",
    )
    need(p.processes >= 1, 'parallel.processes', p.processes, 'must be the number of processes')
    need(
        0 <= p.process < p.processes,
        'parallel.process',
        p.process,
        f'must be from 0 to {p.processes - 1}, another one for each process',
    )


def _known_policies(asked: str) -> tuple[str, ...]:
    """The policies that there are; those that somebody registered are looked up when another than ours is asked for."""
    if asked in POLICIES:
        return POLICIES
    from pallas_kernels.page_select.policies import policy_names

    return policy_names()
