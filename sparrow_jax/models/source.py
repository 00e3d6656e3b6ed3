"""Where a checkpoint lies: what `model.path` and `tokenizer.path` name becomes a folder or file of this machine.

A path of this machine stands for itself. A name such as Qwen/Qwen3-8B is a repository in the Hugging Face Hub's cache
on this machine; nothing is asked of the network. A URL such as gs://bucket/folder is copied to a folder of this machine
first. `weights.py` and `tasks/tokenizer.py` read from what `locate` returns.
"""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError

from sparrow_jax.config import ConfigError
from sparrow_jax.console import notice_once
from sparrow_jax.json_files import read_object

WEIGHTS = '*.safetensors'
VARIABLE = 'SPARROW_JAX_CHECKPOINT_CACHE'

_KINDS = (
    'a folder with config.json and *.safetensors, a .gguf file, a gs:// folder, or the name of a repository that '
    '`hf download` has put into the cache of the Hugging Face Hub on this machine'
)
_INDEX = 'model.safetensors.index.json'
_SMALL = ('.json', '.jinja', '.txt', '.model')  # configuration and tokenizer: kilobytes to a few megabytes
# What file systems call the mark of a file's content or the time of its last change; each has some of them.
_MARKS = ('generation', 'etag', 'ETag', 'mtime', 'LastModified', 'last_modified', 'created')


def locate(path: str | os.PathLike[str], needs: str = '') -> Path:
    """The folder or .gguf file of this machine that a checkpoint's name stands for.

    Args:
      path: a folder, a .gguf file, a repository 'owner/name' in the Hub's cache, or a URL that fsspec knows
        (gs://bucket/folder, gs://bucket/model.gguf). A folder or file of that name comes before a repository.
      needs: what the caller is about to read: 'config.json', 'tokenizer.json' or `WEIGHTS`. In the Hub's cache it must
        be there; from a URL, files with weights are copied only for `WEIGHTS`. '' looks for nothing.

    Returns:
      A path that exists. Copies of URLs lie in ~/.cache/sparrow_jax/checkpoints, or where the environment variable
      SPARROW_JAX_CHECKPOINT_CACHE says; one is made anew when the files at the URL change.

    Raises:
      ConfigError: nothing there, a file that is needed is missing, a URL that cannot be read or its package is missing,
        or too little room on the disk.
    """
    name = os.fspath(path)
    if '://' in name:
        return _copied(name, needs)
    local = Path(name)
    if local.is_file() and local.suffix != '.gguf':
        raise ConfigError(f'{name}: a checkpoint is a folder or a .gguf file; give the folder that holds this file')
    if local.exists():
        return local
    folder = _in_hub_cache(name) if _may_be_repository(name) else None
    if folder is None:
        hint = f'; for a repository of that name, run `hf download {name}` (looked in {constants.HF_HUB_CACHE})'
        if name.startswith('weights/'):  # the place that a configuration names, and no repository
            hint = '; --config.model.path=OWNER/NAME takes a repository that `hf download OWNER/NAME` has fetched'
        raise ConfigError(f'{name}: no such checkpoint; give {_KINDS}{hint if _may_be_repository(name) else ""}')
    missing = _missing(folder, needs)
    if missing:
        raise ConfigError(f'{name}: {missing} is not in the cache ({folder}); run `hf download {name}`')
    return folder


def weight_files(folder: Path) -> list[Path]:
    """The files with weights of a checkpoint folder, sorted: those of its index, else all *.safetensors.

    Raises:
      ConfigError: none, an index that lists none, or a listed one that is missing.
    """
    files = sorted(folder / name for name in _listed(folder)) or sorted(folder.glob(WEIGHTS))
    if not files:
        raise ConfigError(f'{folder}: holds no *.safetensors file')
    for file in files:
        if not file.exists():
            raise ConfigError(f'{file}: missing, though {_INDEX} lists it; the download is incomplete')
    return files


def _listed(folder: Path) -> set[str]:
    # Empty where there is no index: a checkpoint of one file needs none.
    index = folder / _INDEX
    if not index.exists():
        return set()
    listed = read_object(index).get('weight_map')
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ConfigError(f'{index}: weight_map must say which file holds each tensor')
    return set(listed.values())


def _missing(folder: Path, needs: str) -> str:
    # The first file that is needed and not there (in the Hub's cache also a link to nothing); '' if all are.
    wanted = sorted(_listed(folder)) or [needs] if needs == WEIGHTS else [needs]
    return next((name for name in wanted if name and not any(file.exists() for file in folder.glob(name))), '')


# ---------------------------------------------------------------------- the Hub's cache


def _may_be_repository(name: str) -> bool:
    return name.count('/') == 1 and not name.startswith(('/', '.', '~')) and not name.endswith(('/', '.gguf'))


def _in_hub_cache(name: str) -> Path | None:
    # A tokenizer may have been downloaded alone, so either of two files shows where the snapshot is.
    for file in ('config.json', 'tokenizer.json'):
        try:
            found = huggingface_hub.try_to_load_from_cache(name, file)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


# ---------------------------------------------------------------------- URLs


def _copied(url: str, needs: str) -> Path:
    url = url.rstrip('/')
    try:
        files, entries = _entries(url)
    except ImportError as error:
        scheme = url.partition('://')[0]
        package = ': pip install gcsfs' if scheme in ('gs', 'gcs') else ''
        raise ConfigError(f'{url}: a package for {scheme}:// is missing ({error}){package}') from error
    except FileNotFoundError as error:
        raise ConfigError(f'{url}: no such checkpoint; give {_KINDS}') from error
    except Exception as error:  # each file system has errors of its own for a wrong name or a missing login
        raise ConfigError(
            f'{url}: cannot be read ({type(error).__name__}: {error}); check the name and the login of this machine'
        ) from error

    # Changed files get another folder, so that no copy is a mixture of two versions.
    marks = [
        (name, entry['size'], [str(entry.get(mark)) for mark in _MARKS]) for name, entry in sorted(entries.items())
    ]
    version = hashlib.sha256(repr((url, marks)).encode()).hexdigest()[:16]
    chosen = os.environ.get(VARIABLE, '')
    cache = Path(chosen).expanduser() if chosen else Path.home() / '.cache/sparrow_jax/checkpoints'
    folder = cache / f'{Path(url).stem}-{version}'

    def copy(names: list[str]) -> None:
        absent = {name: entries[name] for name in names if name in entries and not (folder / name).exists()}
        try:
            _copy(files, absent, folder, url)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f'{url}: cannot be copied to {folder} ({type(error).__name__}: {error})') from error

    if url.endswith('.gguf'):
        copy(list(entries))
        return folder / Path(url).name
    copy([name for name in entries if name.endswith(_SMALL)])
    if needs == WEIGHTS:
        # Whole files, since each process has a slice of nearly every tensor; the next start finds them on its disk.
        copy(sorted(_listed(folder)) or [name for name in entries if name.endswith('.safetensors')])
    missing = _missing(folder, needs)
    if missing:
        raise ConfigError(f'{url}: holds no {missing}; a checkpoint folder needs it')
    return folder


def _entries(url: str) -> tuple[Any, dict[str, dict[str, Any]]]:
    # The file system, and what it says of the files (name, size, mark of their content) by their name in the folder.
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()  # of listings: a second look must see what has changed
    listed = [entry for entry in files.ls(root, detail=True) if entry['type'] == 'file']
    entries = {entry['name'].rpartition('/')[2]: entry for entry in listed}
    entries.pop('', None)  # object stores may hold an empty object in place of the folder itself
    if not entries:
        raise FileNotFoundError(url)
    return files, entries


def _copy(files: Any, entries: dict[str, dict[str, Any]], folder: Path, url: str) -> None:
    if not entries:
        return
    folder.mkdir(parents=True, exist_ok=True)
    size, free = sum(entry['size'] for entry in entries.values()), shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f'{url}: {size / 1e9:.1f} GB to copy, but {folder.parent} has {free / 1e9:.1f} GB left; set '
            f'the environment variable {VARIABLE} to a folder on a larger disk'
        )
    if any(not name.endswith(_SMALL) for name in entries):
        notice_once(f'copying {url} ({size / 1e9:.1f} GB) to {folder}')
    for name, entry in entries.items():
        # Under another name until whole, each process its own: a copy that exists is complete.
        with tempfile.TemporaryDirectory(dir=folder, prefix='.part-') as unfinished:
            part = Path(unfinished) / name
            files.get_file(entry['name'], str(part))
            if part.stat().st_size != entry['size']:
                raise OSError(f'{name} has {part.stat().st_size} bytes here, {entry["size"]} there')
            part.replace(folder / name)
