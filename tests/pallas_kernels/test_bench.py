"""The bench itself: rehearsed on this machine, with the JAX definitions and small shapes."""

import json
import re

import pytest

from pallas_kernels import bench, tune
from pallas_kernels.shapes import GRIDS, OPS


def test_a_rehearsal_measures_every_operation_and_writes_what_it_shows(tmp_path, capsys):
    out = tmp_path / 'new' / 'bench.json'
    assert bench.main(['--rehearse', f'--out={out}']) == 0
    written = json.loads(out.read_text())
    assert written['implementation'] == 'reference'
    assert {row['op'] for row in written['rows']} == set(OPS)
    shown = capsys.readouterr().out
    for row in written['rows']:
        assert row['us'] > 0
        assert row['limit_us'] == pytest.approx(row['bytes'] / bench.CEILING * 1e6)
    for shape in GRIDS['rehearsal']:
        assert shape.title in shown


def test_bytes_are_those_that_have_to_be_read():
    """2 sequences, 8 heads of 128, 2 bytes: 6 pages of 16 tokens, 16 pages, 16 landmarks, 64 tokens of 48 heads."""
    inputs = bench.Inputs(GRIDS['rehearsal'][0])
    read = {
        shape.op: bench.prepare(shape, inputs, bench.Implementation.REFERENCE, calls=1).bytes_read
        for shape in GRIDS['rehearsal']
        if shape.page_tokens == 16
    }
    page = 16 * 2 * 128 * 2
    assert read == {
        'sparse_decode': 2 * 8 * 6 * page,
        'dense_decode': 2 * 8 * 16 * page,
        'page_select': 2 * 8 * 16 * 128 * 2,
        'landmark_update': 2 * 8 * page,
        'sparse_prefill': 2 * 64 * (16 + 8 + 8 + 16) * 128 * 2,
    }


def test_a_machine_without_kernels_is_told_so(capsys):
    if bench.choose(bench.jax.devices()[0])[0].platform:
        pytest.skip('this machine has kernels')
    assert bench.main(['--no-peers']) == 1
    assert '--rehearse' in capsys.readouterr().err


def test_an_unknown_operation_is_named(capsys):
    with pytest.raises(SystemExit):
        bench.main(['--op=sparse_decode,flash'])
    assert 'no operation flash' in capsys.readouterr().err


@pytest.mark.parametrize('command', [bench, tune])
def test_figures_that_cannot_be_written_are_said_before_they_are_measured(command, tmp_path, capsys):
    (tmp_path / 'file').touch()
    for out, why in ((tmp_path, 'Is a directory'), (tmp_path / 'file/bench.json', 'File exists|Not a directory')):
        with pytest.raises(SystemExit):
            command.main([f'--out={out}'])
        assert re.search(rf'--out={out}: ({why})', capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ['file']
    assert bench.why_no_file(tmp_path / 'new.json') is None
    assert not (tmp_path / 'new.json').exists()


def test_titles_tell_shapes_apart():
    for grid in GRIDS.values():
        assert len({shape.title for shape in grid}) == len(grid)
