"""Problems, prompts and verifiers: from a data source to prompt tokens, and from a completion back to its reward.

`problems` prepares data sets, `prompts` turns their problems into tokens for the sampler, `verifiers` scores what the
sampler wrote.
"""
