"""Reinforcement learning of reasoning models with block-sparse rollouts.

Prompts go to the sampler (sparse attention), its answers to the verifiers, its tokens to the dense policy, and the
policy's update back to the sampler. `sparrow_jax.train` is that loop.

Key of the shape suffixes in names (`q_BTHA` is `[sequences, tokens, query heads, head dim]`):
    B sequences        T query tokens       S cached tokens     D model width      H query heads     K KV heads
    G = H / K          A head dim           F feed-forward      V vocabulary       L layers          R samples a prompt
    N logical pages of a sequence           C tokens a page     M selected pages   P physical pages
    E = 2 A, a token's key and value side by side                          W numbers of a page's landmark
"""
