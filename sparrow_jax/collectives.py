"""What the devices say to each other in a compiled program, read from the compiler's text of it.

`compile_check` asks for the loop of the decode segment: how many collectives a step has, how large they are, and
whether one of them brings together what was cut on purpose, weights or cache.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all', 'collective-permute')
_COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = ')
_OPERATION = re.compile(r'(?<=[\]\})] )([a-z][a-z0-9\-]*)\(')
_CALLED = re.compile(
    r'\b(?:calls|to_apply|body|condition|called_computations|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)'
)
_BODY = re.compile(r'\bbody=%?([\w.\-]+)')
_ARRAY = re.compile(r'\b([a-z]+\d*\w*)\[([\d,]*)\]')
_BITS = re.compile(r'\d+')


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a loop's body.

    Attributes:
        kind: one of `KINDS`.
        shape: of the (largest) result on a device.
        size_bytes: of all results.
        repeated: whether it stands in a loop inside the loop, and so happens more than once a step.
    """

    kind: str
    shape: tuple[int, ...]
    size_bytes: int
    repeated: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    operation: str
    arrays: tuple[tuple[tuple[int, ...], int], ...]  # shape and bytes of each result
    body: str | None  # of a loop
    called: tuple[str, ...]


def loop_collectives(text: str) -> list[Collective]:
    """The collectives of one round of the program's main loop, the one that carries most.

    Args:
        text: `compiled.as_text()`.

    Raises:
        ValueError: the program has no loop.
    """
    computations, entry = _parse(text)
    loops = [i for i in computations[entry] if i.body]
    if not loops:
        raise ValueError('the compiled program has no loop')
    main = max(loops, key=lambda loop: sum(size for _, size in loop.arrays))
    assert main.body
    return list(_inside(computations, main.body, False))


def outside_collectives(text: str) -> list[Collective]:
    """Those before and after the main loop."""
    computations, entry = _parse(text)
    loops = {i.body for i in computations[entry] if i.body}
    main = max(loops, key=lambda body: _carried(computations[entry], body), default=None)
    return list(_inside(computations, entry, False, skip=main))


def gathered(found: Iterable[Collective], arrays: Mapping[str, int], widest: int) -> list[tuple[Collective, str]]:
    """The collectives that bring together weights or cache, and what each of them brings.

    Args:
        found: of a decode step.
        arrays: name to elements of what is cut over devices on purpose, put together.
        widest: elements of the largest activation that a step may exchange; more can only be weights or cache.
    """
    of_size = {elements: name for name, elements in arrays.items()}
    result = []
    for one in found:
        if one.kind not in ('all-reduce', 'reduce-scatter') and one.elements in of_size:
            result.append((one, of_size[one.elements]))
        elif one.elements > widest:
            result.append((one, 'more than any activation of a step'))
    return result


def summary(found: Iterable[Collective]) -> list[dict]:
    """Counts and bytes by kind and shape, most bytes first."""
    groups: dict[tuple, list[Collective]] = defaultdict(list)
    for one in found:
        groups[one.kind, one.shape, one.repeated].append(one)
    rows = [
        {
            'kind': kind,
            'shape': list(shape),
            'repeated': repeated,
            'count': len(ones),
            'bytes': sum(one.size_bytes for one in ones),
        }
        for (kind, shape, repeated), ones in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row['bytes'], row['kind'], row['shape']))


def largest_results(text: str, count: int) -> list[dict]:
    """The largest arrays that the program's own instructions make, one line a shape."""
    computations, entry = _parse(text)
    reached = {entry, *(i.body for some in computations.values() for i in some if i.body)}
    made: dict[tuple, int] = {}
    free = ('parameter', 'get-tuple-element', 'tuple', 'bitcast', 'while', 'constant', 'optimization-barrier')
    for name in reached:
        for instruction in computations.get(name, ()):
            if instruction.operation not in free and not instruction.operation.endswith('-done'):
                for shape, size in instruction.arrays:
                    made[instruction.operation, shape] = size
    rows = sorted(made.items(), key=lambda item: -item[1])[:count]
    return [{'name': operation, 'shape': list(shape), 'bytes': size} for (operation, shape), size in rows]


def _carried(instructions: list[_Instruction], body: str | None) -> int:
    return max(sum(size for _, size in i.arrays) for i in instructions if i.body == body)


def _inside(
    computations: Mapping[str, list[_Instruction]], name: str, repeated: bool, skip: str | None = None
) -> Iterator[Collective]:
    for instruction in computations.get(name, ()):
        kind = instruction.operation.removesuffix('-start')
        if kind in KINDS:
            shape, _ = max(instruction.arrays, key=lambda array: array[1], default=((), 0))
            sizes = [size for _, size in instruction.arrays]
            # What has started carries its operands beside its results.
            started = instruction.operation.endswith('-start') and kind != 'all-reduce'
            yield Collective(kind, shape, max(sizes, default=0) if started else sum(sizes), repeated)
            continue
        for called in instruction.called:
            if called != skip:
                yield from _inside(computations, called, repeated or instruction.operation == 'while', skip)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = '', None
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            current = computations.setdefault(opened[2], [])
            entry = opened[2] if opened[1] else entry
        elif line.startswith('}'):
            current = None
        elif current is not None and (named := _INSTRUCTION.match(line)):
            current.append(_instruction(named[1], line[named.end() :]))
    if not entry:
        raise ValueError('this is no text of a compiled program: it has no ENTRY')
    return computations, entry


def _instruction(name: str, rest: str) -> _Instruction:
    operation = _OPERATION.search(rest)
    head = rest[: operation.start()] if operation else rest
    arrays = tuple((_shape(dims), _size(dtype, dims)) for dtype, dims in _ARRAY.findall(head))
    tail = rest[operation.end() :] if operation else ''
    called = [word.strip(' %') for names in _CALLED.findall(tail) for word in names.strip('{}').split(',')]
    body = _BODY.search(tail)
    return _Instruction(
        name, operation[1] if operation else '', arrays, body[1] if body else None, tuple(filter(None, called))
    )


def _shape(dims: str) -> tuple[int, ...]:
    return tuple(int(size) for size in dims.split(',') if size)


def _size(dtype: str, dims: str) -> int:
    bits = _BITS.search(dtype)
    return math.prod(_shape(dims)) * max(int(bits[0]) if bits else 8, 8) // 8
