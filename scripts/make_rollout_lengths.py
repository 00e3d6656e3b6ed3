"""python scripts/make_rollout_lengths.py --out docs/measurements/rollout_lengths.json

Forced response lengths for `bench_rollout --lengths`: log-normal, as reasoning models' answers are, and cut as
`rollout.max_response_tokens` cuts them. The location of the distribution is chosen so that the lengths' own mean,
after the cut, is the one asked for. The same arguments give the same file, on every machine.
"""

import argparse
import json
import math
import random
import statistics
from pathlib import Path

BISECTIONS = 60  # of the location, ln tokens; far below what rounding to tokens can tell apart


def lengths(count: int, sigma: float, mean_tokens: int, cut_tokens: int, seed: int) -> list[int]:
    """Lengths in tokens, in random order."""
    rng, normal = random.Random(seed), statistics.NormalDist()
    deviations = [sigma * normal.inv_cdf(rng.random()) for _ in range(count)]
    draw = lambda location: [min(round(math.exp(location + z)), cut_tokens) for z in deviations]
    low, high = 0.0, 2 * math.log(cut_tokens)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(draw(middle)) < mean_tokens * count else (low, middle)
    return draw(high)


def content(
    count: int, sigma: float, mean_tokens: int, cut_tokens: int, prompt_tokens: int, seed: int, samples: int = 1
) -> str:
    """The text of the file."""
    about = (
        f'Response lengths for bench_rollout --lengths: {count} numbers exp(location + {sigma} z), z standard normal '
        f'by random.Random({seed}) and NormalDist().inv_cdf, rounded and cut at {cut_tokens}; location such that '
        f'their mean after the cut is {mean_tokens}. Made by scripts/make_rollout_lengths.py.'
    )
    fields = {
        'about': about,
        'sigma': sigma,
        'mean_tokens': mean_tokens,
        'cut_tokens': cut_tokens,
        'seed': seed,
        'prompt_tokens': prompt_tokens,
        **({'samples_per_prompt': samples} if samples > 1 else {}),
        'response_tokens': lengths(count, sigma, mean_tokens, cut_tokens, seed),
    }
    lines = ',\n'.join(f' {json.dumps(name)}: {json.dumps(value)}' for name, value in fields.items())
    return f'{{\n{lines}\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--count', type=int, default=96)
    parser.add_argument('--sigma', type=float, default=0.7)
    parser.add_argument('--mean', type=int, default=14 * 1024, help='tokens')
    parser.add_argument('--cut', type=int, default=32 * 1024, help='tokens')
    parser.add_argument('--prompt', type=int, default=256, help='tokens of every prompt')
    parser.add_argument('--samples', type=int, default=1, help='responses that share a prompt')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path, required=True)
    options = parser.parse_args()
    numbers = (options.count, options.sigma, options.mean, options.cut, options.prompt, options.seed)
    options.out.write_text(content(*numbers, options.samples), encoding='utf-8')


if __name__ == '__main__':
    main()
