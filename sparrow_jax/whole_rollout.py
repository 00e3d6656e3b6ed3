"""A whole rollout beside its roofline: the engine as a training run uses it, with random weights and forced lengths.

    python -m sparrow_jax.bench_rollout --config=configs/X.py --lengths=FILE.json --modes=sparse --slots=96

The file says how many tokens each response has (`scripts/make_rollout_lengths.py` makes such files), and how many
responses a prompt has. No token ends a response here, each request has its length as its limit. The engine does not
look ahead: it takes the requests in the file's order and learns of an end when it comes. Prompts are random; lengths of
prompts and responses replace `rollout.max_prompt_tokens` and `rollout.max_response_tokens`; hidden states are not kept.

The roofline is the time of reading all bytes once (`step_reads.rollout_reads`) at the bandwidth that attention reads
reach, on several devices with as much for each of them to read. The clock starts after everything is compiled and stops
when all responses are on the host. With `--modes=dense,sparse` the dense rollout comes first, in a file of its own.

Under an adaptive schedule the probes are followed as in training, and budgets stay those of the start: what random
weights would make of them says nothing.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pallas_kernels.bench import CEILING, why_no_file
from sparrow_jax import memory
from sparrow_jax.bench_setup import Setup, dense_schedule, measured_facts, mode_of, model_name, start
from sparrow_jax.config import ConfigError, RolloutConfig
from sparrow_jax.console import Console
from sparrow_jax.json_files import read_object
from sparrow_jax.metrics import CompileCounter
from sparrow_jax.occupancy_plot import plot_occupancy
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.rollout.engine import Engine, Progress
from sparrow_jax.rollout.pool import Request
from sparrow_jax.rollout.step_times import sampling_of
from sparrow_jax.sparsity.schedules import Schedule
from sparrow_jax.step_reads import RolloutReads, rollout_reads
from sparrow_jax.workdir import write_atomically

WRITE_EVERY_S = 20.0  # a run that is killed leaves what it had measured until then
PLOTS = ('.png', '.svg')


@dataclasses.dataclass(frozen=True)
class Lengths:
    """What a file of forced lengths says.

    Attributes:
        prompt_tokens: of every prompt.
        response_tokens: of each response, in the order of the requests.
        samples_per_prompt: so many responses that follow each other have one prompt.
    """

    prompt_tokens: int
    response_tokens: tuple[int, ...]
    samples_per_prompt: int = 1

    @property
    def longest_tokens(self) -> int:
        return self.prompt_tokens + max(self.response_tokens)


class Occupancy:
    """What the slots and the pool were doing at the end of each segment."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, Progress]] = []
        self.began = time.perf_counter()

    def add(self, progress: Progress) -> None:
        self.rows.append((time.perf_counter() - self.began, progress))

    def series(self) -> dict[str, list[float]]:
        """Seconds since the start, and of each of them: sequences in slots, slots that were decoded, sequences parked,
        pages, tokens so far."""
        names = ('running', 'slots', 'parked', 'pages', 'tokens')
        return {
            'time_s': [round(seconds, 3) for seconds, _ in self.rows],
            **{name: [getattr(progress, name) for _, progress in self.rows] for name in names},
        }


@dataclasses.dataclass(frozen=True)
class Case:
    """One rollout of a bench.

    Attributes:
        schedule: dense or not.
        rollout: the sampler's sizes.
        note: what is to be said of its pool, or ''.
        out: file for its figures.
    """

    schedule: Schedule
    rollout: RolloutConfig
    note: str
    out: Path


@dataclasses.dataclass(frozen=True)
class Beside:
    """Figures that a rollout is compared with, and their file."""

    figures: Mapping[str, Any]
    file: str


def bench_whole_rollout(
    setup: Setup,
    lengths_file: str,
    slots: tuple[int, ...],
    modes: tuple[str, ...],
    beside: str,
    learner_file: str,
    out: Path,
) -> int:
    """Times one rollout, or a dense and a sparse one, and writes figures and plots; returns the exit code.

    Args:
        setup: configuration and decoder.
        lengths_file: of forced lengths.
        slots: one number, or none for that of the configuration.
        modes: 'dense', 'sparse' or both.
        beside: figures of the other sampler for the same lengths, or ''.
        learner_file: figures of `bench_learner`, by which steps of training are compared too, or ''.
        out: JSON file for the figures, of the sparse sampler where both run; the dense one's get `.dense` in their
            name, and the plots go beside it.

    Raises:
        ConfigError: flags, files and configuration do not fit each other, or memory does not suffice.
    """
    if jax.process_count() > 1:
        raise ConfigError(f'--lengths={lengths_file}: whole rollouts are timed in one process, with all of its devices')
    lengths = read_lengths(lengths_file)
    if lengths.longest_tokens > setup.shape.max_positions:
        raise ConfigError(
            f'--lengths={lengths_file}: its longest prompt and response have {lengths.longest_tokens} tokens, the '
            f'model knows {setup.shape.max_positions} positions'
        )
    if beside and len(modes) > 1:
        raise ConfigError(f'--beside={beside}: both samplers run here; give one of --modes')
    if learner_file and not beside and len(modes) == 1:
        raise ConfigError(f'--learner={learner_file}: compares two samplers; give both of --modes, or --beside')
    if out.suffix != '.json':
        raise ConfigError(f'--out={out}: must end in .json; the pictures get their names from it')
    files = [out.with_suffix('.dense.json'), out] if len(modes) > 1 else [out]  # the dense one comes first
    cases = [
        Case(_schedule(setup, mode), *_rollout(setup, lengths, slots), file)
        for mode, file in zip(modes, files, strict=True)
    ]
    other = Beside(read_beside(beside, setup, lengths, mode_of(cases[0].schedule)), beside) if beside else None
    learner_s = _learner_seconds(learner_file, setup, lengths) if learner_file else None
    for case in cases:
        for file in (case.out, *(case.out.with_suffix(suffix) for suffix in PLOTS)):
            if why_not := why_no_file(file):
                raise ConfigError(f'--out={out}: {file.name}: {why_not}')
    for case in cases:
        other = Beside(_run_case(setup, case, lengths, lengths_file, other, learner_s), str(case.out))
    return 0


def _run_case(
    setup: Setup, case: Case, lengths: Lengths, lengths_file: str, other: Beside | None, learner_s: float | None
) -> dict[str, Any]:
    """Its figures, written and plotted."""
    schedule, rollout, out = case.schedule, case.rollout, case.out
    with Console() as console:
        console.status('measuring the read bandwidth')
        engine = setup.engine(rollout, schedule)
        facts = measured_facts(setup, engine) | _facts(setup, engine, schedule, lengths, lengths_file)
        start(console, f'Whole rollout, {mode_of(schedule)}', facts)
        if case.note:
            console.notice_once(case.note)
        reads = rollout_reads(
            setup.shape,
            schedule,
            setup.dtype,
            prompt_tokens=lengths.prompt_tokens,
            response_tokens=lengths.response_tokens,
            slots=rollout.slots,
            shards=engine.shards,
            tensor=setup.mesh.shape['tensor'],
        )
        facts |= _roofline(reads)

        def write(measured: dict[str, Any]) -> None:
            write_atomically(out, json.dumps(facts | measured) + '\n')

        figures = facts | measure(setup, engine, lengths, console.status, write)
        figures['fraction_of_roofline'] = figures['roofline_s'] / figures['seconds']
        if other:
            figures['beside'] = compared(figures, other.figures, other.file, learner_s)
        write(figures)
        for suffix in PLOTS:
            plot_occupancy([figures, *([other.figures] if other else [])], out.with_suffix(suffix))
        if figures['compiled_late']:
            console.warn(f'compiled after warm-up: {", ".join(figures["compiled_late"])}')
        console.finish('Whole rollout', _shown(figures, out))
    return figures


def measure(
    setup: Setup,
    engine: Engine,
    lengths: Lengths,
    status: Callable[..., None],
    write: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Runs the rollout.

    Args:
        status: shows how far it is.
        write: called now and then with what is known so far.

    Returns:
        Fields of the result: seconds, tokens/s, occupancy.

    Raises:
        RuntimeError: a response has not the length that was asked for.
    """
    status('making weights')
    weights = setup.random_weights(engine)
    sampling, requests = sampling_of(engine), forced_requests(lengths, setup.shape.vocab_size, setup.run.seed)
    jax.block_until_ready(weights)
    began = time.perf_counter()
    engine.warm_up(weights, [sampling], lambda what: status(f'compiling the {what}'))
    compile_s = time.perf_counter() - began
    occupancy, written_s = Occupancy(), 0.0

    def on_progress(progress: Progress) -> None:
        nonlocal written_s
        occupancy.add(progress)
        status('sampling', done=progress.finished, total=progress.total, unit='responses')
        seconds = occupancy.rows[-1][0]
        if seconds - written_s > WRITE_EVERY_S:
            written_s = seconds
            tokens = {'tokens': progress.tokens, 'seconds': seconds}
            write({'complete': False, 'compile_s': compile_s, **tokens, 'occupancy': occupancy.series()})

    with CompileCounter() as compiles:
        compiles.warmed_up()
        occupancy.began = time.perf_counter()
        settings: dict[str, Any] = {'step': 0, 'sampling': sampling, 'on_progress': on_progress}
        run_key = jax.random.key(setup.run.seed)
        probes: dict[str, Any] = {}
        if engine.probing:
            start = engine.start_controller()
            responses, adapted = engine.generate_adaptively(weights, requests, start, run_key=run_key, **settings)
            probes = {'probes': engine.probes, 'probe_s': adapted.probe_s}
        else:
            responses = engine.generate(weights, requests, run_key=run_key, **settings)
        seconds = time.perf_counter() - occupancy.began
        late = list(compiles.late)
    drawn = tuple(len(response.tokens) for response in responses)
    if drawn != lengths.response_tokens:
        raise RuntimeError('a response has another length than the file says')
    last = occupancy.rows[-1][1]
    return {
        'complete': True,
        'tokens': sum(drawn),
        'seconds': seconds,
        'tokens_per_s': sum(drawn) / seconds,
        'compile_s': compile_s,
        'compiled_late': late,
        'prefill_s': last.prefill_s,
        'decode_s': seconds - last.prefill_s,
        'steps': len(occupancy.rows) * engine.rollout.segment_steps,
        'parks': last.parks,
        **probes,
        'occupancy': occupancy.series(),
    }


def forced_requests(lengths: Lengths, vocab_size: int, seed: int) -> list[Request]:
    """Random prompts, each with its response's length as the limit."""
    rng = np.random.default_rng(seed)
    count = -(-len(lengths.response_tokens) // lengths.samples_per_prompt)
    prompts = rng.integers(0, vocab_size, (count, lengths.prompt_tokens))
    ids = [prompt.tolist() for prompt in prompts]
    return [
        Request(ids[number // lengths.samples_per_prompt], *divmod(number, lengths.samples_per_prompt), limit)
        for number, limit in enumerate(lengths.response_tokens)
    ]


def read_lengths(file: str) -> Lengths:
    """Raises ConfigError where the file is missing or holds something else than lengths."""
    raw = read_object(Path(file), f'--lengths={file}')
    for field in ('prompt_tokens', 'response_tokens'):
        if field not in raw:
            raise ConfigError(f'--lengths={file}: field {field} is missing')
    is_count = lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0
    prompt, responses, samples = raw['prompt_tokens'], raw['response_tokens'], raw.get('samples_per_prompt', 1)
    for name, value in (('prompt_tokens', prompt), ('samples_per_prompt', samples)):
        if not is_count(value):
            raise ConfigError(f'--lengths={file}: {name}={value!r} must be a positive integer')
    if not isinstance(responses, list) or not responses or not all(map(is_count, responses)):
        raise ConfigError(f'--lengths={file}: response_tokens must be a list of positive integers')
    return Lengths(prompt, tuple(responses), samples)


def read_beside(file: str, setup: Setup, lengths: Lengths, mode: str) -> dict[str, Any]:
    """Figures of the other sampler.

    Raises:
        ConfigError: not such a file, an unfinished run, the same sampler, or another model, other devices or lengths.
    """
    other = read_object(Path(file), f'--beside={file}')
    if not other.get('complete') or 'roofline_s' not in other:
        raise ConfigError(f'--beside={file}: holds no finished run of --lengths')
    if other['mode'] == mode:
        raise ConfigError(f'--beside={file}: is of the {mode} sampler, too; give the other one')
    if (other['prompt_tokens'], tuple(other['response_tokens'])) != (lengths.prompt_tokens, lengths.response_tokens):
        raise ConfigError(f'--beside={file}: was measured with other lengths')
    here = {
        'model': model_name(setup.shape),
        'device': jax.devices()[0].device_kind,
        'devices': jax.device_count(),
        'samples_per_prompt': lengths.samples_per_prompt,
    }
    for name, value in here.items():
        if other.get(name, 1) != value:
            raise ConfigError(f'--beside={file}: was measured with {name} {other.get(name, 1)}, here it is {value}')
    return other


def compared(
    figures: Mapping[str, Any], other: Mapping[str, Any], file: str, learner_s: float | None = None
) -> dict[str, Any]:
    """How much faster the sparse sampler is than the dense one, and how much it would be if both read all at best.

    learner_s: seconds of the learner in a step with these responses, for the speedup of steps of training.
    """
    dense, sparse = (figures, other) if figures['mode'] == 'dense' else (other, figures)
    seconds = dense['seconds'], sparse['seconds']
    of_step = {}
    if learner_s is not None:
        of_step = {'learner_s': learner_s, 'step_speedup': (seconds[0] + learner_s) / (seconds[1] + learner_s)}
    return {
        **of_step,
        'file': file,
        'mode': other['mode'],
        'slots': other['slots'],
        'device': other['device'],
        'seconds': other['seconds'],
        'speedup': seconds[0] / seconds[1],
        'roofline_speedup': dense['roofline_s'] / sparse['roofline_s'],
    }


def _learner_seconds(file: str, setup: Setup, lengths: Lengths) -> float:
    """Of scoring and update in a step with these responses, from `bench_learner`'s rows that are nearest in length.

    Raises:
        ConfigError: no such file, or of another model.
    """
    raw = read_object(Path(file), f'--learner={file}')
    here = {'model': model_name(setup.shape), 'device': jax.devices()[0].device_kind}
    is_row = lambda row: {'row_tokens', 'rows', 'ms'} <= row.keys()
    if not raw.get('rows') or not all(map(is_row, raw['rows'])) or not {*here, 'devices'} <= raw.keys():
        raise ConfigError(f'--learner={file}: holds no figures of sparrow_jax.bench_learner')
    for name, value in here.items():
        if raw[name] != value:
            raise ConfigError(f'--learner={file}: is of {raw[name]}, not of {value}')
    tokens = sum(lengths.response_tokens) + len(lengths.response_tokens) * lengths.prompt_tokens
    mean = tokens / len(lengths.response_tokens)
    row = min(raw['rows'], key=lambda row: abs(row['row_tokens'] - mean))
    ms = row['ms']
    of_token = (ms['scoring'] + ms['gradients']) / (row['rows'] * row['row_tokens']) * raw['devices'] / setup.mesh.size
    return (tokens * of_token + ms['optimizer update']) / 1e3


def _schedule(setup: Setup, mode: str) -> Schedule:
    if mode == 'dense':
        return dense_schedule(setup.schedule)
    if setup.schedule.kind == 'dense':
        raise ConfigError(f'schedule.kind={setup.schedule.kind!r}: --modes=sparse needs another schedule')
    if setup.schedule.kind == 'adaptive' and not setup.run.rollout.pool_pages:
        raise ConfigError('rollout.pool_pages=0: with probes, which need pages of their own, set a number here')
    return setup.schedule


def _rollout(setup: Setup, lengths: Lengths, slots: tuple[int, ...]) -> tuple[RolloutConfig, str]:
    """The sampler's sizes, and what to say of its pool."""
    if len(slots) > 1 or any(n < 1 for n in slots):
        raise ConfigError(f'--slots={",".join(map(str, slots))}: must be one positive number with --lengths')
    shards, number = meshes.batch_shards(setup.mesh), slots[0] if slots else setup.run.rollout.slots
    if number % shards:
        raise ConfigError(f'--slots={number}: must be a multiple of the {shards} data shards')
    rollout = dataclasses.replace(
        setup.run.rollout,
        slots=number,
        samples_per_prompt=lengths.samples_per_prompt,
        max_prompt_tokens=lengths.prompt_tokens,
        max_response_tokens=max(lengths.response_tokens),
    )
    if 0 < rollout.pool_pages < rollout.pages_per_sequence:
        raise ConfigError(
            f'rollout.pool_pages={rollout.pool_pages}: cannot hold the longest sequence of --lengths, which needs '
            f'{rollout.pages_per_sequence} pages; set it to 0'
        )
    device, shape = jax.local_devices()[0], setup.shape
    available = memory.available_bytes(device)
    asked = setup.sampling_run(rollout)
    options: dict[str, Any] = {'trains': False, 'keeps_parameters': False}
    fitted, note = memory.fit_pool(asked, shape, setup.mesh.shape, available, device.platform, **options)
    parts = setup.memory(fitted.rollout)
    needed = sum(parts.values())
    if available is not None and needed > (1 - memory.HEADROOM) * available:
        raise ConfigError(
            f'--slots={rollout.slots}: needs about {memory.show_bytes(needed)}, but only '
            f'{memory.show_bytes(available)} are available ({memory.HEADROOM:.0%} of them left to the compiler):\n'
            f'{memory.table(parts)}\nGive fewer slots, or set rollout.pool_pages lower'
        )
    return fitted.rollout, note


def _facts(setup: Setup, engine: Engine, schedule: Schedule, lengths: Lengths, file: str) -> dict[str, Any]:
    return {
        'mode': mode_of(schedule),
        'schedule': schedule.kind,
        'budget_pages': list(schedule.budget_pages),
        'bin_width_tokens': schedule.bin_width_tokens,
        'mesh': dict(setup.mesh.shape),
        'slots': engine.rollout.slots,
        'pool_pages': engine.pool_pages * engine.shards,
        'lengths': file,
        'prompt_tokens': lengths.prompt_tokens,
        'samples_per_prompt': lengths.samples_per_prompt,
        'response_tokens': list(lengths.response_tokens),
    }


def _roofline(reads: RolloutReads) -> dict[str, Any]:
    return {
        'roofline_s': reads.total_bytes / CEILING,
        'roofline': {
            'cache_bytes': reads.cache_bytes,
            'steps': reads.steps,
            'weight_bytes_of_a_step': reads.weight_bytes,
            'bytes_per_s': CEILING,
        },
    }


def _shown_probes(figures: Mapping[str, Any]) -> dict[str, str]:
    if 'probe_s' not in figures:
        return {}
    share = figures['probe_s'] / figures['seconds']
    return {'probes': f'{figures["probes"]}, {figures["probe_s"]:.1f} s, {share:.1%} of the time'}


def _shown(figures: Mapping[str, Any], out: Path) -> dict[str, str]:
    seconds, roofline_s = figures['seconds'], figures['roofline_s']
    facts = {
        'tokens': f'{figures["tokens"]:,} in {seconds:,.1f} s, {figures["tokens_per_s"]:,.0f} tokens/s',
        'roofline': f'{roofline_s:,.4g} s, of which this is {figures["fraction_of_roofline"]:.1%}',
        'parts': f'prefill {figures["prefill_s"]:.1f} s, decode {figures["decode_s"]:,.1f} s; '
        f'compiled before, in {figures["compile_s"]:.1f} s',
        **_shown_probes(figures),
        'steps': f'{figures["steps"]:,}, at best {figures["roofline"]["steps"]:,}',
        'parked': f'{figures["parks"]} times',
    }
    if 'beside' in figures:
        beside = figures['beside']
        facts['sparse over dense'] = f'{beside["speedup"]:.2f} times, at best {beside["roofline_speedup"]:.2f}'
        if 'step_speedup' in beside:
            facts['steps of training'] = (
                f'{beside["step_speedup"]:.2f} times, with {beside["learner_s"]:.1f} s of learning'
            )
    return facts | {'written': ', '.join(str(out.with_suffix(suffix)) for suffix in (out.suffix, *PLOTS))}
