"""Names of slices: what they are read as, and what is refused."""

import pytest

from sparrow_jax.config import ConfigError
from sparrow_jax.slices import Slice, parse_slice


@pytest.mark.parametrize(
    ('text', 'chip', 'grid', 'chips'),
    [
        ('v5e:4x4', 'v5e', (4, 4), 16),
        ('v6e:16x16', 'v6e', (16, 16), 256),
        ('v5p:2x2x4', 'v5p', (2, 2, 4), 16),
        ('tpu7x:2x2x1', 'tpu7x', (2, 2, 1), 4),
    ],
)
def test_a_slice_is_read(text, chip, grid, chips):
    named = parse_slice(text)
    assert named == Slice(chip, grid)
    assert (named.chips, str(named)) == (chips, text)


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('v9:4x4', 'the chips are v5e, v6e, v5p, tpu7x'),
        ('', 'the chips are v5e, v6e, v5p, tpu7x'),
        ('v5e', 'has 2 dimensions, written AxB'),
        ('v5e:4', 'has 2 dimensions, written AxB'),
        ('v5e:4x', 'has 2 dimensions'),
        ('v5e:0x4', 'has 2 dimensions'),
        ('v5e:4x4x4', 'has 2 dimensions'),
        ('v5p:4x4', 'has 3 dimensions, written AxBxC'),
        ('v5p:4x4x4 ', 'has 3 dimensions'),
        ('h200:8', 'programs for several GPUs cannot be compiled without a GPU'),
    ],
)
def test_a_mistake_in_a_slice_names_what_there_is(text, words):
    with pytest.raises(ConfigError, match=f'^--topology={text}: ') as caught:
        parse_slice(text)
    assert words in str(caught.value)
    assert 'v5e:4x4' in str(caught.value)
