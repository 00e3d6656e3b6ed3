"""What model.path may name: a repository in the Hub's cache and a URL, beside folders and files."""

import pathlib
import shutil

import fsspec
import huggingface_hub
import jax
import numpy as np
import pytest
from tiny_models import load

from sparrow_jax.config import ConfigError
from sparrow_jax.models import source
from sparrow_jax.models.source import WEIGHTS, locate
from sparrow_jax.models.weights import read_shape
from sparrow_jax.tasks.tokenizer import end_ids, load_tokenizer

START = pathlib.Path(__file__).parents[2] / 'configs' / 'tiny_start'
URL = 'memory://bucket/models/tiny'  # fsspec's stand-in for an object store


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Adds a repository with the named files of tiny_start to a cache laid out as the Hub's; returns its snapshot."""
    monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setattr('socket.socket.connect', lambda *_: pytest.fail('asked the network'))

    def add(name, files):
        root = tmp_path / 'hub' / f'models--{name.replace("/", "--")}'
        snapshot = root / 'snapshots' / '0123abcd'
        for folder in (root / 'refs', root / 'blobs', snapshot):
            folder.mkdir(parents=True)
        (root / 'refs' / 'main').write_text('0123abcd')
        for file in files:
            shutil.copy(START / file, root / 'blobs' / f'blob-{file}')
            (snapshot / file).symlink_to(pathlib.Path('../../blobs') / f'blob-{file}')
        return snapshot

    return add


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The stand-in store with tiny_start in it; copies go to a folder of the test."""
    monkeypatch.setenv(source.VARIABLE, str(tmp_path / 'copies'))
    files = fsspec.filesystem('memory')
    for file in START.iterdir():
        files.pipe_file(f'/bucket/models/tiny/{file.name}', file.read_bytes())
    files.pipe_file('/bucket/models/tiny/pytorch_model.bin', b'not wanted')
    files.pipe_file('/bucket/models/tiny/onnx/config.json', b'not wanted either')
    yield files
    files.rm('/bucket', recursive=True)


@pytest.fixture
def copied(bucket, monkeypatch):
    """Names of the files that were copied, in order."""
    names, get_file = [], type(bucket).get_file

    def counted(self, remote, *args, **options):
        names.append(pathlib.Path(remote).name)
        return get_file(self, remote, *args, **options)

    monkeypatch.setattr(type(bucket), 'get_file', counted)
    return names


def assert_is_tiny_start(name):
    assert read_shape(name) == read_shape(START)
    for a, b in zip(jax.tree.leaves(load(name)[1]), jax.tree.leaves(load(START)[1]), strict=True):
        np.testing.assert_array_equal(a, b)
    tokenizer, expected = load_tokenizer(name), load_tokenizer(START)
    assert tokenizer.get_vocab() == expected.get_vocab()
    assert tokenizer.chat_template == expected.chat_template is not None
    assert end_ids(tokenizer, name) == end_ids(expected, START)


def test_a_repository_in_the_hub_s_cache_is_a_checkpoint(hub):
    hub('Some/Tiny-1.0', [file.name for file in START.iterdir()])
    assert_is_tiny_start('Some/Tiny-1.0')


def test_a_folder_of_that_name_comes_first(hub, tmp_path, monkeypatch):
    hub('some/tiny', ['config.json'])
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'some' / 'tiny').mkdir(parents=True)
    assert locate('some/tiny') == pathlib.Path('some/tiny')


def test_the_place_that_a_configuration_names_is_no_repository(hub):
    hub('Some/Other', ['config.json'])
    said = (
        r'weights/Qwen3-1.7B: no such checkpoint; .*--config.model.path=OWNER/NAME takes a repository that `hf download'
    )
    with pytest.raises(ConfigError, match=said):
        read_shape('weights/Qwen3-1.7B')


@pytest.mark.parametrize('name', ['Some/Absent'])
def test_what_is_not_in_the_cache_says_how_to_download_it(hub, name):
    hub('Some/Other', ['config.json'])
    with pytest.raises(ConfigError, match=rf'{name}: no such checkpoint; .*run `hf download {name}` \(looked in .*hub'):
        read_shape(name)


@pytest.mark.parametrize('name', ['nothing', '/no/where', './some/where', 'a/b/c', 'some/model.gguf', 'so me/th--ing'])
def test_what_cannot_be_a_repository_is_not_looked_for(hub, name):
    del hub
    with pytest.raises(ConfigError, match='no such checkpoint; give a folder') as error:
        locate(name)
    assert ('run `hf' in str(error.value)) == (name == 'so me/th--ing')


@pytest.mark.parametrize(
    ('present', 'needs', 'missing'),
    [
        (['tokenizer.json'], 'config.json', 'config.json'),
        (['config.json'], 'tokenizer.json', 'tokenizer.json'),
        (['config.json', 'tokenizer.json'], WEIGHTS, r'\*\.safetensors'),
    ],
)
def test_a_repository_that_was_downloaded_in_part_is_refused(hub, present, needs, missing):
    hub('Some/Part', present)
    with pytest.raises(ConfigError, match=rf'Some/Part: {missing} is not in the cache \(.*run `hf download Some/Part`'):
        locate('Some/Part', needs)


def test_every_file_of_the_index_must_be_in_the_cache(hub):
    snapshot = hub('Some/Part', ['config.json', 'model.safetensors'])
    listed = '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    (snapshot / 'model.safetensors.index.json').write_text(listed)
    with pytest.raises(ConfigError, match=r'Some/Part: model-2\.safetensors is not in the cache'):
        locate('Some/Part', WEIGHTS)
    (snapshot / 'model-2.safetensors').symlink_to('../../blobs/absent')  # an interrupted download
    with pytest.raises(ConfigError, match=r'Some/Part: model-2\.safetensors is not in the cache'):
        locate('Some/Part', WEIGHTS)


# ---------------------------------------------------------------------- URLs


def test_a_url_is_a_checkpoint(bucket):
    del bucket
    assert_is_tiny_start(URL)
    assert_is_tiny_start(f'{URL}/')


def test_weights_are_copied_when_they_are_read_and_nothing_twice(copied):
    small = sorted(file.name for file in START.iterdir() if file.suffix != '.safetensors')
    folder = locate(URL, 'config.json')
    assert sorted(copied) == small
    assert locate(URL, WEIGHTS) == folder
    assert copied[len(small) :] == ['model.safetensors']
    assert sorted(file.name for file in folder.iterdir()) == sorted([*small, 'model.safetensors'])
    locate(URL, WEIGHTS)
    assert len(copied) == len(small) + 1


def test_only_the_files_of_the_index_are_copied(bucket, copied):
    bucket.pipe_file('/bucket/models/tiny/consolidated.safetensors', b'the same once more')
    bucket.pipe_file('/bucket/models/tiny/model.safetensors.index.json', b'{"weight_map": {"a": "model.safetensors"}}')
    locate(URL, WEIGHTS)
    assert [name for name in copied if name.endswith('.safetensors')] == ['model.safetensors']
    bucket.rm('/bucket/models/tiny/model.safetensors')
    with pytest.raises(ConfigError, match=rf'{URL}: holds no model\.safetensors; a checkpoint folder needs it'):
        locate(URL, WEIGHTS)


def test_changed_files_are_copied_to_another_folder(bucket):
    before = locate(URL, 'config.json')
    old = (before / 'config.json').read_bytes()
    bucket.pipe_file('/bucket/models/tiny/config.json', b'{"model_type": "other"}')
    assert (locate(URL) / 'config.json').read_bytes() == b'{"model_type": "other"}'
    assert (before / 'config.json').read_bytes() == old


@pytest.mark.parametrize('cut', [True, False])
def test_an_interrupted_copy_leaves_no_file_that_looks_whole(bucket, monkeypatch, cut):
    def broken(self, remote, local, **options):
        del self, remote, options
        pathlib.Path(local).write_bytes(b'half')
        if not cut:
            raise ConnectionError('gone')

    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), 'get_file', broken)
        with pytest.raises(ConfigError, match=rf'{URL}: cannot be copied to .*(has 4 bytes here|gone)'):
            locate(URL, WEIGHTS)
    assert_is_tiny_start(URL)


def test_a_gguf_file_at_a_url(bucket):
    bucket.pipe_file('/bucket/models/tiny/q.gguf', b'any bytes')
    file = locate(f'{URL}/q.gguf')
    assert (file.name, file.read_bytes()) == ('q.gguf', b'any bytes')
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize('name', ['memory://bucket/absent', 'memory://bucket/absent.gguf', 'memory://bucket/models'])
def test_nothing_at_a_url(bucket, name):
    del bucket
    with pytest.raises(ConfigError, match=f'{name}: no such checkpoint; give a folder'):
        locate(name)


@pytest.mark.parametrize(
    ('raised', 'words'),
    [
        (ImportError('Please install gcsfs'), r'a package for gs:// is missing .*: pip install gcsfs'),
        (PermissionError('no'), r'cannot be read \(PermissionError: no\); check the name and the login'),
    ],
)
def test_a_store_that_cannot_be_reached_is_one_sentence(monkeypatch, raised, words):
    def fail(url):
        assert url == 'gs://bucket/tiny'
        raise raised

    monkeypatch.setattr(fsspec.core, 'url_to_fs', fail)
    for read in (read_shape, load_tokenizer, locate):
        with pytest.raises(ConfigError, match=f'gs://bucket/tiny: {words}'):
            read('gs://bucket/tiny')


def test_too_little_room_is_said_before_anything_is_copied(copied, monkeypatch):
    locate(URL)
    small = len(copied)
    usage = shutil.disk_usage('/')
    monkeypatch.setattr(shutil, 'disk_usage', lambda _: usage._replace(free=10))
    with pytest.raises(ConfigError, match=rf'{URL}: .* GB to copy, but .* set .* variable {source.VARIABLE}'):
        locate(URL, WEIGHTS)
    assert len(copied) == small
