"""python -m sparrow_jax.compile_check --config=configs/X.py --topology=v5e:4x4 [--out=FILE.json]

Compiles, without an accelerator, all that a run does on a TPU slice, for the devices of that slice: the copy of the
weights to the sampler, prefill, the decode segment, the probes' measure (of an adaptive schedule), scoring, gradients,
the optimizer's update, and the functions of the critic and of the sampler's adapter in runs that have them. The
functions, the mesh and the placement are those of training; of the arrays only shapes exist. Shows the bytes of each
device beside its memory, and what the devices exchange in a decode step.

Exit code 1: it does not fit a device, or a decode step brings weights or cache together from several devices.
"""

import collections
import dataclasses
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from jax import tree_util

from pallas_kernels.bench import why_no_file
from sparrow_jax import commands, memory
from sparrow_jax.assembly import Frame
from sparrow_jax.bench_setup import model_name, published_shape
from sparrow_jax.chips import CHIPS
from sparrow_jax.collectives import Collective, gathered, largest_results, loop_collectives, summary
from sparrow_jax.config import ConfigError, RunConfig
from sparrow_jax.console import Console
from sparrow_jax.learner.critic import CRITIC_GRADIENTS, CRITIC_UPDATE, CRITIC_VALUES
from sparrow_jax.learner.distill import ADAPTER_UPDATE
from sparrow_jax.learner.learner import Learner
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.engine import Engine, Sampling
from sparrow_jax.slices import Slice, parse_slice, slice_devices
from sparrow_jax.sparsity.schedules import load_schedule
from sparrow_jax.workdir import write_atomically

FAILED = 1  # exit code
SEGMENT = 'decode segment'
LARGEST = 10  # tensors that are listed where something does not fit
_OF_SAMPLING = ('sampler weights', 'KV pool', 'landmarks', 'hidden states', 'other slots')
_OUT_OF_MEMORY = 'RESOURCE_EXHAUSTED'
_PARTS = '  {:<24}{:>12}'
_PROGRAMS = '  {:<24}{:>12}{:>12}{:>12}{:>12}{:>12}{:>9}'
_EXCHANGED = '  {:<20}{:<24}{:>6}{:>12}  {}'


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One array as a device holds it."""

    part: str
    name: str
    shape: tuple[int, ...]
    size_bytes: int
    whole_elements: int  # put together over the tensor shards


@dataclasses.dataclass
class Program:
    """One compiled function.

    Attributes:
        name: as it is shown.
        seconds: that tracing and compiling took.
        beside_bytes: of a run's arrays that lie on the device and are none of its arguments.
        argument_bytes, result_bytes, temporary_bytes: as the compiler counts them; results beyond donated arguments.
        refused: what the compiler said where its memory did not suffice; the counts are then 0.
        compiled: whether it was.
        exchanged: the collectives of a decode step, where it is the decode segment.
        largest: of its scratch, as `collectives.largest_results` gives it.
    """

    name: str
    seconds: float
    beside_bytes: int
    argument_bytes: int = 0
    result_bytes: int = 0
    temporary_bytes: int = 0
    refused: str = ''
    compiled: bool = False
    exchanged: list[Collective] = dataclasses.field(default_factory=list)
    largest: list[dict] = dataclasses.field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """On a device while it runs."""
        return self.beside_bytes + self.argument_bytes + self.result_bytes + self.temporary_bytes


def compile_check(run: RunConfig, workdir: str, topology: str, out: str, only: str) -> int:
    """Compiles and prints; returns the exit code."""
    if workdir:
        raise ConfigError(f'--workdir={workdir}: this command takes none')
    if out and (why_not := why_no_file(Path(out))):
        raise ConfigError(f'--out={out}: {why_not}')
    named = parse_slice(topology)
    chip, shape = CHIPS[named.chip], published_shape(run)
    schedule = load_schedule(run.schedule, run.rollout, shape.layers, run.mismatch.bin_width_tokens)
    mesh = meshes.make_mesh(run.parallel, slice_devices(named))
    run, note = memory.fit_pool(run, shape, mesh.shape, chip.available_bytes, chip.platform)
    frame = Frame.make(run, mesh, shape, schedule)
    engine = frame.engine_that_ends((shape.vocab_size,), trains=run.phase == 'rl')
    check = Check(frame, engine, chip.available_bytes, only)
    with Console() as console:
        facts = {
            'model': f'{model_name(shape)}, {run.model.compute_dtype}',
            'slice': f'{named}, {mesh.size} devices of {memory.show_bytes(chip.available_bytes)}',
            'mesh': ', '.join(f'{axis} {size}' for axis, size in mesh.shape.items()),
            'kernels': f'{engine.kernels} ({engine.why_kernels})',
            'learner attention': check.learner.attention,
        }
        console.start('Compile check', facts)
        if note:
            console.message(note)
        console.message('Bytes of each device')
        for part, size in check.parts().items():
            console.message(_PARTS.format(part, memory.show_bytes(size)))
        console.message('\n' + _PROGRAMS.format('', 'beside it', 'arguments', 'results', 'scratch', 'together', 's'))
        for name in check.chosen:
            console.status('compiling', name)
            console.message(_program_line(check.compile(name)))
        for line in check.verdict(named):
            console.message(line)
        if out:
            write_atomically(Path(out), json.dumps(check.facts(named), indent=1) + '\n')
        for problem in check.problems():
            console.warn(problem)
    return FAILED if check.problems() else 0


class Check:
    """The programs of a run for the devices of a slice, and what was found.

    Args:
        frame, engine: of the run.
        available_bytes: of a device.
        only: names of programs to compile, separated by commas, each the beginning of one; '' = all.
    """

    def __init__(self, frame: Frame, engine: Engine, available_bytes: int, only: str = ''):
        self.frame, self.engine, self.available_bytes = frame, engine, available_bytes
        run = frame.run
        self.learner = Learner(frame.learner_graph, frame.abstract_params(), frame.mesh, run, frame.shape.d_model)
        self.distiller = frame.distiller(self.learner, engine) if run.distill.enabled else None
        keep_hidden = run.mismatch.every_steps > 0 or run.mismatch.floor_every_steps > 0
        sampling = Sampling(1.0, keep_hidden=keep_hidden)
        adapter = self.distiller.abstract_sampler_adapter() if self.distiller else None
        self.of_sampling = engine.programs(self.learner.abstract_state.params, sampling, adapter)
        self.of_learning = self.learner.programs(keep_hidden=keep_hidden)
        if self.distiller:
            self.of_learning |= self.distiller.programs()
        if run.phase != 'rl':
            self.of_sampling = {}
            del self.of_learning['scoring']
        self.functions = self.of_sampling | self.of_learning
        begins = tuple(filter(None, only.split(',')))
        self.chosen = [name for name in self.functions if not begins or name.startswith(begins)]
        if not self.chosen:
            raise ConfigError(f'--only={only}: the programs are {", ".join(self.functions)}')
        self.programs: list[Program] = []
        self.tensors = list(self._tensors())

    def parts(self) -> dict[str, int]:
        """Bytes of a device by part, of the arrays that a run keeps."""
        found: dict[str, int] = {}
        for tensor in self.tensors:
            found[tensor.part] = found.get(tensor.part, 0) + tensor.size_bytes
        return found

    def compile(self, name: str) -> Program:
        function, arguments = self.functions[name]
        program = Program(name, 0.0, self._beside(name))
        began = time.perf_counter()
        try:
            # Lowered for these devices alone: the default one is a CPU.
            with jax.sharding.use_abstract_mesh(self.frame.mesh.abstract_mesh):
                lowered = function.lower(*arguments)
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if _OUT_OF_MEMORY not in str(error):
                raise
            program.refused = str(error)
        else:
            counted = compiled.memory_analysis()
            program.argument_bytes = counted.argument_size_in_bytes
            program.result_bytes = counted.output_size_in_bytes - counted.alias_size_in_bytes
            program.temporary_bytes = counted.temp_size_in_bytes + counted.generated_code_size_in_bytes
            text = compiled.as_text() or ''
            program.exchanged = loop_collectives(text) if name == SEGMENT else []
            program.largest = largest_results(text, 3)
            program.compiled = True
        program.seconds = time.perf_counter() - began
        self.programs.append(program)
        return program

    def exchanged(self) -> list[Collective]:
        """The collectives of a decode step, where it was compiled."""
        return next((program.exchanged for program in self.programs if program.name == SEGMENT), [])

    def gathered(self) -> list[tuple[Collective, str]]:
        """Those that bring weights or cache together."""
        own = ('sampler weights', 'KV pool', 'landmarks')
        cut = {
            _of_all_layers(t.name): t.whole_elements
            for t in self.tensors
            if t.part in own and t.whole_elements > math.prod(t.shape)
        }
        shape, layout = self.frame.shape, self.engine.layout
        widest = layout.slots * max(shape.vocab_size, shape.d_ff, shape.query_heads * shape.head_dim, shape.d_model)
        return gathered(self.exchanged(), cut, widest)

    def problems(self) -> list[str]:
        """What makes the check fail, one sentence each."""
        found = []
        for program in self.programs:
            if program.refused:
                found.append(f'{program.name}: the compiler has too little memory: {_first_lines(program.refused)}')
            elif program.total_bytes > self.available_bytes:
                over = memory.show_bytes(program.total_bytes - self.available_bytes)
                found.append(f'{program.name}: {over} more than a device has')
        for (one, what), count in collections.Counter(self.gathered()).items():
            found.append(
                f'a decode step brings together {what}: {count} {one.kind} {list(one.shape)}, '
                f'{memory.show_bytes(one.size_bytes)} each'
            )
        return found

    def verdict(self, named: Slice) -> Iterator[str]:
        """The lines below the table of programs."""
        full = max(self.programs, key=lambda program: program.total_bytes)
        if not any(program.refused for program in self.programs):
            spare = self.available_bytes - full.total_bytes
            yield (
                f'\n  {memory.show_bytes(full.total_bytes)} at most ({full.name}), of '
                f'{memory.show_bytes(self.available_bytes)} that a device of {named} has: '
                f'margin {spare / self.available_bytes:.1%}'
            )
        if any(program.name == SEGMENT and program.compiled for program in self.programs):
            rows = summary(self.exchanged())
            yield f'\nCollectives of a decode step: {sum(row["count"] for row in rows)}'
            for row in rows:
                where = 'more than once a step' if row['repeated'] else ''
                cells = row['kind'], str(row['shape']), row['count'], memory.show_bytes(row['bytes']), where
                yield _EXCHANGED.format(*cells).rstrip()
            if not self.gathered():
                yield '  none brings weights or cache together'
        if self.problems():
            yield '\nThe largest tensors of each device'
            for row in self.largest():
                yield _EXCHANGED.format(
                    row['part'], str(row['shape']), row['count'], memory.show_bytes(row['bytes']), row['name']
                )

    def largest(self) -> list[dict]:
        """The largest arrays of a device, those of all layers in one line."""
        groups: dict[tuple, list[Tensor]] = {}
        for tensor in self.tensors:
            groups.setdefault((tensor.part, _of_all_layers(tensor.name), tensor.shape), []).append(tensor)
        rows = [
            {
                'part': part,
                'name': name,
                'shape': list(shape),
                'count': len(ones),
                'bytes': sum(t.size_bytes for t in ones),
            }
            for (part, name, shape), ones in groups.items()
        ]
        for program in self.programs:
            rows += [{**row, 'part': program.name, 'count': 1} for row in program.largest]
            rows += [
                {'part': program.name, 'name': 'scratch', 'shape': shape, 'count': 1, 'bytes': size}
                for shape, size in _refused_arrays(program.refused)
            ]
        return sorted(rows, key=lambda row: -row['bytes'])[:LARGEST]

    def facts(self, named: Slice) -> dict:
        """All of it, for a file."""
        run, shape = self.frame.run, self.frame.shape
        return {
            'topology': str(named),
            'jax': jax.__version__,
            'model': model_name(shape),
            'mesh': dict(self.frame.mesh.shape),
            'kernels': str(self.engine.kernels),
            'learner_attention': self.learner.attention,
            'pool_pages': self.engine.pool_pages,
            'available_bytes': self.available_bytes,
            'parts_bytes': self.parts(),
            'estimated_bytes': memory.estimate(run, shape, self.frame.mesh.shape, 'tpu'),
            'programs': [
                {
                    **{k: v for k, v in dataclasses.asdict(program).items() if k not in ('exchanged', 'largest')},
                    'total_bytes': program.total_bytes,
                }
                for program in self.programs
            ],
            'decode_step': summary(self.exchanged()),
            'gathered': [{'kind': one.kind, 'shape': list(one.shape), 'what': what} for one, what in self.gathered()],
            'problems': self.problems(),
            'largest': self.largest(),
        }

    def _tensors(self) -> Iterator[Tensor]:
        state = self.learner.abstract_state
        yield from _leaves('parameters', state.params)
        yield from _leaves('optimizer', state.optimizer)
        if self.distiller:
            yield from _leaves('adapter', self.distiller.abstract_state)
            yield from _leaves('adapter', self.distiller.abstract_sampler_adapter().factors)
        if self.frame.run.learner.kl_coef:
            yield from _leaves('start policy', state.params)
        if state.critic is not None:
            yield from _leaves('critic', state.critic)
        if self.of_sampling:
            weights, cache, slots = self.of_sampling[SEGMENT][1][:3]
            yield from _leaves('sampler weights', weights)
            yield from _leaves('KV pool', cache.pages)
            yield from _leaves('landmarks', cache.landmarks)
            yield from _leaves('hidden states', slots.hidden_BTD)
            yield from _leaves('other slots', dataclasses.replace(slots, hidden_BTD=None))

    def _beside(self, name: str) -> int:
        """Bytes that lie beside this program's arguments: the learner's state while sampling, not the pool while
        learning, which is freed before it."""
        parts = self.parts()
        sampling = sum(parts.get(part, 0) for part in _OF_SAMPLING)
        learning = sum(parts.values()) - sampling
        if name in self.of_sampling:
            # The copy of the weights makes them, from the parameters; all others take weights, cache and slots.
            return learning - parts['parameters'] if name.startswith('copy') else learning
        return parts.get('sampler weights', 0) + learning - self._taken(name)

    def _taken(self, name: str) -> int:
        """Bytes of the learner's state among the arguments of one of its programs."""
        parts, run = self.parts(), self.frame.run
        if name == CRITIC_UPDATE:
            return parts['critic']
        if name in (CRITIC_VALUES, CRITIC_GRADIENTS):
            # Without moments; a head reads the policy's weights.
            of_critic = sum(t.size_bytes for t in self.tensors if t.part == 'critic' and '.params' in t.name)
            return of_critic + (parts['parameters'] if run.critic.kind == 'head' else 0)
        if name == ADAPTER_UPDATE:
            return parts['adapter']
        return parts['parameters'] + (parts['optimizer'] if name == 'optimizer update' else 0)


def _leaves(part: str, tree: Any) -> Iterator[Tensor]:
    for path, leaf in tree_util.tree_leaves_with_path(tree):
        own = leaf.sharding.shard_shape(leaf.shape)
        spec = leaf.sharding.spec
        cut = math.prod(leaf.sharding.mesh.shape['tensor'] for axis in spec if axis == 'tensor')
        yield Tensor(
            part,
            f'{part}{tree_util.keystr(path)}'.replace('.value', ''),
            own,
            math.prod(own) * leaf.dtype.itemsize,
            math.prod(own) * cut,
        )


def _of_all_layers(name: str) -> str:
    """The same for the arrays of all layers."""
    return re.sub(r'\d+', '*', name)


def _program_line(program: Program) -> str:
    if program.refused:
        return f'  {program.name:<24}does not fit: {_first_lines(program.refused)}'
    counts = (program.beside_bytes, program.argument_bytes, program.result_bytes, program.temporary_bytes)
    sizes = [memory.show_bytes(size) for size in (*counts, program.total_bytes)]
    return _PROGRAMS.format(program.name, *sizes, f'{program.seconds:.0f}')


def _first_lines(refused: str) -> str:
    """The compiler's sentence on what is needed and what there is."""
    found = re.search(r'[^:\n]*(?:exceeds|Used [\d.]+\w? of|exceeded)[^\n]*', refused)
    return (found[0] if found else refused.partition('\n')[0]).strip()


def _refused_arrays(refused: str) -> Iterator[tuple[list[int], int]]:
    """Shapes and bytes of the allocations that the compiler lists where they do not fit."""
    units = {'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30, '': 1}
    for size, unit, dims in re.findall(r'Size: ([\d.]+)([KMG]?)[\s\S]*?Shape: \w+\[([\d,]*)\]', refused):
        yield [int(n) for n in dims.split(',') if n], int(float(size) * units[unit])


def _flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string('topology', None, 'TPU slice, e.g. v5e:4x4, v6e:8x8 or v5p:2x2x4', flag_values=values)
    flags.DEFINE_string('out', '', 'JSON file to write all of it to', flag_values=values)
    flags.DEFINE_string(
        'only', '', 'programs to compile, by the beginnings of their names, e.g. decode,gradients', flag_values=values
    )


def main(argv: Sequence[str] | None = None) -> None:
    """The command, on a CPU whatever accelerator is at hand."""
    jax.config.update('jax_platforms', 'cpu')
    jax.config.update('jax_enable_compilation_cache', False)  # nothing here can be loaded, and the seconds would lie
    commands.run(compile_check, workdir_required=False, uses_devices=False, define_flags=_flags, argv=argv)


if __name__ == '__main__':
    main()
