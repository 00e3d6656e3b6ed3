"""Checkpoints: what is saved comes back, on any mesh; half-written ones are never seen; misfits are named."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from sparrow_jax.checkpoint import Checkpoints
from sparrow_jax.config import ConfigError


class Tiny(nnx.Module):
    def __init__(self, width, rngs):
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (8, width), jnp.bfloat16))
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])


def make_state(width=4, seed=0):
    params = nnx.split(Tiny(width, nnx.Rngs(seed)))[1]
    return {
        'params': params,
        'optimizer': optax.adamw(1e-3).init(params),
        'keys': jax.random.split(jax.random.key(seed), 3),
        'count': np.arange(3),
    }


def assert_same(a, b):
    def bits(tree):
        return [
            np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            for x in jax.tree.leaves(tree)
        ]

    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(bits(a), bits(b), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


def test_state_and_facts_come_back_bit_for_bit_from_abstract_arrays(tmp_path):
    state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is None
        checkpoints.save(3, state, {'position': 12, 'schedule': {'kind': 'fixed', 'budget': [1, 2]}})
    abstract = jax.eval_shape(make_state) | {'count': np.zeros(3, int)}
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 3
        restored, facts = checkpoints.restore(3, abstract)
        assert checkpoints.facts(3) == facts
    assert facts == {'position': 12, 'schedule': {'kind': 'fixed', 'budget': [1, 2]}}
    assert_same(restored, state)
    assert isinstance(restored['count'], np.ndarray)
    # The restored keys are keys of the same generator: they give the same numbers.
    np.testing.assert_array_equal(jax.random.bits(restored['keys'][1]), jax.random.bits(state['keys'][1]))


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_the_generator_of_a_key_is_taken_from_the_abstract_key(tmp_path, impl):
    key = jax.random.key(5, impl=impl)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {'key': key}, {})
        restored, _ = checkpoints.restore(1, jax.eval_shape(lambda: {'key': jax.random.key(0, impl=impl)}))
    assert restored['key'].dtype == key.dtype
    assert_same(restored, {'key': key})


def test_only_the_newest_are_kept_and_the_latest_is_not_written_twice(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {'x': jnp.full(4, step)}, {})
        checkpoints.save(3, {'x': jnp.zeros(4)}, {})
        checkpoints.wait()
        assert sorted(int(p.name) for p in tmp_path.iterdir()) == [2, 3]
        restored, _ = checkpoints.restore(3, {'x': jnp.zeros(4, int)})
    np.testing.assert_array_equal(restored['x'], 3)


def test_arrays_may_be_donated_while_they_are_being_written(tmp_path):
    x = jnp.ones((512, 1024))
    overwrite = jax.jit(lambda x: x * 0 - 7, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {'x': x}, {})
        for _ in range(3):
            x = overwrite(x)
        x.block_until_ready()
        restored, _ = checkpoints.restore(1, {'x': x})
    np.testing.assert_array_equal(restored['x'], 1)


def test_misfits_are_named(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, make_state(4), {})
        checkpoints.wait()
        with pytest.raises(ConfigError, match=r'params\.embed is bfloat16\[8, 4\] there.* needs bfloat16\[8, 6\]'):
            checkpoints.restore(1, {'params': make_state(6)['params']}, partial=True)
        with pytest.raises(ConfigError, match=r'has no array bonus'):
            checkpoints.restore(1, make_state(4) | {'bonus': jnp.zeros(1)})
        without = make_state(4)
        del without['count']
        with pytest.raises(ConfigError, match=r'holds count, which this configuration does not have'):
            checkpoints.restore(1, without)
        with pytest.raises(ConfigError, match=r'no checkpoint of step 7; it has \[1\]'):
            checkpoints.restore(7, make_state(4))
        other_dtype = make_state(4) | {'count': jnp.zeros(3, jnp.float32)}
        with pytest.raises(ConfigError, match=r'count is int64\[3\] there.* float32'):
            checkpoints.restore(1, other_dtype)


def cut_off(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize('broken', ['arrays', 'arrays/_METADATA', 'arrays/manifest.ocdbt', 'arrays/d/*', 'facts/*'])
def test_a_broken_checkpoint_is_named_with_the_one_before(tmp_path, broken):
    state = {'a': np.arange(40.0)}
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state, {'position': step})
    for file in (tmp_path / '2').glob(broken):
        shutil.rmtree(file) if file.is_dir() else cut_off(file)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(ConfigError, match=rf'{tmp_path}/2: the checkpoint cannot be read; remove .* from step 1'),
    ):
        checkpoints.restore(2, state)
    shutil.rmtree(tmp_path / '2')
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(checkpoints.latest_step(), state)[1] == {'position': 1}


def test_a_full_disk_is_said_when_the_save_is_waited_for(tmp_path):
    """A limit on the size of files stands for a full disk; a process of its own, since the limit stays."""
    code = f"""
        import resource, signal
        import numpy as np
        from sparrow_jax.checkpoint import Checkpoints
        from sparrow_jax.config import ConfigError
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        checkpoints = Checkpoints({str(tmp_path)!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            checkpoints.save(1, {{'a': np.random.default_rng(0).normal(size=9000)}}, {{}})
            checkpoints.wait()
        except ConfigError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.startswith(f'{tmp_path}: a checkpoint cannot be written ('), done.stderr
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() is None


@pytest.mark.parametrize('read_only', [False, True])
def test_a_file_is_no_folder_of_checkpoints(tmp_path, read_only):
    (tmp_path / 'checkpoints').write_text('kept')
    with pytest.raises(ConfigError, match='checkpoints'):
        Checkpoints(tmp_path / 'checkpoints', read_only=read_only)
    assert (tmp_path / 'checkpoints').read_text() == 'kept'


def test_part_of_a_checkpoint_can_be_read_while_nothing_is_cleaned(tmp_path):
    with pytest.raises(ConfigError, match='no checkpoints there'):
        Checkpoints(tmp_path / 'absent', read_only=True)
    state = make_state()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {'a': 1})
    before = sorted(p.name for p in tmp_path.rglob('*'))
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        restored, facts = checkpoints.restore(1, {'params': state['params']}, partial=True)
    assert_same(restored, {'params': state['params']})
    assert facts == {'a': 1}
    assert sorted(p.name for p in tmp_path.rglob('*')) == before


KILLED = """
    import os, signal, sys, time
    import jax, jax.numpy as jnp
    from sparrow_jax.checkpoint import Checkpoints
    checkpoints = Checkpoints(sys.argv[1])
    checkpoints.save(1, {'x': jnp.full(1000, 1.0)}, {'step': 1})
    checkpoints.wait()
    # Noise does not compress: the write lasts long after its folder appears, which may be any time after `save`.
    checkpoints.save(2, {'x': jax.random.normal(jax.random.key(0), 16_000_000)}, {'step': 2})
    until = time.monotonic() + 60
    while os.listdir(sys.argv[1]) == ['1'] and time.monotonic() < until:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpoint_half_written_at_a_kill_is_never_seen_and_cleaned_away(tmp_path):
    done = subprocess.run([sys.executable, '-c', textwrap.dedent(KILLED), str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left != ['1'], 'the kill came before the write: this test shows nothing'
    assert '2' not in left, 'the kill came after the write: this test shows nothing'
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.latest_step() == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        restored, facts = checkpoints.restore(1, {'x': jnp.zeros(1000)})
        assert facts == {'step': 1}
        np.testing.assert_array_equal(restored['x'], 1.0)
        checkpoints.save(2, {'x': jnp.full(1000, 3.0)}, {'step': 2})
        checkpoints.wait()
        assert checkpoints.latest_step() == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ['1', '2']


OTHER_MESH = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from sparrow_jax.checkpoint import Checkpoints
    mesh = jax.make_mesh((2, 4), ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = NamedSharding(mesh, P('fsdp', 'tensor'))
    whole = NamedSharding(mesh, P())
    key = jax.eval_shape(lambda: jax.random.key(0))
    abstract = {
        'w': jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=put),
        'key': jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=whole),
    }
    with Checkpoints(sys.argv[1]) as checkpoints:
        state, _ = checkpoints.restore(1, abstract)
        assert state['w'].sharding == put, state['w'].sharding
        np.testing.assert_array_equal(np.asarray(state['w'], np.float32), np.arange(128.0).reshape(8, 16))
        np.testing.assert_array_equal(jax.random.key_data(state['key']), jax.random.key_data(jax.random.key(9)))
        checkpoints.save(2, {'w': state['w'] + 1, 'key': state['key']}, {})
"""


def test_eight_devices_restore_what_one_saved_and_back(tmp_path):
    state = {'w': jnp.arange(128, dtype=jnp.bfloat16).reshape(8, 16), 'key': jax.random.key(9)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
    env = os.environ | {'XLA_FLAGS': '--xla_force_host_platform_device_count=8', 'JAX_PLATFORMS': 'cpu'}
    subprocess.run([sys.executable, '-c', textwrap.dedent(OTHER_MESH), str(tmp_path)], check=True, env=env)
    with Checkpoints(tmp_path) as checkpoints:
        restored, _ = checkpoints.restore(2, state)
    assert_same(restored, {'w': state['w'] + 1, 'key': state['key']})
