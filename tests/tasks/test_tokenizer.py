"""Tokenizers from folders and GGUF files."""

import json
import pathlib

import gguf
import pytest
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from sparrow_jax.config import ConfigError
from sparrow_jax.tasks.tokenizer import end_ids, load_tokenizer

SMOLLM2 = pathlib.Path(__file__).parents[2] / 'weights' / 'smollm2-135m' / 'SmolLM2-135M-Instruct.Q4_1.gguf'
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.exists(), reason='`make model` fetches the SmolLM2-135M weights')
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'
)
SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
TEXTS = [
    'Hello world, it is 12 + 345 = 357.',
    'a  1   22\n\n\tdef f(x):\n        return x ',
    "naïve café, it's 😀 \\boxed{12}",
    '<|im_start|>user\nhi<|im_end|>',
]


def split(scheme):
    """The pre-tokenizers of the published tokenizer.json files of three families, written out a second time."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if scheme == 'smollm':
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    digits = {'qwen2': r'\p{N}', 'llama-bpe': r'\p{N}{1,3}'}[scheme]
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r'| ?[^\s\p{L}\p{N}]+[\r\n]*'
        r'|\s*[\r\n]+|\s+(?!\S)|\s+'
    )
    isolated = pre_tokenizers.Split(tokenizers.Regex(pattern), 'isolated')
    return pre_tokenizers.Sequence([isolated, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(scheme):
    """A small byte-level BPE with its own merges, as a `tokenizers` object."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = split(scheme)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, 'hello hello world 12 345 12 345   return return'] * 3, trainer)
    return backend


def write_folder(folder, backend, **config):
    folder.mkdir()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token='<|im_end|>', pad_token='<|endoftext|>', chat_template=TEMPLATE
    ).save_pretrained(folder)
    for name, value in config.items():
        (folder / f'{name}.json').write_text(json.dumps(value))
    return folder


def write_gguf(path, backend, scheme, **ids):
    writer = gguf.GGUFWriter(path, 'llama')
    vocabulary = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre(scheme)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in vocabulary])
    merges = json.loads(backend.to_str())['model']['merges']
    writer.add_token_merges([merge if isinstance(merge, str) else ' '.join(merge) for merge in merges])
    writer.add_eos_token_id(vocabulary.index('<|im_end|>'))
    writer.add_pad_token_id(vocabulary.index('<|endoftext|>'))
    for name, id_ in ids.items():
        writer.add_uint32(f'tokenizer.ggml.{name}_token_id', id_)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize('scheme', ['smollm', 'qwen2', 'llama-bpe'])
def test_folder_and_gguf_file_of_one_vocabulary_agree(tmp_path, scheme):
    backend = trained(scheme)
    folder = load_tokenizer(write_folder(tmp_path / 'folder', backend))
    file = load_tokenizer(write_gguf(tmp_path / 'model.gguf', backend, scheme))
    merged = 0
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert file.encode(text, add_special_tokens=False) == folder.encode(text, add_special_tokens=False) == ids
        assert file.decode(ids) == text
        merged += len(text.encode()) - len(ids)
    assert merged > 20  # merges were learned and are applied
    message = [{'role': 'user', 'content': 'hello world'}]
    prompts = [t.apply_chat_template(message, add_generation_prompt=True, tokenize=False) for t in (folder, file)]
    assert prompts == ['<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n'] * 2
    for tokenizer in (folder, file):
        assert (tokenizer.eos_token, tokenizer.pad_token) == ('<|im_end|>', '<|endoftext|>')
        ids = tokenizer.encode('<|im_start|>hello<|im_end|>')
        assert tokenizer.decode(ids, skip_special_tokens=True) == 'hello'


def test_end_ids_of_a_folder(tmp_path):
    backend = trained('qwen2')
    end, text, start = (backend.token_to_id(token) for token in ('<|im_end|>', '<|endoftext|>', '<|im_start|>'))
    plain = write_folder(tmp_path / 'plain', backend)
    tokenizer = load_tokenizer(plain)
    assert end_ids(tokenizer, plain) == (end,)
    assert end_ids(tokenizer, '') == (end,)
    assert end_ids(tokenizer, plain, ['<|endoftext|>']) == (text, end)
    two = write_folder(
        tmp_path / 'two', backend, generation_config={'eos_token_id': [end, text]}, config={'eos_token_id': start}
    )
    assert end_ids(tokenizer, two) == (text, end)
    one = write_folder(tmp_path / 'one', backend, generation_config={}, config={'eos_token_id': start})
    assert end_ids(tokenizer, one) == (start, end)
    with pytest.raises(ConfigError, match=r"end_tokens: '<stop>' is not a token"):
        end_ids(tokenizer, plain, ['<stop>'])
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match='names an end token'):
        end_ids(tokenizer, plain)


def test_end_ids_of_a_gguf_file(tmp_path):
    file = write_gguf(tmp_path / 'model.gguf', trained('smollm'), 'smollm', eot=0)
    assert end_ids(load_tokenizer(file), file) == (0, 2)


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r'no tokenizer\.json'):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match='no such checkpoint'):
        load_tokenizer(tmp_path / 'absent.gguf')
    with pytest.raises(ConfigError, match='strange-scheme'):
        load_tokenizer(write_gguf(tmp_path / 'model.gguf', trained('smollm'), 'strange-scheme'))
    writer = gguf.GGUFWriter(tmp_path / 'spm.gguf', 'llama')
    writer.add_tokenizer_model('llama')
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match='byte-level BPE'):
        load_tokenizer(tmp_path / 'spm.gguf')


@needs_smollm2
def test_smollm2_ids():
    tokenizer = load_tokenizer(SMOLLM2)
    # The ids of transformers' own GGUF reader, which needs torch.
    assert tokenizer.encode("Hello 1234 world\n  it's") == [19556, 216, 33, 34, 35, 36, 905, 3805, 357, 506]
    message = [{'role': 'user', 'content': 'hi'}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ids[:3] == [1, 9690, 198]
    assert ids[-8:] == [198, 6004, 2, 198, 1, 520, 9531, 198]
    assert end_ids(tokenizer, SMOLLM2) == (2,)


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json'])
@pytest.mark.parametrize('text', ['{"version": ', '{}', '[]'])
def test_a_broken_tokenizer_is_named(tmp_path, name, text):
    folder = write_folder(tmp_path / 'folder', trained('smollm'))
    (folder / name).write_text(text)
    if (name, text) == ('tokenizer_config.json', '{}'):
        load_tokenizer(folder)
        return
    with pytest.raises(ConfigError, match=rf'{folder}: its tokenizer cannot be read'):
        load_tokenizer(folder)


@pytest.mark.parametrize('text', ['{"eos_token_id": ', '[]', '{"eos_token_id": "x"}', '{"eos_token_id": [true]}'])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, text):
    folder = write_folder(tmp_path / 'folder', trained('smollm'))
    (folder / 'generation_config.json').write_text(text)
    with pytest.raises(ConfigError, match=r'generation_config\.json: (not JSON|must hold|eos_token_id=)'):
        end_ids(load_tokenizer(folder), folder)
