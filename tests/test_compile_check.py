"""compile_check on small configurations: its parts beside memory's estimate, its verdicts, its command line."""

import json

import pytest
from tiny_run import ROOT, exit_code

from sparrow_jax import commands, compile_check, memory
from sparrow_jax.assembly import Frame
from sparrow_jax.bench_setup import published_shape
from sparrow_jax.compile_check import SEGMENT, Check, Program
from sparrow_jax.config import resolve
from sparrow_jax.parallel import mesh as meshes
from sparrow_jax.slices import parse_slice, slice_devices
from sparrow_jax.sparsity.schedules import load_schedule

CONFIG = 'configs/qwen3_1p7b.py:smoke'
PARTS = {  # of the check, as the estimate calls them
    'parameters': 'parameters',
    'optimizer': 'optimizer',
    'start policy': 'start policy',
    'critic': 'critic',
    'sampler weights': 'sampler weights',
    'KV pool': 'rollout: KV pool',
    'landmarks': 'rollout: landmarks',
    'hidden states': 'rollout: hidden states',
    'other slots': 'rollout: slots',
    'adapter': 'adapter',
}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def make_check(slice: str = 'v5e:2x2', available: int = 1 << 30, **fields) -> Check:
    run = resolve(commands.load_config(CONFIG, [f'--config.{name}={value}' for name, value in fields.items()]))
    shape = published_shape(run)
    mesh = meshes.make_mesh(run.parallel, slice_devices(parse_slice(slice)))
    schedule = load_schedule(run.schedule, run.rollout, shape.layers, run.mismatch.bin_width_tokens)
    frame = Frame.make(run, mesh, shape, schedule)
    return Check(frame, frame.engine_that_ends((shape.vocab_size,), trains=True), available)


def call(*arguments) -> int:
    flags = compile_check._flags
    return exit_code(compile_check.compile_check, arguments, workdir_required=False, define_flags=flags)


@pytest.mark.parametrize(
    'fields',
    [
        {},
        {'parallel.tensor': 2, 'model.compute_dtype': 'bfloat16'},
        {'parallel.tensor': 4, 'parallel.data': 1},  # two KV heads: each held by two shards
        {'parallel.fsdp': 2, 'parallel.data': 2, 'rollout.pool_pages': 40, 'learner.kl_coef': 0.1},
        {'parallel.tensor': 2, 'schedule.kind': 'adaptive', 'rollout.slots': 8, 'model.shape.tie_embeddings': False},
        {'parallel.fsdp': 2, 'parallel.tensor': 2, 'learner.advantage': 'gae', 'critic.kind': 'trunk'},
        {'parallel.fsdp': 4, 'parallel.data': 1, 'schedule.policy': 'quest', 'mismatch.every_steps': 0},
        {'parallel.fsdp': 2, 'parallel.data': 1, 'parallel.tensor': 2, 'distill.enabled': True},
    ],
)
def test_every_part_is_estimated_within_a_tenth(fields):
    check = make_check(**fields)
    run = check.frame.run
    estimated = memory.estimate(run, check.frame.shape, check.frame.mesh.shape, 'tpu')
    for part, size in check.parts().items():
        assert estimated[PARTS[part]] == pytest.approx(size, rel=0.1), part


def test_what_lies_beside_a_program_and_its_arguments_are_all_that_a_run_keeps():
    check = make_check(**{'parallel.tensor': 2})
    parts = check.parts()
    everything, pool = sum(parts.values()), parts['KV pool'] + parts['landmarks'] + parts['hidden states']
    kept = everything - pool - parts['other slots']
    assert check._beside(SEGMENT) == parts['parameters'] + parts['optimizer']
    assert check._beside('optimizer update') == parts['sampler weights']
    assert check._beside('gradients') == kept - parts['parameters']


@pytest.mark.parametrize('kind', ['head', 'trunk'])
def test_the_critics_programs_are_counted_too(kind):
    check = make_check(**{'parallel.fsdp': 4, 'parallel.data': 1, 'learner.advantage': 'gae', 'critic.kind': kind})
    parts = check.parts()
    kept = sum(parts[name] for name in ('parameters', 'optimizer', 'critic', 'sampler weights'))
    weights = parts['critic'] / 3 + (parts['parameters'] if kind == 'head' else 0)  # a head reads the policy
    assert kept - check._beside('critic update') == parts['critic']
    for program in ('critic values', 'critic gradients'):
        assert kept - check._beside(program) == pytest.approx(weights, rel=0.01)
    assert kept - check._beside('gradients') == parts['parameters']
    # The policy's update neither reads nor returns the critic.
    function, arguments = check.functions['optimizer update']
    del function
    assert arguments[0].critic is None


@pytest.mark.slow
def test_the_compiler_counts_the_arguments_as_the_estimate_does():
    """A decode segment and an optimizer update, of sizes that a TPU does not pad: its tiles are 8 times 128 numbers."""
    sizes = {'model.shape.d_model': 256, 'model.shape.head_dim': 128, 'model.shape.d_ff': 512}
    lengths = {'rollout.slots': 16, 'rollout.max_prompt_tokens': 128, 'rollout.max_response_tokens': 128}
    check = make_check(**{'parallel.tensor': 2, **sizes, **lengths})
    run, mesh = check.frame.run, check.frame.mesh
    estimated = memory.estimate(run, check.frame.shape, mesh.shape, 'tpu')
    segment, update = check.compile(SEGMENT), check.compile('optimizer update')
    names = [PARTS[name] for name in ('sampler weights', 'KV pool', 'landmarks', 'hidden states', 'other slots')]
    assert segment.argument_bytes == pytest.approx(sum(estimated[name] for name in names), rel=0.1)
    state = estimated['parameters'] + estimated['optimizer'] + estimated['learner: gradients'] // 2
    assert update.argument_bytes == pytest.approx(state, rel=0.1)
    assert check.exchanged()
    assert {one.kind for one in check.exchanged()} >= {'all-reduce'}


@pytest.mark.slow
def test_one_slot_a_shard_exchanges_nothing_and_the_figures_are_written(tmp_path, capsys):
    """On a slice of four hosts: most of its devices would not be this process's, if there were any."""
    out = tmp_path / 'check.json'
    slots = '--config.rollout.slots=16'
    assert call(f'--config={CONFIG}', '--topology=v5e:4x4', '--only=decode', slots, f'--out={out}') == 0
    shown = capsys.readouterr().out
    assert 'Collectives of a decode step: 0' in shown
    assert 'none brings weights or cache together' in shown
    assert 'margin' in shown
    facts = json.loads(out.read_text())
    assert facts['topology'] == 'v5e:4x4'
    assert facts['mesh'] == {'data': 16, 'fsdp': 1, 'tensor': 1}
    assert [program['name'] for program in facts['programs']] == [SEGMENT]
    assert facts['problems'] == []


def test_what_does_not_fit_is_a_problem_with_the_largest_tensors():
    check = make_check(available=1000)
    check.programs = [Program('gradients', 1.0, beside_bytes=900, argument_bytes=80, temporary_bytes=100)]
    assert check.problems() == ['gradients: 80 B more than a device has']
    lines = '\n'.join(check.verdict(parse_slice('v5e:2x2')))
    assert "parameters['embed']" in lines
    assert 'margin -8.0%' in lines
    refused = (
        'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (180.00G) exceeds '
        'available HBM (15.75G).'
    )
    check.programs = [Program('gradients', 1.0, 0, refused=refused)]
    [problem] = check.problems()
    assert problem.startswith('gradients: the compiler has too little memory')
    assert '(180.00G) exceeds available HBM (15' in problem


MISTAKES = {
    ('--topology=v9:4x4',): '--topology=v9:4x4: the chips are v5e, v6e, v5p, tpu7x',
    ('--topology=v5e:5x5',): '--topology=v5e:5x5: libtpu knows no such slice',
    ('--topology=h200:8',): '--topology=h200:8: programs for several GPUs cannot be compiled without a GPU',
    (): '--topology: missing',
    ('--topology=v5e:2x2', '--workdir=w'): '--workdir=w: this command takes none',
    ('--topology=v5e:2x2', '--out=setup.cfg/x.json'): '--out=setup.cfg/x.json: ',
    ('--topology=v5e:2x2', '--only=x'): '--only=x: the programs are copy of the weights, prefill',
    ('--topology=v5e:2x2', '--config.parallel.tensor=3'): 'must multiply to the 4 devices',
    ('--topology=v5e:2x4',): 'rollout.slots=4: must be a multiple of the 8 data shards',
}


@pytest.mark.parametrize('flags', MISTAKES)
def test_a_mistake_is_an_error_and_nothing_is_compiled(flags, capsys):
    assert call(f'--config={CONFIG}', *flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ''
    assert captured.err.startswith('error: ')
    assert MISTAKES[flags] in captured.err
