"""The paper's statements about alpha, each with the rule that judges it by the numbers of a picture.

A rule is a function beside its own words; the thresholds are those of the paper's numbers where it has any. Nothing is
judged by a picture that could not be drawn.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy import stats

HOLDS, FAILS, OPEN, UNMEASURED = 'holds', 'does not hold', 'cannot be told', 'not measured'

MOST = 0.5  # of the tokens
SPANS = 5.0  # p05's change over the mean's
NO_CORRELATION, CORRELATION = 0.2, -0.3  # the paper: -0.1 of alpha with length, -0.55 of p05 with length
KS = 0.04
NO_CHANGE = 0.05  # of p05 over a run, that an interval may at most leave possible
CHANCE = 0.05
PAPER_PAGE = 16
ETA = (1.2, 1.9)
PAPER_TARGET = '0.86'
PAPER_POLICY = 'block_mean'

Verdict = tuple[str, str]  # and the numbers that it comes from


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement, the rule in words, the picture whose numbers it needs, and the rule."""

    text: str
    rule: str
    picture: str
    judge: Callable[[Mapping[str, Any]], Verdict]


def markdown(found: Mapping[str, Mapping[str, Any]], lacking: Sequence[tuple[str, str]]) -> str:
    """A table with a row for each statement and source, and what was left out below it.

    Args:
        found: numbers by picture and source. lacking: pictures and what they lack.
    """
    lines = ['| the paper | rule | source | here | numbers |', '|---|---|---|---|---|']
    for claim in CLAIMS:
        for source, one in (found.get(claim.picture) or {'-': None}).items():
            verdict, numbers = (UNMEASURED, f'needs {claim.picture}.png') if one is None else claim.judge(one)
            lines.append(f'| {claim.text} | {claim.rule} | {source} | {verdict} | {numbers} |')
    lines += [f'| {text} | {rule} | - | {UNMEASURED} | needs {needs} |' for text, rule, needs in ELSEWHERE]
    lines += ['', *(f'* {name}.png: {why}.' for name, why in lacking)]
    return '\n'.join(lines).rstrip() + '\n'


def _skewed(one: Mapping[str, Any]) -> Verdict:
    shares = [b['share_above_0.999'] for b in _sparse(one)]
    text = f'{min(shares):.0%} to {max(shares):.0%}'
    if floor := [b['share_above_0.999'] for b in one['budgets'] if not b['budget_tokens']]:
        text += f'; {floor[0]:.0%} with every page read'
    return _of(min(shares) > MOST), text


def _mean_says_little(one: Mapping[str, Any]) -> Verdict:
    span, ratio = one['span_over_budgets'], one['p05_span_over_mean_span']
    if ratio is None:
        return OPEN, 'the mean is the same at every budget'
    return _of(ratio >= SPANS), f'mean moves by {span["mean"]:.3f}, p05 by {span["p05"]:.3f}: {ratio:.1f} times'


def _beta(one: Mapping[str, Any]) -> Verdict:
    distances = [b['tail']['ks'] for b in _sparse(one) if b['tail']]
    if not distances:
        return OPEN, 'no tail'
    below = f'below {KS:g} at {sum(d < KS for d in distances)} of {len(distances)}'
    return _of(max(distances) < KS), f'{min(distances):.3f} to {max(distances):.3f}, {below}'


def _variance(one: Mapping[str, Any]) -> Verdict:
    known = [(b['budget_tokens'], b['tail']['variance']) for b in _sparse(one) if b['tail']]
    if len(known) < 2:
        return OPEN, 'a single budget'
    values = [variance for _, variance in known]
    falls = all(later < earlier for earlier, later in itertools.pairwise(values))
    return _of(falls), f'{values[0]:.4f} at {known[0][0]:,} tokens, {values[-1]:.4f} at {known[-1][0]:,}'


def _correlations(one: Mapping[str, Any]) -> Verdict:
    over = one['over_all_budgets']
    alpha, p05 = over['correlation_of_alpha_with_length'], over['correlation_of_bin_p05_with_length']
    if alpha is None or p05 is None:
        return OPEN, 'a single length bin'
    return _of(abs(alpha) <= NO_CORRELATION and p05 <= CORRELATION), f'alpha {alpha:+.2f}, p05 of bins {p05:+.2f}'


def _falls_with_length(one: Mapping[str, Any]) -> Verdict:
    known = lambda bins: len(bins) > 1 and None not in bins[0]['p05'] + bins[-1]['p05']
    rows = [b['bins'] for b in _sparse(one) if known(b['bins'])]
    if not rows:
        return OPEN, 'a single length bin'
    falls = [bins[-1]['p05'][2] < bins[0]['p05'][1] for bins in rows]
    rises = [bins[-1]['p05'][1] > bins[0]['p05'][2] for bins in rows]
    verdict = HOLDS if all(falls) else FAILS if any(rises) else OPEN
    ends = f'{rows[0][0]["p05"][0]:.3f} to {rows[0][-1]["p05"][0]:.3f} at the smallest'
    return verdict, f'at {sum(falls)} of {len(falls)} budgets; {ends}'


def _no_drift(one: Mapping[str, Any]) -> Verdict:
    largest = max(abs(bound) for b in one['bins'] for bound in b['change'][1:])
    verdict = FAILS if one['drifts'] else HOLDS if largest <= NO_CHANGE else OPEN
    return verdict, f'{one["says"]}; {one["steps"]} steps'


def _page_16(one: Mapping[str, Any]) -> Verdict:
    return _least_is(one, PAPER_PAGE, lambda page: page >= PAPER_PAGE)


def _page_8(one: Mapping[str, Any]) -> Verdict:
    return _least_is(one, PAPER_PAGE // 2, lambda page: page <= PAPER_PAGE)


def _policy(one: Mapping[str, Any]) -> Verdict:
    return _least_is(one, PAPER_POLICY, lambda _: True)


def _least_is(one: Mapping[str, Any], wanted: Any, compared: Callable[[Any], bool]) -> Verdict:
    """Whether one thing reads less than all that it is compared with, at every target at which that is known."""
    verdicts, says = [], []
    for target, at in one['targets'].items():
        shares = {row['of']: row['share'][0] for row in at['shares'] if compared(row['of'])}
        if wanted not in shares or len(shares) < 2:
            return UNMEASURED, f'{wanted} or what it is compared with was not measured'
        ratios = [r['ratio'] for r in at['ratios'] if r['of'] == wanted and r['to'] in shares]
        if not ratios:
            continue
        more = any(low is not None and low > 1 for _, low, _ in ratios)
        less = all(high is not None and high < 1 for _, _, high in ratios)
        verdicts.append(FAILS if more else HOLDS if less else OPEN)
        bins = f' (in {len(at["bins_counted"])} of {at["bins_measured"]} bins)' if 'bins_counted' in at else ''
        says.append(
            f'{target}: '
            + ', '.join(f'{of} {shares[of]:.1%}' for of in sorted(shares, key=lambda of: shares[of]))
            + bins
        )
    if not verdicts:
        return OPEN, 'no target lies between measured budgets of all of them'
    return FAILS if FAILS in verdicts else OPEN if OPEN in verdicts else HOLDS, '; '.join(says)


def _grows(one: Mapping[str, Any]) -> Verdict:
    known = {t: at['exponent'] for t, at in one['targets'].items() if at['exponent'][0] is not None}
    if not known:
        return OPEN, 'too few bins with a budget between the measured ones'
    falls = any(exponent[2] < 0 for exponent in known.values())
    verdict = HOLDS if all(exponent[1] > 0 for exponent in known.values()) else FAILS if falls else OPEN
    return verdict, '; '.join('{}: length^{:.2f} ({:.2f} to {:.2f})'.format(t, *e) for t, e in known.items())


def _eta(one: Mapping[str, Any]) -> Verdict:
    etas = [e['eta'] for e in one['eta']]
    if not etas:
        return OPEN, 'fewer than two targets between measured budgets'
    inside = sum(ETA[0] <= eta <= ETA[1] for eta in etas)
    return _of(inside == len(etas)), f'{min(etas):.2f} to {max(etas):.2f}, inside in {inside} of {len(etas)} bins'


def _eta_rises(one: Mapping[str, Any]) -> Verdict:
    if len(one['eta']) < 3:
        return OPEN, 'fewer than three lengths'
    found = stats.spearmanr([e['length'] for e in one['eta']], [e['eta'] for e in one['eta']])
    numbers = f'rank correlation {found.statistic:+.2f}, p {found.pvalue:.2f}'
    return (OPEN if not found.pvalue < CHANCE else _of(found.statistic > 0)), numbers


def _truncation(one: Mapping[str, Any]) -> Verdict:
    if not one['floor']:
        return UNMEASURED, 'no dense sampler'
    exact, estimate = one['floor']['alpha_p05'], one['floor']['top20_p05']
    first = one['floor']['first_bin_top20_p05']
    in_first = f', {first[0]:.3f} in the first bin' if first else ''
    numbers = f'{exact[0]:.3f} exact, {estimate[0]:.3f} by 20 tokens{in_first}'
    if None in (exact[1], estimate[2]):
        return OPEN, numbers
    return _of(estimate[2] < exact[1]), numbers


def _same_order(one: Mapping[str, Any]) -> Verdict:
    rank = one['rank_correlation_over_budgets']
    if rank is None:
        return OPEN, 'fewer than three budgets'
    return _of(round(rank, 6) == 1), f'rank correlation {rank:.2f}'


def _reachable(one: Mapping[str, Any]) -> Verdict:
    floor = next(iter(one['floors'].values()))
    lows = [b['p05'][1] for b in floor['bins'] if b['p05'][1] is not None]
    if not lows:
        return OPEN, 'no bin is known'
    share = floor['share_of_what_a_target_allows'].get(PAPER_TARGET)
    text = f'floor at {floor["alpha_p05"][0]:.3f}, at least {min(lows):.3f} in every bin'
    uses = '' if share is None else f'; {share:.0%} of what {PAPER_TARGET} allows'
    return _of(min(lows) > float(PAPER_TARGET)), text + uses


def _sparse(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [b for b in one['budgets'] if b['budget_tokens']]


def _of(holds: bool) -> str:
    return HOLDS if holds else FAILS


CLAIMS = (
    Claim(
        'most tokens are above 0.999 even under aggressive budgets',
        f'more than {MOST:.0%} at every budget',
        'skew',
        _skewed,
    ),
    Claim(
        'the mean hardly moves while p05 falls',
        f'over the budgets p05 moves at least {SPANS:g} times as far',
        'skew',
        _mean_says_little,
    ),
    Claim(
        'alpha below 0.999 follows a Beta distribution, KS < 0.04',
        f'KS < {KS:g} at every budget',
        'skew',
        _beta,
    ),
    Claim(
        'the tail is narrower at larger budgets',
        'its variance falls from each budget to the next',
        'skew',
        _variance,
    ),
    Claim(
        'alpha hardly hangs on length (-0.1), p05 of length bins does (-0.55)',
        f'correlations over all budgets: alpha within {NO_CORRELATION:g} of 0, p05 of bins at most {CORRELATION:g}',
        'by_length',
        _correlations,
    ),
    Claim(
        'at a fixed budget p05 falls with length',
        'at every budget the last bin lies below the first, intervals apart; fails where one rises',
        'by_length',
        _falls_with_length,
    ),
    Claim(
        'p05 does not depend on the training step',
        f'every slope may be 0 (95% for all bins together), and none leaves a change above {NO_CHANGE:g} possible',
        'training',
        _no_drift,
    ),
    Claim(
        'pages of 16 beat larger ones on the cost curve',
        f'{PAPER_PAGE} reads less than each larger size at every target, with 95%; fails where it reads more',
        'page_sizes',
        _page_16,
    ),
    Claim(
        '(ours) pages of 8, which it did not try, beat those of 16',
        'likewise, of these two',
        'page_sizes',
        _page_8,
    ),
    Claim(
        'budgets must grow with length',
        "the power law's exponent is above 0 with 95% at every target",
        'budget_by_length',
        _grows,
    ),
    Claim(
        'budget ~ (1 - p05)^-eta, eta 1.2 to 1.9 (from its tables)',
        f'eta from {ETA[0]:g} to {ETA[1]:g} in every bin',
        'budget_by_length',
        _eta,
    ),
    Claim(
        'eta rises with length (from its tables)',
        f'rank correlation above 0, p below {CHANCE:g}',
        'budget_by_length',
        _eta_rises,
    ),
    Claim(
        'alpha from 20 tokens stays below the exact one where nothing is left out',
        "p05 of the dense sampler: the estimate's interval lies below the exact one's",
        'top20',
        _truncation,
    ),
    Claim(
        '(ours) the estimate orders budgets as the exact p05 does',
        'rank correlation 1',
        'top20',
        _same_order,
    ),
    Claim(
        '(ours) block_mean, its policy, reads least at equal p05',
        'less than each other at every target, with 95%; fails where it reads more; a closed loop leaves it open',
        'policies',
        _policy,
    ),
    Claim(
        f'{PAPER_TARGET} can be held at every length',
        f'the floor of every bin is above {PAPER_TARGET} with confidence',
        'floor',
        _reachable,
    ),
)
# Statements, the rules and the commands that would judge them.
ELSEWHERE = (
    (
        'training is stable where p05 is held at 0.86, and p05 tells it better than the mean',
        'AUC over runs of different budgets',
        '`python -m sparrow_jax.compare_runs` (docs/stability.md)',
    ),
)
