"""Sampling: a paged KV cache, one jitted decode segment over all slots, and the engine that keeps the slots full.

Prompts and the policy's weights come in; tokens with their actor log-probs, pages read and, when asked for, final
hidden states go out.
"""
