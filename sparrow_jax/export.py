"""python -m sparrow_jax.export --workdir=W --out=DIR [--shard_mib=16]

Writes the policy of a run's newest checkpoint as a Hugging Face folder: weights, config, tokenizer, end tokens.
transformers opens it, and so does `model.path` of another run. Weights lie in files of at most 4 GB, or of so many
MiB. The adapter of a run with distill.enabled=True goes beside it, to DIR/sampler_adapter, in the layout of the PEFT
library.
"""

import jax.numpy as jnp
from absl import flags

from sparrow_jax import commands
from sparrow_jax.assembly import assemble, load_policy
from sparrow_jax.config import ConfigError
from sparrow_jax.console import Console
from sparrow_jax.models.peft import save_peft
from sparrow_jax.models.weights import save_hf
from sparrow_jax.workdir import Workdir, empty_folder

ADAPTER_FOLDER = 'sampler_adapter'
MIB = 2**20
HEADER_BYTES = 2**16  # of a file, beside its tensors: names and places of some hundreds
SHARD_MIB = 4000


def export(workdir: str, out: str, shard_mib: int) -> int:
    """Exports; returns the exit code."""
    if shard_mib < 1:
        raise ConfigError(f'--shard_mib={shard_mib}: must be at least 1')
    _, run = Workdir.existing(workdir)
    folder = empty_folder(out, '--out')
    parts = assemble(run, trains=False, samples=False)
    policy = load_policy(parts, workdir)
    if policy.step == 0:
        raise ConfigError(f'--workdir={workdir}: no checkpoint there yet')
    parts.encoder.tokenizer.chat_template = parts.encoder.chat_template  # the one it was trained with
    parts.encoder.tokenizer.save_pretrained(folder)
    # config.json comes last: a folder without it is an interrupted export.
    dtype = str(jnp.dtype(run.model.compute_dtype))
    save_hf(
        folder,
        parts.shape,
        policy.params,
        dtype,
        end_ids=parts.encoder.end_ids,
        pad_id=parts.encoder.pad_id,
        max_shard_bytes=shard_mib * MIB - HEADER_BYTES,
    )
    if policy.factors is not None and policy.spec is not None:
        save_peft(folder / ADAPTER_FOLDER, policy.spec, policy.factors, str(folder))
    with Console() as console:
        if policy.factors is not None:
            console.message(f"wrote the sparse sampler's adapter to {folder / ADAPTER_FOLDER} (PEFT, float32)")
        console.message(f'wrote the policy after step {policy.step} to {folder} ({dtype})')
    return 0


def _flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string('out', None, 'folder to write, absent or empty', flag_values=values)
    flags.DEFINE_integer(
        'shard_mib', SHARD_MIB, 'largest file of weights, unless one tensor is larger', flag_values=values
    )


if __name__ == '__main__':
    commands.run(export, config_required=False, define_flags=_flags)
