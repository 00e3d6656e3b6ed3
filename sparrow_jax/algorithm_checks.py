"""Which combinations of algorithm settings make sense; `config.validate` asks. Imports no JAX: a mistake need not wait
for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparrow_jax.config import RunConfig

# As `learner/` has them.
ADVANTAGES = ('grpo', 'dr_grpo', 'rloo', 'reinforce_pp', 'reinforce_pp_baseline', 'gae')
COMPARING = ('grpo', 'dr_grpo', 'rloo', 'reinforce_pp_baseline')  # the samples of a prompt with each other
OF_RESPONSES = ('grpo', 'dr_grpo', 'rloo')  # the same for all tokens of a response, and final before scoring
OF_TOKENS = ('reinforce_pp', 'gae')  # have a reward for each token
RATIOS = ('token', 'sequence')
CORRECTIONS = ('none', 'tis', 'token_mask', 'sequence_mask', 'icepop')
TWO_SIDED = ('sequence_mask', 'icepop')
AGGREGATIONS = ('token_mean', 'sequence_mean', 'constant')
CRITICS = ('none', 'head', 'trunk')
KL_PLACEMENTS = ('loss', 'reward')

Need = Callable[[bool, str, Any, str], None]
OneOf = Callable[[str, Any, tuple[str, ...]], None]


def validate_algorithm(run: RunConfig, need: Need, one_of: OneOf) -> None:
    """Checks the settings that choose the algorithm. need, one_of: raise ConfigError, see `config.validate`."""
    le, rollout, reward = run.learner, run.rollout, run.reward
    one_of('learner.advantage', le.advantage, ADVANTAGES)
    one_of('learner.ratio', le.ratio, RATIOS)
    one_of('learner.aggregation', le.aggregation, AGGREGATIONS)
    one_of('learner.correction', le.correction, CORRECTIONS)
    one_of('learner.kl_placement', le.kl_placement, KL_PLACEMENTS)
    compares = le.advantage in COMPARING
    need(
        run.phase != 'rl' or not compares or rollout.samples_per_prompt > 1,
        'rollout.samples_per_prompt',
        rollout.samples_per_prompt,
        f'{le.advantage} compares the samples of a prompt: set at least 2',
    )
    need(0 <= le.clip_low < 1, 'learner.clip_low', le.clip_low, 'must be in [0, 1)')
    need(le.clip_high >= 0, 'learner.clip_high', le.clip_high, 'must not be negative')
    _validate_correction(run, need)
    need(le.kl_coef >= 0, 'learner.kl_coef', le.kl_coef, 'must not be negative')
    need(
        le.kl_placement == 'loss' or le.advantage in OF_TOKENS,
        'learner.kl_placement',
        le.kl_placement,
        f'{le.advantage} has one reward a response, not one a token; set loss, or learner.advantage to '
        f'{" or ".join(OF_TOKENS)}',
    )

    need(rollout.extra_batches >= 0, 'rollout.extra_batches', rollout.extra_batches, 'must not be negative (0 = none)')
    need(
        rollout.extra_batches == 0 or compares,
        'rollout.extra_batches',
        rollout.extra_batches,
        f'prompts whose rewards are all equal do teach {le.advantage} something; set 0',
    )
    need(
        0 <= reward.overlong_buffer_tokens <= rollout.max_response_tokens,
        'reward.overlong_buffer_tokens',
        reward.overlong_buffer_tokens,
        f'must be from 0 to rollout.max_response_tokens={rollout.max_response_tokens}',
    )
    penalty = reward.overlong_penalty
    need(
        math.isfinite(penalty) and penalty >= 0,
        'reward.overlong_penalty',
        penalty,
        'must be a finite number that is not negative: it is taken off the reward',
    )
    _validate_critic(run, need, one_of)


def _validate_correction(run: RunConfig, need: Need) -> None:
    le = run.learner
    if le.correction == 'none':
        return
    need(
        le.correction_high > 0,
        'learner.correction_high',
        le.correction_high,
        'must be positive; learner.correction=none corrects nothing',
    )
    if le.correction in TWO_SIDED:
        need(
            0 < le.correction_low < 1 < le.correction_high,
            'learner.correction_low',
            le.correction_low,
            f'{le.correction} keeps weights from correction_low to correction_high={le.correction_high}, with 1 '
            'between them; both must be set for it',
        )
    else:
        need(
            le.correction_low == 0,
            'learner.correction_low',
            le.correction_low,
            f'{le.correction} has no lower limit; set 0, or learner.correction to {" or ".join(TWO_SIDED)}',
        )


def _validate_critic(run: RunConfig, need: Need, one_of: OneOf) -> None:
    c, advantage = run.critic, run.learner.advantage
    one_of('critic.kind', c.kind, CRITICS)
    need(
        c.kind != 'none' or advantage != 'gae',
        'critic.kind',
        c.kind,
        'learner.advantage=gae needs values; set head or trunk',
    )
    need(
        c.kind == 'none' or advantage == 'gae',
        'critic.kind',
        c.kind,
        f'learner.advantage={advantage} uses no values; set none, or learner.advantage=gae',
    )
    need(
        c.kind == 'none' or run.phase == 'rl',
        'critic.kind',
        c.kind,
        f'phase={run.phase} has no rewards; set learner.advantage=grpo and no critic',
    )
    need(c.learning_rate >= 0, 'critic.learning_rate', c.learning_rate, 'must not be negative')
    need(c.clip > 0, 'critic.clip', c.clip, 'must be positive (inf = no limit)')
    for field in ('gamma', 'lam'):
        value = getattr(c, field)
        need(0 <= value <= 1, f'critic.{field}', value, 'must be in [0, 1]')
    need(c.passes >= 1, 'critic.passes', c.passes, 'must be at least 1')
    need(c.warmup_steps >= 0, 'critic.warmup_steps', c.warmup_steps, 'must not be negative')
    need(
        c.kind == 'none' or c.warmup_steps < max(run.steps, 1),
        'critic.warmup_steps',
        c.warmup_steps,
        f'must be fewer than steps={run.steps}, or the policy never learns',
    )
