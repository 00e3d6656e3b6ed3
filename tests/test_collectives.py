"""Collectives are read from a compiler's text: inside the main loop, through fusions and inner loops."""

import pytest

from sparrow_jax.collectives import (
    Collective,
    gathered,
    largest_results,
    loop_collectives,
    outside_collectives,
    summary,
)

TEXT = """HloModule jit_decode_segment, is_scheduled=true

%add.1 (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[]{:T(128)} parameter(0)
  %y.1 = f32[]{:T(128)} parameter(1)
  ROOT %add.2 = f32[]{:T(128)} add(%x.1, %y.1)
}

%async_fusion (p: bf16[64,32]) -> bf16[64,128] {
  %p = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.5 = bf16[64,128]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=3, dimensions={1}
}

%inner_body (t.1: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %t.1 = (s32[]{:T(128)}, f32[4,8]{1,0:T(4,128)}) parameter(0)
  %g.1 = f32[4,8]{1,0:T(4,128)} get-tuple-element(%t.1), index=1
  %all-reduce.9 = f32[4,8]{1,0:T(4,128)} all-reduce(%g.1), channel_id=4, to_apply=%add.1
  ROOT %t.2 = (s32[]{:T(128)}, f32[4,8]{1,0:T(4,128)}) tuple(%g.0, %all-reduce.9)
}

%inner_condition (t.3: (s32[], f32[4,8])) -> pred[] {
  %t.3 = (s32[]{:T(128)}, f32[4,8]{1,0:T(4,128)}) parameter(0)
  ROOT %less.1 = pred[]{:T(512)} compare(%i.1, %n.1), direction=LT
}

%body (s.1: (s32[], bf16[8,1024], f32[4,8])) -> (s32[], bf16[8,1024], f32[4,8]) {
  %s.1 = (s32[]{:T(128)}, bf16[8,1024]{1,0}, f32[4,8]{1,0}) parameter(0)
  %fusion.1 = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%w.1), kind=kCustom, calls=%async_fusion, metadata={op_name="a(b)"}
  %while.1 = (s32[]{:T(128)}, f32[4,8]{1,0}) while(%tuple.9), condition=%inner_condition, body=%inner_body
  %all-reduce.1 = (f32[4,16]{1,0}, f32[4]{0}) all-reduce(%a.1, %b.1), channel_id=1, to_apply=%add.1
  %ags.1 = (f32[4,8]{1,0}, f32[4,32]{1,0}) all-gather-start(%c.1), channel_id=2, dimensions={1}
  %agd.1 = f32[4,32]{1,0} all-gather-done(%ags.1)
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[8,1024]{1,0}, f32[4,8]{1,0}) tuple(%i.2, %cache.1, %x.9)
}

%condition (s.2: (s32[], bf16[8,1024], f32[4,8])) -> pred[] {
  %s.2 = (s32[]{:T(128)}, bf16[8,1024]{1,0}, f32[4,8]{1,0}) parameter(0)
  ROOT %less.2 = pred[]{:T(512)} compare(%i.3, %n.3), direction=LT
}

ENTRY %main (p.0: bf16[8,1024], p.1: f32[4,8]) -> bf16[8,1024] {
  %p.0 = bf16[8,1024]{1,0} parameter(0), metadata={op_name="cache"}
  %p.1 = f32[4,8]{1,0} parameter(1)
  %small = (s32[]{:T(128)}, f32[4,8]{1,0}) while(%tuple.0), condition=%inner_condition, body=%inner_body
  %main_loop = (s32[]{:T(128)}, bf16[8,1024]{1,0}, f32[4,8]{1,0}) while(%tuple.3), condition=%condition, body=%body
  %rs.1 = f32[2,8]{1,0} reduce-scatter(%p.1), channel_id=7, dimensions={0}, to_apply=%add.1
  ROOT %out = bf16[8,1024]{1,0} get-tuple-element(%main_loop), index=1
}
"""


def test_the_main_loop_is_read_through_fusions_and_inner_loops():
    assert loop_collectives(TEXT) == [
        Collective('all-gather', (64, 128), 64 * 128 * 2),
        Collective('all-reduce', (4, 8), 4 * 8 * 4, repeated=True),
        Collective('all-reduce', (4, 16), (4 * 16 + 4) * 4),
        Collective('all-gather', (4, 32), 4 * 32 * 4),
    ]


def test_what_stands_outside_the_main_loop():
    assert outside_collectives(TEXT) == [
        Collective('all-reduce', (4, 8), 4 * 8 * 4, repeated=True),
        Collective('reduce-scatter', (2, 8), 2 * 8 * 4),
    ]


def test_weights_and_whatever_is_too_large_are_found():
    found = loop_collectives(TEXT)
    assert gathered(found, {'weights': 64 * 128}, 10_000) == [(found[0], 'weights')]
    # A sum over shards has the size of a weight, too, and brings nothing together.
    assert gathered(found, {'weights': 4 * 8}, 10_000) == []
    assert [one for one, _ in gathered(found, {}, 100)] == [found[0], found[3]]


def test_equal_collectives_are_one_line():
    twice = Collective('all-reduce', (4, 16), 256)
    assert summary([twice, twice, Collective('all-gather', (2,), 8)]) == [
        {'kind': 'all-reduce', 'shape': [4, 16], 'repeated': False, 'count': 2, 'bytes': 512},
        {'kind': 'all-gather', 'shape': [2], 'repeated': False, 'count': 1, 'bytes': 8},
    ]


def test_the_largest_results_are_those_that_an_instruction_makes():
    assert largest_results(TEXT, 2) == [
        {'name': 'fusion', 'shape': [64, 128], 'bytes': 16_384},
        {'name': 'all-gather-start', 'shape': [4, 32], 'bytes': 512},
    ]


@pytest.mark.parametrize(('text', 'words'), [('nothing', 'ENTRY'), ('ENTRY %m (a: f32[]) -> f32[] {\n}\n', 'no loop')])
def test_a_text_without_a_loop_is_refused(text, words):
    with pytest.raises(ValueError, match=words):
        loop_collectives(text)
