"""Rows reach the disk at once, stay valid JSON, and are cut back to the checkpoint at a resume."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from sparrow_jax.config import ConfigError
from sparrow_jax.metrics import CompileCounter, MetricsWriter, read_rows
from sparrow_jax.workdir import Workdir

SAMPLE = {'prompt': '1+1', 'completion': '2', 'answer': '2', 'reward': 1.0, 'finish_reason': 'stop', 'tokens': 1}


def make_workdir(path: Path, primary=True) -> Workdir:
    return Workdir(path, resumed=False, primary=primary, lock=None)


def read_events(folder: Path) -> list[tuple[int, str, float]]:
    events = []
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], 'little')
            event = Event.FromString(data[at + 12 : at + 12 + size])
            events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + size
    return events


def test_each_step_is_one_valid_json_object_on_disk_when_write_returns(tmp_path):
    with MetricsWriter(make_workdir(tmp_path), None) as writer:
        writer.write(0, {'eval/score': 0.5})
        writer.write(
            1,
            {
                'actor/pg_loss': jnp.float32(0.1),
                'actor/entropy': jnp.bfloat16(1.5),
                'nan': jnp.float32(jnp.nan),
                'inf': -np.inf,
                'n': np.int64(7),
                'big': jnp.uint32(4_000_000_000),
                'flag': np.bool_(True),
                'kind': 'fixed',
                'none': None,
                'double': 0.1 + 0.2,
            },
        )
        lines = (tmp_path / 'metrics.jsonl').read_text().splitlines()  # before the writer is closed

        def refuse(constant):
            raise AssertionError(f'{constant} is not JSON')

        assert json.loads(lines[0], parse_constant=refuse) == {'step': 0, 'eval/score': 0.5}
        assert json.loads(lines[1], parse_constant=refuse) == {
            'step': 1,
            'actor/pg_loss': 0.1,
            'actor/entropy': 1.5,
            'nan': None,
            'inf': None,
            'n': 7,
            'big': 4_000_000_000,
            'flag': True,
            'kind': 'fixed',
            'none': None,
            'double': 0.1 + 0.2,
        }
    events = read_events(tmp_path / 'tensorboard')
    assert (1, 'actor/pg_loss', np.float32(0.1)) in events
    assert not {'nan', 'inf', 'kind', 'none'} & {tag for _, tag, _ in events}


def test_float32_values_are_read_back_exactly(tmp_path):
    values = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    with MetricsWriter(make_workdir(tmp_path), None) as writer:
        writer.write(1, {f'x{i}': v for i, v in enumerate(values)})
    row = read_rows(tmp_path / 'metrics.jsonl')[0]
    assert [np.float32(row[f'x{i}']) for i in range(50)] == list(values)


def test_arrays_and_steps_out_of_order_are_refused(tmp_path):
    with MetricsWriter(make_workdir(tmp_path), 4) as writer:
        with pytest.raises(ValueError, match='step 4 after that of step 4'):
            writer.write(4, {})
        with pytest.raises(ValueError, match=r'x: a metric is one number, not an array of shape \(2,\)'):
            writer.write(5, {'x': np.zeros(2)})


@pytest.mark.parametrize('torn', ['', '{"step": 6, "a"', '{"step": 6, "a": 1}'])
def test_a_resume_cuts_all_files_back_to_the_checkpoint(tmp_path, torn):
    with MetricsWriter(make_workdir(tmp_path), None) as writer:
        for step in range(6):
            writer.write(step, {'a': step})
            writer.write_samples(step, [SAMPLE | {'completion': f'é{step}{i}\n'} for i in range(2)])
            writer.write_histogram(step, np.asarray([step, 0]))
    for name in ('metrics.jsonl', 'samples.jsonl', 'alpha_histogram.jsonl'):
        with open(tmp_path / name, 'a') as file:
            file.write(torn)
    with MetricsWriter(make_workdir(tmp_path), 3) as writer:
        assert [row['step'] for row in read_rows(tmp_path / 'metrics.jsonl')] == [0, 1, 2, 3]
        writer.write(4, {'a': 'again'})
        writer.write_samples(4, [SAMPLE])
        writer.write_histogram(4, np.asarray([0, 9]))
    assert [(row['step'], row['a']) for row in read_rows(tmp_path / 'metrics.jsonl')][3:] == [(3, 3), (4, 'again')]
    samples = read_rows(tmp_path / 'samples.jsonl')
    assert [row['step'] for row in samples] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert samples[7] == {'step': 3} | SAMPLE | {'completion': 'é31\n'}
    histograms = read_rows(tmp_path / 'alpha_histogram.jsonl')
    assert histograms[2:] == [{'step': 2 + i, 'tokens': tokens} for i, tokens in enumerate([[2, 0], [3, 0], [0, 9]])]


def test_without_a_checkpoint_the_files_begin_anew(tmp_path):
    with MetricsWriter(make_workdir(tmp_path), None) as writer:
        writer.write(0, {'a': 1})
    with MetricsWriter(make_workdir(tmp_path), None) as writer:
        writer.write(0, {'a': 2})
    assert read_rows(tmp_path / 'metrics.jsonl') == [{'step': 0, 'a': 2}]


@pytest.mark.parametrize('line', ['not json', '[1]', '{"a": 1}', '{"step": "x"}', '[' * 100_000])
def test_a_spoiled_line_is_named_and_nothing_is_lost(tmp_path, line):
    text = f'{{"step": 1}}\n{line}\n{{"step": 2}}\n'
    (tmp_path / 'metrics.jsonl').write_text(text)
    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 2: not a row'):
        MetricsWriter(make_workdir(tmp_path), 1)
    assert (tmp_path / 'metrics.jsonl').read_text() == text


def test_a_folder_in_the_place_of_the_rows_is_named(tmp_path):
    workdir = make_workdir(tmp_path)
    workdir.metrics_file.mkdir()
    with pytest.raises(ConfigError, match=r'metrics\.jsonl: is no file'):
        MetricsWriter(workdir, 1)


def test_other_processes_of_a_run_write_nothing(tmp_path):
    with MetricsWriter(make_workdir(tmp_path, primary=False), None) as writer:
        writer.write(1, {'a': 1})
        writer.write_samples(1, [SAMPLE])
        writer.write_histogram(1, np.asarray([1]))
    assert list(tmp_path.iterdir()) == []


def test_compilations_are_counted_and_named_after_warm_up():
    def half(x):
        return x / 2

    jitted = jax.jit(half)
    x4, x5 = np.ones(4, np.float32), np.ones(5, np.float32)
    with CompileCounter() as counter:
        jitted(x4)
        assert counter.count == 1
        assert counter.take()['compile/count'] == 1
        counter.warmed_up()
        jitted(x4)
        assert counter.count == 1
        assert counter.take() == {'compile/count': 0, 'compile/seconds': 0}
        assert counter.late == []
        jitted(x5)
        assert counter.take()['compile/count'] == 1
        assert len(counter.late) == 1
        assert 'half' in counter.late[0]
    jitted(np.ones(6, np.float32))
    assert counter.count == 2
