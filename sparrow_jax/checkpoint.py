"""Checkpoints of a run: `checkpoints/<step>/` below the work directory, written by orbax in the background.

The learner's state (parameters, optimizer state, keys) goes in as one pytree of arrays, with a small JSON object of
facts (step, data position, schedule) beside it; both become visible together or not at all. A checkpoint does not
depend on the mesh it was saved from: `restore` puts every array where the given abstract arrays say.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from sparrow_jax.config import ConfigError


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last save.

    Args:
        folder: created where absent.
        keep: number of newest checkpoints kept.
        read_only: for commands that read the checkpoints of a run that may still be training: nothing is created or
            cleaned.

    What a killed process left half-written is never offered by `latest_step`, and is removed at the next opening that
    is not read-only. In a run of several processes every process makes the same calls in the same order.
    """

    def __init__(self, folder: Path | str, keep: int = 2, *, read_only: bool = False):
        self.folder = Path(folder).absolute()
        if read_only and not self.folder.is_dir():
            raise ConfigError(f'{self.folder}: no checkpoints there; give the --workdir of a run that has saved one')
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError(f'{self.folder}: is a file; the checkpoints of a run belong there')
        self._manager = ocp.CheckpointManager(
            self.folder,
            item_handlers={'arrays': ocp.PyTreeCheckpointHandler(), 'facts': ocp.JsonCheckpointHandler()},
            options=ocp.CheckpointManagerOptions(
                max_to_keep=None if read_only else keep,
                cleanup_tmp_directories=not read_only,
                create=not read_only,
                read_only=read_only,
                enable_async_checkpointing=True,
            ),
        )

    def latest_step(self) -> int | None:
        """The newest step with a whole checkpoint (or one being written by this process); None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, arrays: Any, facts: Mapping[str, Any]) -> None:
        """Saves the state after `step` steps; returns when the arrays are copied, and writes in the background.

        Args:
            step: steps done. A step that is the latest already is not written again.
            arrays: pytree of jax or NumPy arrays, typed PRNG keys among them. They may be donated to the next step at
                once.
            facts: JSON object.
        Raises:
            ConfigError: the disk is full or cannot be written; perhaps met by the previous background save.
        """
        if step == self.latest_step():
            return
        named = {name: _stored(leaf) for name, leaf in _named_leaves(arrays).items()}
        with self._writing():
            saved = self._manager.save(
                step, args=ocp.args.Composite(arrays=ocp.args.PyTreeSave(named), facts=ocp.args.JsonSave(dict(facts)))
            )
        if not saved:
            raise RuntimeError(f'checkpoint {step} was not written: {self.folder} has step {self.latest_step()}')

    def facts(self, step: int) -> dict[str, Any]:
        """The JSON object saved with a checkpoint."""
        self._await(step)
        with self._reading(step):
            return dict(self._manager.restore(step, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))['facts'])

    def restore(self, step: int, abstract_arrays: Any, *, partial: bool = False) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
            step: one that `latest_step` gave.
            abstract_arrays: pytree as saved, of `jax.ShapeDtypeStruct` or arrays (used for their shape, dtype and
                sharding only). A leaf with a sharding is placed accordingly, whatever the mesh was at the save; one
                without goes to the first device; a NumPy leaf comes back as NumPy.
            partial: `abstract_arrays` may lack leaves of the checkpoint, such as the optimizer's for an evaluation.
        Returns:
            The pytree, and the facts.
        Raises:
            ConfigError: no such checkpoint, or it has other leaves, shapes or dtypes; the first is named.
        """
        self._await(step)
        wanted = _named_leaves(abstract_arrays)
        template = {name: _template(leaf) for name, leaf in wanted.items()}
        with self._reading(step):
            stored = self._manager.item_metadata(step)['arrays'].tree
        self._check(step, stored, template, partial)
        arrays_args = ocp.args.PyTreeRestore(
            template, restore_args=ocp.checkpoint_utils.construct_restore_args(template), partial_restore=True
        )
        with self._reading(step):
            restored = self._manager.restore(
                step, args=ocp.args.Composite(arrays=arrays_args, facts=ocp.args.JsonRestore())
            )
        leaves = [
            jax.random.wrap_key_data(restored['arrays'][name], impl=_key_impl(leaf))
            if _is_key(leaf)
            else restored['arrays'][name]
            for name, leaf in wanted.items()
        ]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(abstract_arrays), leaves), dict(
            restored['facts']
        )

    def wait(self) -> None:
        """Returns when every started save is on disk; raises its error if it failed."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits for the last save and frees the background threads."""
        with self._writing():
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _await(self, step: int) -> None:
        self.wait()
        if step not in self._manager.all_steps():
            raise ConfigError(
                f'{self.folder}: no checkpoint of step {step}; it has {sorted(self._manager.all_steps())}'
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            # tensorstore raises a ValueError, with the operating system's number in its text.
            if not isinstance(error, OSError) and 'os_error_code' not in str(error):
                raise
            raise ConfigError(f'{self.folder}: a checkpoint cannot be written ({error!s:.400})') from error

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise what a broken file makes them trip over
            others = sorted(set(self._manager.all_steps()) - {step})
            back = f'remove the folder to go on from step {others[-1]}' if others else 'there is no older one'
            raise ConfigError(
                f'{self.folder / str(step)}: the checkpoint cannot be read; {back} ({error!s:.300})'
            ) from error

    def _check(self, step: int, stored: Mapping[str, Any], template: Mapping[str, Any], partial: bool) -> None:
        where = f'{self.folder / str(step)}'
        for name, leaf in template.items():
            if name not in stored:
                raise ConfigError(f'{where}: has no array {name}; it was saved from another model or optimizer')
            have, want = (tuple(stored[name].shape), str(stored[name].dtype)), (tuple(leaf.shape), str(leaf.dtype))
            if have != want:
                raise ConfigError(
                    f'{where}: {name} is {have[1]}{list(have[0])} there, this run needs {want[1]}{list(want[0])}'
                )
        extra = sorted(set(stored) - set(template))
        if extra and not partial:
            raise ConfigError(f'{where}: holds {extra[0]}, which this configuration does not have')


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path, in flattening order.

    Names stay out of the container classes' way (nnx.State, optax tuples), so that a checkpoint outlives their changes.
    """
    named: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        # nnx wraps each array in a Variable, whose one child is its value.
        if path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == 'value':
            path = path[:-1]
        name = jax.tree_util.keystr(path, simple=True, separator='.') or 'array'
        if name in named:
            raise ValueError(f'two arrays of the state are called {name}')
        if not hasattr(leaf, 'dtype') or not hasattr(leaf, 'shape'):
            raise TypeError(f'{name}: {type(leaf).__name__} is not an array; put it into the facts')
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stored(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _template(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return np.asarray(leaf)
    plain = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
    sharding = getattr(leaf, 'sharding', None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)


def _key_impl(leaf: Any) -> Any:
    """The generator of a key array; abstract keys show theirs only under tracing."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]
