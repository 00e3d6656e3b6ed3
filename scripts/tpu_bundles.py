"""Instruction bundles of a compiled TPU kernel, loop by loop, out of the compiler's dump.

    LIBTPU_INIT_ARGS='--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true' JAX_PLATFORMS=cpu \\
        python -m pytest tests/pallas_kernels/test_select_tpu.py -k 'production and v5e'
    python scripts/tpu_bundles.py DIR page_select

No chip is needed. A bundle takes at least a cycle; waits for copies, and for results that are not there yet, come on
top. Lines are stretches of straight code: address, depth of the loops around it (the grid is one), bundles, and how
often the units that a kernel may be bound by are used.
"""

import argparse
import itertools
import pathlib
import re

UNITS = {
    'loads': r'= vld ',
    'stores': r'vst ',
    'compares': r'vcmp',
    'selects': r'= vsel ',
    'products': r'vmatmul',
    'weights': r'vmatpush',
    'rotations': r'vrot',
    'lane sums': r'add\.xlane',
    'copies': r'dma\.\w+_to_',
}
BUNDLE = re.compile(r'\s*(?:0x)?(?P<address>[0-9a-f]+)\s+(?P<mark>[A-Z]{2})?\s*:\s*(?P<loops>(?:> ?)*)')
LEAST = 10  # shorter stretches are left out


def stretches(text: str):
    """(address, depth, lines) of each stretch of bundles within one loop and up to the next loop's beginning."""
    bundles = [(match, line) for line in text.splitlines() if (match := BUNDLE.match(line))]
    starts = itertools.accumulate(match['mark'] == 'LB' for match, _ in bundles)
    keys = [(begun, match['loops'].count('>')) for begun, (match, _) in zip(starts, bundles, strict=True)]
    numbered = zip(keys, bundles, strict=True)
    for (_, depth), group in itertools.groupby(numbered, key=lambda pair: pair[0]):
        lines = [bundle for _, bundle in group]
        yield lines[0][0]['address'], depth, [line for _, line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dump', type=pathlib.Path)
    parser.add_argument('kernel', help='name given to pallas_call')
    arguments = parser.parse_args()
    files = [
        path
        for path in sorted(arguments.dump.glob(f'*-{arguments.kernel}*-final_bundles.txt'))
        if 'analysis' not in path.name
    ]
    if not files:
        parser.error(f'no bundles of {arguments.kernel} in {arguments.dump}')
    for path in files:
        print(path.name)
        for address, depth, lines in stretches(path.read_text()):
            if len(lines) >= LEAST:
                used = {unit: sum(len(re.findall(form, line)) for line in lines) for unit, form in UNITS.items()}
                shown = ', '.join(f'{count} {unit}' for unit, count in used.items() if count)
                print(f'{address:>6}  loops {depth}  bundles {len(lines):5}  {shown}')


if __name__ == '__main__':
    main()
