"""The cache is updated in place: the pool is the sampler's largest array, and there is room for one."""

import jax

from sparrow_jax.rollout.engine import Sampling


def test_cache_and_slots_keep_their_buffers(small_pool):
    """What is donated comes back in the same memory, and cannot be read any more."""
    engine, sampling, weights = small_pool.engine, Sampling(1.0), small_pool.weights
    values, prompts = engine.values(sampling), engine.prompt_arrays([[]], engine.prefill_lengths[0])
    state = engine.functions.fresh(False)()
    for function, arguments in (
        (engine.functions.prefill(sampling), (prompts, values)),
        (engine.functions.segment(sampling), (values,)),
    ):
        given = jax.tree.leaves(state)
        places = [array.unsafe_buffer_pointer() for array in given]
        state = function(weights, *state, *arguments)
        assert all(array.is_deleted() for array in given)
        kept = [
            array.unsafe_buffer_pointer() == place for array, place in zip(jax.tree.leaves(state), places, strict=True)
        ]
        assert all(kept)


def test_the_compiled_segment_copies_no_pool(small_pool):
    compiled = small_pool.engine.functions.segment(Sampling(1.0))
    cache, slots = small_pool.engine.functions.fresh(False)()
    given = jax.tree.leaves((cache, slots))
    assert compiled.memory_analysis().alias_size_in_bytes == sum(array.nbytes for array in given)
    for array in (cache.pages[0], cache.landmarks[0]):
        shape = f'f32[{",".join(map(str, array.shape))}]'
        assert f'{shape}{{' in compiled.as_text()
        made = [line for line in compiled.as_text().splitlines() if f' = {shape}' in line]
        assert not [line for line in made if ' copy' in line]


def test_warming_up_several_ways_of_sampling_holds_one_pool_at_a_time(small_pool, monkeypatch):
    engine, sampling = small_pool.engine, Sampling(1.0)
    shape = engine.functions.fresh(False)()[0].pages[0].shape
    count = lambda: sum(array.shape == shape for array in jax.live_arrays())
    before, held, fresh = count(), [], engine.functions.fresh

    def counted(keep_hidden):
        held.append(count() - before)
        return fresh(keep_hidden)

    monkeypatch.setattr(engine.functions, 'fresh', counted)
    engine.warm_up(small_pool.weights, [sampling, sampling])
    assert held == [0, 0]
