"""Rewards for `reward.function` in the tests of whole runs. Imported by verifier workers, so it imports nothing."""


def lower_case(_problem, completion: str) -> float:
    """The share of lower-case letters: random weights earn some, so that samples differ and gradients are not 0."""
    return sum(c.islower() for c in completion) / max(len(completion), 1)


def always_one(_problem, _completion) -> float:
    return 1.0


def fails(_problem, _completion) -> float:
    raise KeyError('the reward function is broken')


def rare(problem: dict, completion: str) -> float:
    """1 for one random answer in four or so: most pairs of answers score the same."""
    del problem
    return float(sum(completion.encode()) % 4 == 0)
