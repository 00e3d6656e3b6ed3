"""Published algorithms as settings, by name: `--config=configs/X.py:gspo`, or `:smoke,gspo`.

Each sets what distinguishes it in its paper and leaves all else to the configuration: learning rates, the number of
samples, the correction for the sparse sampler. docs/algorithms.md has the table with papers and remarks. A single
field can still be changed: `--config=configs/X.py:dapo --config.rollout.extra_batches=0`.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

# One update a batch makes every ratio 1; clipping then does nothing. The limits are those of the papers.
_PLAIN_CLIP = {'learner.clip_low': 0.2, 'learner.clip_high': 0.2}
_PPO = {
    'learner.advantage': 'gae',
    'learner.ratio': 'token',
    'learner.aggregation': 'token_mean',
    'learner.kl_placement': 'reward',
    **_PLAIN_CLIP,
}

ALGORITHMS: Mapping[str, Mapping[str, object]] = {
    'grpo': {
        'learner.advantage': 'grpo',
        'learner.ratio': 'token',
        'learner.aggregation': 'sequence_mean',
        **_PLAIN_CLIP,
    },
    'dr_grpo': {
        'learner.advantage': 'dr_grpo',
        'learner.ratio': 'token',
        'learner.aggregation': 'constant',
        'learner.kl_coef': 0.0,
        **_PLAIN_CLIP,
    },
    'rloo': {
        'learner.advantage': 'rloo',
        'learner.ratio': 'token',
        'learner.aggregation': 'token_mean',
        **_PLAIN_CLIP,
    },
    'reinforce_pp': {
        'learner.advantage': 'reinforce_pp',
        'learner.ratio': 'token',
        'learner.aggregation': 'token_mean',
        'learner.kl_placement': 'reward',
        **_PLAIN_CLIP,
    },
    'reinforce_pp_baseline': {
        'learner.advantage': 'reinforce_pp_baseline',
        'learner.ratio': 'token',
        'learner.aggregation': 'token_mean',
        **_PLAIN_CLIP,
    },
    'gspo': {
        'learner.advantage': 'grpo',
        'learner.ratio': 'sequence',
        'learner.aggregation': 'sequence_mean',
        'learner.clip_low': 3e-4,
        'learner.clip_high': 4e-4,
    },
    'dapo': {
        'learner.advantage': 'grpo',
        'learner.ratio': 'token',
        'learner.aggregation': 'token_mean',
        'learner.clip_low': 0.2,
        'learner.clip_high': 0.28,
        'learner.kl_coef': 0.0,
        'rollout.extra_batches': 3,
    },
    'ppo': {**_PPO, 'critic.kind': 'trunk'},
    'ppo_head': {**_PPO, 'critic.kind': 'head'},
}
OVERLONG_SHARE = 5  # DAPO punishes the last fifth of the longest response: 4,096 of 20,480 tokens


def apply(config: ConfigDict, name: str) -> None:
    """Sets the fields of a published algorithm, in place. Raises KeyError for an unknown name."""
    config.update_from_flattened_dict(ALGORITHMS[name])
    if name == 'dapo':
        config.reward.overlong_buffer_tokens = config.rollout.max_response_tokens // OVERLONG_SHARE
