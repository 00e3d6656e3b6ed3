"""Every field of a run, with its unit. A model file starts from `get_config` here and changes only what differs.

Any field can be overridden on the command line: `--config.rollout.temperature=0.8`. Values derived from others (pages
of a sequence, tokens of a row) are derived in `sparrow_jax.config`, never stored here.
"""

from collections.abc import Callable, Mapping

from ml_collections import ConfigDict

from configs import algorithms


def get_config() -> ConfigDict:
    """The defaults of every field; unlocked, so that a model file can change values (never add keys)."""
    c = ConfigDict()
    c.seed = 0  # all randomness of the run is folded from this
    c.steps = 100  # training steps; one step = one batch of prompts (or of worked solutions)
    c.phase = 'rl'  # 'rl', or 'supervised': next-token training on worked solutions, to make a start checkpoint

    c.model = ConfigDict()
    # A folder with config.json + *.safetensors; a .gguf file; a repository that `hf download` has put into the Hub's
    # cache ('Qwen/Qwen3-8B'); gs://bucket/folder or gs://bucket/file.gguf, copied to this machine first (needs gcsfs).
    c.model.path = ''
    c.model.random_weights = False  # start from random weights of `shape` (smoke forms, benches, from-scratch training)
    c.model.compute_dtype = 'bfloat16'  # activations and KV cache: 'bfloat16' or 'float32'
    c.model.param_dtype = 'float32'  # master weights of the learner
    c.model.remat = True  # recompute each layer in the backward pass
    # Used when random_weights; with `path` the checkpoint's own shape is read, and vocab_size = 0 here says "do not
    # compare".
    c.model.shape = ConfigDict()
    c.model.shape.family = 'qwen3'  # 'qwen3' (RMS norm on each query and key head) or 'llama'
    c.model.shape.vocab_size = 0
    c.model.shape.d_model = 0
    c.model.shape.layers = 0
    c.model.shape.query_heads = 0
    c.model.shape.kv_heads = 0
    c.model.shape.head_dim = 0
    c.model.shape.d_ff = 0
    c.model.shape.rope_theta = 1e6
    c.model.shape.norm_eps = 1e-6
    c.model.shape.tie_embeddings = True
    c.model.shape.max_positions = 40_960  # tokens; a longer prompt + response is refused at start

    c.tokenizer = ConfigDict()
    c.tokenizer.path = ''  # '' = model.path; named like it, and holding tokenizer.json, or a .gguf file
    c.tokenizer.chat_template = ''  # '' = the tokenizer's own; else the path of a .jinja file
    c.tokenizer.system_prompt = ''  # '' = no system message
    c.tokenizer.template_options = ConfigDict()  # keyword arguments of the chat template, e.g. enable_thinking=True
    c.tokenizer.template_options.enable_thinking = True
    c.tokenizer.end_tokens = ()  # further token strings that end a response, beside the checkpoint's own

    c.data = ConfigDict()
    c.data.source = 'reasoning_gym:chain_sum'  # 'reasoning_gym:<task>', or the path of a .jsonl or .parquet file
    c.data.layout = 'auto'  # files: 'auto', 'polaris', 'dapo_math', 'gsm8k', 'aime', 'amc', 'math500', 'problem_answer'
    c.data.options = ''  # JSON object: the reasoning-gym task's options
    c.data.train_examples = 10_000  # problems generated or taken for training; 0 = all of a file
    c.data.seed = 17  # of generated problems and of the shuffled order
    c.data.eval_source = ''  # '' = held-out problems of `source`; else like `source`
    c.data.eval_examples = 256  # held-out problems; none shares its text with a training problem
    c.data.cache_dir = 'data_cache'  # where prepared data sets are written
    c.data.instruction = 'Put the final answer in \\boxed{}.'  # appended to each problem; '' = nothing
    c.data.answer_format = (
        'boxed'  # where the final answer stands: 'boxed' (last \boxed{...}) or 'tag' (<answer>...</answer>)
    )

    c.reward = ConfigDict()
    c.reward.function = (
        ''  # '' = the task's verifier; 'my_module:my_function' is called as f(problem, completion) -> float
    )
    c.reward.correct_threshold = (
        0.99  # a task's score below this counts as 0 (reasoning-gym gives partial credit for junk)
    )
    c.reward.format_bonus = 0.0  # added where the answer could be extracted, correct or not
    c.reward.workers = 2  # verifier processes
    c.reward.timeout_s = 10.0  # per answer; a time-out is counted as such and scores 0
    # Soft punishment of long responses (DAPO): over the last so many tokens of rollout.max_response_tokens the reward
    # falls linearly by up to overlong_penalty; 0 = none.
    c.reward.overlong_buffer_tokens = 0
    c.reward.overlong_penalty = 1.0

    c.rollout = ConfigDict()
    c.rollout.prompts_per_step = 64
    c.rollout.samples_per_prompt = 8
    # Dynamic sampling (DAPO): prompts whose rewards are all equal teach nothing and are replaced, from up to so many
    # further batches of prompts a step; 0 = they stay. Where these do not suffice, the first of them stay all the same.
    c.rollout.extra_batches = 0
    c.rollout.slots = 64  # sequences that decode together
    c.rollout.max_prompt_tokens = 2048  # longer prompts are counted and skipped
    c.rollout.max_response_tokens = 8192
    c.rollout.page_tokens = 16  # tokens of one KV page; a power of two from 8 to 128
    # Pages of the KV pool per data shard; 0 = enough for every slot at its longest, or what an accelerator has left.
    c.rollout.pool_pages = 0
    c.rollout.temperature = 1.0
    c.rollout.segment_steps = 128  # decode steps of one jitted call
    c.rollout.prefill_rows = 8  # prompts encoded by one prefill call
    # For the last sequences of a rollout: segments are also compiled for half of the slots, a quarter, and so on.
    c.rollout.halvings = 4
    # Attention of the sampler: 'auto' takes the Pallas kernels of the platform once they have been run on such
    # hardware, else the JAX definitions, and the start of the run says which; 'mosaic_gpu', 'mosaic_tpu' or 'reference'
    # insist on one.
    c.rollout.kernels = 'auto'

    c.schedule = ConfigDict()
    # 'adaptive': budgets follow the measured p05; or 'dense', 'fixed', 'published', 'file'.
    c.schedule.kind = 'adaptive'
    c.schedule.start = 'fixed'  # 'adaptive': which of the others it starts from
    c.schedule.budget_pages = 64  # 'fixed': top-k pages at every length, reserved pages not counted
    c.schedule.model = ''  # 'published': 'qwen3-1.7b', 'qwen3-4b' or 'qwen3-8b' (14B: as the paper, see its config)
    c.schedule.target_p05 = 0.86  # 'published': which table
    c.schedule.path = ''  # 'file': a schedule.json
    c.schedule.reserved_first_pages = 1  # always read, on top of the budget
    c.schedule.reserved_last_pages = 2
    c.schedule.dense_layers = (0, 1)  # layers that read the whole cache
    # How pages are scored (formulas: pallas_kernels/page_select/policies.py): 'block_mean' (the paper's rule, and the
    # only one with kernels), 'quest' (bounds from each page's smallest and largest keys; landmarks twice as large) or
    # 'group_softmax' (every head of a group hands out the same weight). Published budgets were found with 'block_mean'.
    # A configuration file may bring a policy of its own: register_policy, in the same place.
    c.schedule.policy = 'block_mean'

    # Of the 'adaptive' schedule. Its length bins are those of its start, or mismatch.bin_width_tokens wide where that
    # has one budget for all lengths.
    c.controller = ConfigDict()
    c.controller.target_p05 = 0.86  # exact alpha that the 5th percentile of every length bin is held at
    c.controller.probes = 4  # slots of each data shard that the dense policy follows
    c.controller.min_count = 2000  # tokens of a bin that make one measurement, after which its budget moves
    c.controller.urgent_count = 500  # as few are enough to raise it, where p05 is below the target with confidence
    c.controller.tolerance = 0.01  # a bin at its largest budget may miss the target by so much before the log says so
    c.controller.least_pages = 1  # of a budget
    c.controller.most_pages = 0  # of a budget; 0 = as many as a sequence has

    c.guard = ConfigDict()  # what to do when numbers, averaged over some steps, say that training is collapsing
    c.guard.action = 'none'  # 'widen': all budgets are doubled; 'dense': so is the sampler; 'stop', with a checkpoint
    c.guard.window_steps = 4
    c.guard.least_p05 = 0.5  # of alpha; 0 = not watched
    c.guard.least_length_share = 0.5  # mean response length, of its largest mean so far; 0 = not watched
    c.guard.least_entropy_share = 0.1  # likewise

    c.mismatch = ConfigDict()
    c.mismatch.every_steps = 1  # measure alpha on every sampled token each n-th step; 0 = never
    c.mismatch.bin_width_tokens = 2000  # cached tokens per length bin
    c.mismatch.min_count = 200  # tokens a bin needs before its p05 is reported
    c.mismatch.floor_every_steps = 20  # dense-against-dense floor each n-th step; 0 = never
    c.mismatch.floor_sequences = 8  # sequences sampled densely for it

    c.learner = ConfigDict()
    # Together these choose the algorithm; docs/algorithms.md says which combination is which paper's, and
    # configs/X.py:NAME sets them (configs/algorithms.py has the names).
    # 'grpo', 'dr_grpo' or 'rloo' (compare the samples of a prompt), 'reinforce_pp', 'reinforce_pp_baseline' (normalized
    # over the batch) or 'gae' (PPO; needs a critic).
    c.learner.advantage = 'grpo'
    c.learner.ratio = 'token'  # what is clipped: 'token', or 'sequence': one ratio a response (GSPO)
    c.learner.clip_low = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    c.learner.clip_high = 0.28
    # 'token_mean'; 'sequence_mean': of each response, then over responses; 'constant': the sum over tokens divided by
    # responses times rollout.max_response_tokens.
    c.learner.aggregation = 'token_mean'
    # For tokens that the sampler drew from another distribution than the dense policy's, with weight w = exp(logp_dense
    # - logp_actor): 'tis': min(w, correction_high); 'token_mask': w, 0 above correction_high; 'icepop': w, 0 outside
    # [correction_low, correction_high]; 'sequence_mask': 1, 0 for a response whose geometric mean of w is outside;
    # 'none': 1.
    c.learner.correction = 'tis'
    c.learner.correction_low = 0.0
    c.learner.correction_high = 3.0
    c.learner.kl_coef = 0.0  # KL to the frozen start policy; above 0 a copy of the start weights is kept
    c.learner.kl_placement = 'loss'  # 'loss', or 'reward': taken off each token's reward (reinforce_pp and gae)
    c.learner.mask_truncated = False  # responses cut off at their limit are left out of the loss
    c.learner.updates_per_step = 1  # optimizer updates made of one batch of rollouts
    c.learner.rows_per_microbatch = 4  # rows of one forward/backward pass, over all data shards
    c.learner.row_tokens = 0  # tokens of a row; 0 = longest prompt + response, rounded up to 128
    c.learner.packing = (
        'auto'  # 'on': several sequences a row; 'off': one a row, in length buckets; 'auto': 'off' on GPU
    )
    c.learner.head_chunk_tokens = 1024  # tokens whose logits are held at once

    c.critic = ConfigDict()  # of the advantage 'gae'
    # 'none'; 'head': a linear head over the policy's final hidden states, through which no gradient flows; 'trunk': a
    # decoder of its own, a copy of the start weights, with such a head.
    c.critic.kind = 'none'
    c.critic.learning_rate = 1e-5  # constant after optimizer.warmup_steps; all else is the policy's optimizer's
    c.critic.clip = 0.5  # a value may move so far from the one before the step's updates
    c.critic.gamma = 1.0  # discount a token
    c.critic.lam = 1.0  # trace decay a token (lambda of GAE); 1: what followed, less the value
    c.critic.passes = 1  # over the batch of a step
    c.critic.warmup_steps = 0  # first training steps, in which only the critic learns

    c.optimizer = ConfigDict()
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10  # optimizer updates of linear warm-up
    c.optimizer.decay_steps = 0  # updates of cosine decay to 0 after the warm-up; 0 = constant
    c.optimizer.beta1 = 0.9
    c.optimizer.beta2 = 0.95
    c.optimizer.eps = 1e-8
    c.optimizer.weight_decay = 0.0
    c.optimizer.max_grad_norm = 1.0

    # DistillSparse: a low-rank adapter in the sparse sampler alone, which learns to sample as the dense policy would
    # (docs/distill.md). Budgets of an 'adaptive' schedule fall as it does.
    c.distill = ConfigDict()
    c.distill.enabled = False
    c.distill.rank = 32  # inner width of each pair of factors
    c.distill.alpha = 64.0  # what the factors add is multiplied by alpha / rank
    c.distill.targets = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')  # matrices of every layer that get factors
    c.distill.pg_coef = 1.0  # of the policy gradient of the sparse policy
    c.distill.kl_coef = 1.0  # lambda: of KL(sparse || dense) over the whole vocabulary
    c.distill.clip_low = 0.2  # as in the learner, for the sparse policy's ratio
    c.distill.clip_high = 0.28
    c.distill.tis_cap = 3.0  # truncated importance weight exp(logp_sparse - logp_actor); 0 = no correction
    c.distill.updates_per_step = 1  # of the adapter, each with all rollouts of the step
    c.distill.learning_rate = 1e-4
    c.distill.warmup_steps = 10  # updates of linear warm-up; betas and eps are those of optimizer.*
    c.distill.max_grad_norm = 1.0

    c.evaluate = ConfigDict()
    c.evaluate.every_steps = 20  # 0 = only before the first and after the last step; -1 = never
    c.evaluate.samples = 1  # answers a problem
    c.evaluate.temperature = 0.0  # 0 = greedy
    c.evaluate.top_p = 1.0

    c.calibrate = ConfigDict()  # of `python -m sparrow_jax.calibrate`; length bins are mismatch.bin_width_tokens wide
    # What p05 is measured on: 'dense_samples' are drawn once, and one teacher-forced sparse pass over them follows for
    # each budget; 'sparse_samples' are drawn anew by the sparse sampler at every budget.
    c.calibrate.contexts = 'dense_samples'
    c.calibrate.prompts = ''  # '' = training problems of data.source; else a .txt (one a line) or .jsonl ("prompt")
    # '' = sample; else a .txt (one text) or .jsonl ("text", or "prompt" and "completion", as in samples.jsonl)
    c.calibrate.texts = ''
    c.calibrate.sequences = 32
    c.calibrate.response_tokens = 0  # of each at most; 0 = rollout.max_response_tokens
    c.calibrate.forced_lengths = False  # sampled sequences go on to their last token, whatever ends an answer
    c.calibrate.budget_tokens = ()  # reserved pages not counted; () = six halves of the longest sequence
    c.calibrate.page_tokens = ()  # () = rollout.page_tokens
    c.calibrate.policies = ()  # () = schedule.policy
    c.calibrate.target_p05 = 0.86  # that the lower confidence bound of p05 must reach; exact alpha

    c.checkpoint = ConfigDict()
    c.checkpoint.every_steps = 20
    c.checkpoint.keep = 2  # newest checkpoints kept

    c.parallel = ConfigDict()
    c.parallel.data = -1  # mesh axis sizes; -1 = all devices that the other axes leave
    c.parallel.fsdp = 1
    c.parallel.tensor = 1
    # Several processes, each with devices of its own, that run the same command: 'off', 'auto' (a TPU slice, a SLURM
    # step or a Kubernetes job, found by JAX) or 'address', by the next three fields. The scripts in launch/ set them.
    c.parallel.distributed = 'off'
    c.parallel.coordinator = ''  # 'address': host:port at which the first process listens
    c.parallel.processes = 0  # 'address': how many
    c.parallel.process = -1  # 'address': number of this one, from 0

    c.log = ConfigDict()
    c.log.samples_per_step = 8  # answers a step written to samples.jsonl
    return c


def smoke(config: ConfigDict) -> None:
    """Shrinks any configuration, in place, until a run goes through all its parts in seconds on 2 CPU cores.

    Random weights of two small layers, tiny lengths and batches, generated sums instead of a data file. Family,
    algorithm and optimizer stay: a smoke run shows that a configuration works, not that it learns.
    """
    c = config
    c.steps = 2
    c.model.path = ''
    c.model.random_weights = True
    c.model.compute_dtype = 'float32'  # CPUs have no fast bfloat16
    c.model.remat = False
    shape = c.model.shape
    shape.vocab_size = 512
    shape.d_model, shape.layers, shape.d_ff = 64, 2, 128
    shape.query_heads, shape.kv_heads, shape.head_dim = 4, 2, 16
    shape.max_positions = 256

    c.tokenizer.path = 'configs/tiny_start'
    c.tokenizer.chat_template = ''
    c.tokenizer.end_tokens = ()
    c.data.source = 'reasoning_gym:chain_sum'
    c.data.layout = 'auto'
    c.data.options = '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
    c.data.train_examples = 64
    c.data.eval_source = ''
    c.data.eval_examples = 4
    c.reward.function = ''

    c.rollout.prompts_per_step = 2
    c.rollout.samples_per_prompt = 2
    c.rollout.slots = 4
    c.rollout.max_prompt_tokens = 96
    c.rollout.max_response_tokens = 32
    c.rollout.page_tokens = 8
    c.rollout.pool_pages = 0
    c.rollout.segment_steps = 16
    c.rollout.prefill_rows = 2
    c.rollout.halvings = 0

    c.schedule.kind = c.schedule.start = 'fixed'
    c.controller.least_pages, c.controller.most_pages = 1, 0
    c.controller.probes, c.controller.min_count, c.controller.urgent_count = 1, 40, 10  # for an adaptive schedule
    c.schedule.budget_pages = 2
    c.schedule.path = ''
    c.schedule.dense_layers = (0,)
    c.mismatch.bin_width_tokens = 32
    c.mismatch.min_count = 1
    c.mismatch.floor_every_steps = 1
    c.mismatch.floor_sequences = 2

    c.learner.updates_per_step = 1
    c.critic.warmup_steps = 0
    c.rollout.extra_batches = min(c.rollout.extra_batches, 1)
    c.reward.overlong_buffer_tokens = min(c.reward.overlong_buffer_tokens, 8)
    c.learner.rows_per_microbatch = 2
    c.learner.row_tokens = 0
    c.learner.head_chunk_tokens = 128
    c.distill.rank = 4
    c.evaluate.samples = 1
    c.calibrate.prompts = c.calibrate.texts = ''
    c.calibrate.sequences, c.calibrate.response_tokens, c.calibrate.forced_lengths = 4, 0, True
    c.calibrate.budget_tokens, c.calibrate.page_tokens, c.calibrate.policies = (), (), ()
    c.checkpoint.every_steps = 1
    c.parallel.data, c.parallel.fsdp, c.parallel.tensor = -1, 1, 1


FORMS: Mapping[str, Callable[[ConfigDict], None]] = {'smoke': smoke}


def finish(
    config: ConfigDict, arg: str, file: str, forms: Mapping[str, Callable[[ConfigDict], None]] = FORMS
) -> ConfigDict:
    """The last line of a model file: applies its argument and locks.

    Args:
        config: unlocked.
        arg: '' or words with commas between: forms ('smoke'), and at most one algorithm of `configs.algorithms`.
        file: name of the model file, for errors.
        forms: what changes a configuration beside the algorithms, by name.

    Raises:
        ValueError: another argument; lists the valid ones.
    """
    for word in filter(None, arg.split(',')):
        if word in forms:
            forms[word](config)
        elif word in algorithms.ALGORITHMS:
            algorithms.apply(config, word)
        else:
            known = ' or '.join(["''", *map(repr, forms)])
            raise ValueError(
                f'{file}:{word}: unknown argument; it must be {known}, or an algorithm: '
                f'{", ".join(algorithms.ALGORITHMS)}'
            )
    return config.lock()
