"""Tokenizers from a checkpoint folder or a GGUF file, with their chat templates and the ids that end a response.

Prompts (`tasks/prompts.py`) are encoded with them; the sampler stops at their end ids. No torch is needed:
transformers' own reader of GGUF tokenizers wants it, so the byte-level BPE of such files is put together here.
"""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

# Without this every command opens with the advice that models need PyTorch, which is of no use here.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from sparrow_jax.config import ConfigError
from sparrow_jax.json_files import read_object
from sparrow_jax.models import gguf
from sparrow_jax.models.source import locate

# How text is cut before the merges, by the name that GGUF files give the scheme (`tokenizer.ggml.pre`).
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
_QWEN2 = rf'{_WORDS}|\p{{N}}|{_REST}'
_LLAMA3 = rf'{_WORDS}|\p{{N}}{{1,3}}|{_REST}'
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types of GGUF


def load_tokenizer(path: str | pathlib.Path) -> transformers.PreTrainedTokenizerFast:
    """The tokenizer of a checkpoint, chat template included.

    Args:
      path: as `source.locate` takes it: a folder with tokenizer.json (and tokenizer_config.json, chat_template.jinja),
        or a .gguf file whose vocabulary is a byte-level BPE.

    Raises:
      ConfigError: no tokenizer at `path`, or a kind of GGUF vocabulary that cannot be rebuilt.
    """
    path = locate(path, 'tokenizer.json')
    if path.suffix == '.gguf':
        return _from_gguf(path)
    if not (path / 'tokenizer.json').exists():
        raise ConfigError(
            f'{path}: holds no tokenizer.json; set tokenizer.path to a folder that does, or to a .gguf file'
        )
    try:
        return transformers.PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise what a broken file makes them trip over
        raise ConfigError(
            f'{path}: its tokenizer cannot be read ({type(error).__name__}: {error}); the download may be incomplete'
        ) from error


def end_ids(
    tokenizer: transformers.PreTrainedTokenizerFast, path: str | pathlib.Path, extra_strings: Sequence[str] = ()
) -> tuple[int, ...]:
    """Every id that ends a response, sorted.

    The union of the tokenizer's own end token, of those the checkpoint states (`eos_token_id` of
    generation_config.json, else of config.json; in a GGUF file its eos, eot and eom ids) and of `extra_strings`. Qwen3
    has two, 151645 and 151643: a sampler that knows one runs on.

    Args:
      tokenizer: from `load_tokenizer`.
      path: the checkpoint's, as `source.locate` takes it; '' where the model has none.
      extra_strings: further tokens, each a single token of the vocabulary.

    Raises:
      ConfigError: an extra string that is no token, or no end token at all.
    """
    ids: set[int] = set()
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    if str(path):
        ids.update(_stated_end_ids(locate(path)))
    vocabulary = tokenizer.get_vocab()
    for text in extra_strings:
        if text not in vocabulary:
            raise ConfigError(f'tokenizer.end_tokens: {text!r} is not a token of this vocabulary')
        ids.add(vocabulary[text])
    if not ids:
        raise ConfigError(f'{path}: neither tokenizer nor checkpoint names an end token; set tokenizer.end_tokens')
    return tuple(sorted(ids))


def _stated_end_ids(path: pathlib.Path) -> list[int]:
    if path.suffix == '.gguf':
        meta = gguf.Metadata(path)
        stated = (meta.get(f'tokenizer.ggml.{name}_token_id') for name in ('eos', 'eot', 'eom'))
        return [id_ for id_ in stated if id_ is not None]
    for name in ('generation_config.json', 'config.json'):
        if (path / name).exists():
            value: Any = read_object(path / name).get('eos_token_id')
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
                raise ConfigError(f'{path / name}: eos_token_id={value!r}: must be an id or a list of ids')
            return ids
    return []


def _from_gguf(path: pathlib.Path) -> transformers.PreTrainedTokenizerFast:
    meta = gguf.Metadata(path)
    kind = meta.need('tokenizer.ggml.model')
    if kind != 'gpt2':
        raise ConfigError(f'{path}: its vocabulary is of the kind {kind!r}; only byte-level BPE (gpt2) can be read')
    tokens = meta.need('tokenizer.ggml.tokens')
    types = meta.get('tokenizer.ggml.token_type') or [_NORMAL] * len(tokens)
    merges = [tuple(merge.split(' ', 1)) for merge in meta.need('tokenizer.ggml.merges')]
    scheme = meta.get('tokenizer.ggml.pre', 'default')
    bpe = models.BPE(
        vocab={token: i for i, token in enumerate(tokens)},
        merges=merges,
        # Llama 3 keeps whole words that are in the vocabulary even where no chain of merges makes them.
        ignore_merges=scheme == 'llama-bpe',
    )
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(scheme, path)
    if scheme == 'qwen2':
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            tokenizers.AddedToken(token, special=special, normalized=False)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ == wanted
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    named = {}
    for role, field in (('bos', 'bos'), ('eos', 'eos'), ('unk', 'unknown'), ('pad', 'padding')):
        id_ = meta.get(f'tokenizer.ggml.{field}_token_id')
        if id_ is not None:
            named[f'{role}_token'] = tokens[id_]
    if meta.get('tokenizer.ggml.add_bos_token', False) and 'bos_token' in named:
        bos = named['bos_token']
        backend.post_processor = processors.TemplateProcessing(
            single=f'{bos} $A', special_tokens=[(bos, tokens.index(bos))]
        )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    tokenizer.chat_template = meta.get('tokenizer.chat_template')
    return tokenizer


def _pre_tokenizer(scheme: str, path: pathlib.Path) -> pre_tokenizers.PreTokenizer:
    if scheme in ('default', 'gpt-2'):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if scheme == 'smollm':
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if scheme in ('qwen2', 'llama-bpe'):
        pattern = tokenizers.Regex(_QWEN2 if scheme == 'qwen2' else _LLAMA3)
        split = pre_tokenizers.Split(pattern, behavior='isolated')
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ConfigError(
        f'{path}: cuts text by the scheme {scheme!r}, which is not known here; set tokenizer.path to a folder with the '
        "model's tokenizer.json"
    )
