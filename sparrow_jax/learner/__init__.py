"""Learning: dense log-probs of the sampled tokens, advantages, losses and the update step.

Responses and rewards come from the rollout and the verifiers; updated weights go back to the sampler.
"""
