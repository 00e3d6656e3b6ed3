"""Makes the tokenizer of the tiny model: `python scripts/make_tiny_tokenizer.py [--out=configs/tiny_start]`.

Reads generated reasoning-gym prompts and worked solutions; writes tokenizer.json, tokenizer_config.json,
chat_template.jinja and generation_config.json, which `transformers.AutoTokenizer` opens. Byte-level BPE of exactly 512
tokens: any text round-trips, each digit is a token of its own, and a space before a digit belongs to the word before it
(' odd ', not ' odd' + ' ').
"""

import argparse
import json
import pathlib
from collections.abc import Iterator

import reasoning_gym
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs import base, tiny
from sparrow_jax.tasks import worked

VOCAB_SIZE = 512
PAD, START, END = '<|endoftext|>', '<|im_start|>', '<|im_end|>'
THINK = ('<think>', '</think>')  # tokens, but not special ones: decoding keeps them, as Qwen3's tokenizer does
PIECES = r'\d| ?\p{L}+ (?=\d)| ?\p{L}+| ?[^\s\p{L}\d]+ (?=\d)| ?[^\s\p{L}\d]+[\r\n]*|\s+(?!\S)|\s+'
# Prompts of other tasks, so that smoke forms of every configuration find their words; counts are examples of each.
OTHER_TASKS = {
    'chain_sum': 400,
    'products': 200,
    'gcd': 200,
    'lcm': 200,
    'basic_arithmetic': 200,
    'letter_counting': 100,
    'leg_counting': 100,
}
WORKED_EXAMPLES = 2000
SYSTEM_PROMPT = 'You are a helpful assistant.'
SYSTEM_PROMPTS = 600  # times that the system prompt and the name of the answering role are repeated

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


class _Generated:
    def __init__(self, task: str, item: dict):
        self.source, self.question, self.metadata = f'reasoning_gym:{task}', item['question'], item['metadata']


def corpus() -> Iterator[str]:
    """Training text: the tiny task's prompts and both styles of solutions, then prompts of other tasks."""
    config = tiny.get_config()
    task = config.data.source.split(':')[1]
    options = json.loads(config.data.options)
    for item in reasoning_gym.create_dataset(task, seed=1, size=WORKED_EXAMPLES, **options):
        problem = _Generated(task, item)
        yield f'user\n{problem.question}\n{config.data.instruction}'
        for style in worked.STYLES:
            yield from worked.worked_solution(problem, style=style).split('<think>')[1].split('</think>')
    for instruction in (base.get_config().data.instruction, 'Put the final answer in <answer></answer>.'):
        for task, examples in OTHER_TASKS.items():
            for item in reasoning_gym.create_dataset(task, seed=2, size=examples):
                yield f'{item["question"]}\n{instruction}'
    for _ in range(SYSTEM_PROMPTS):
        yield f'system\n{SYSTEM_PROMPT}'
        yield 'assistant\n'


def build() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same text gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), 'isolated'),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(THINK),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINK])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    if len(fast) != VOCAB_SIZE:
        raise SystemExit(f'the tokenizer has {len(fast)} tokens, not {VOCAB_SIZE}: the training text is too small')
    return fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('configs/tiny_start'))
    out = parser.parse_args().out
    fast = build()
    fast.save_pretrained(out)
    settings = json.loads((out / 'tokenizer_config.json').read_text())
    settings['tokenizer_class'] = 'PreTrainedTokenizerFast'  # the name that every release of transformers knows
    (out / 'tokenizer_config.json').write_text(json.dumps(settings, indent=2) + '\n')
    ends = sorted(fast.convert_tokens_to_ids([END, PAD]))  # as an export of the model writes them
    generation = {'eos_token_id': ends, 'pad_token_id': fast.pad_token_id}
    (out / 'generation_config.json').write_text(json.dumps(generation, indent=2) + '\n')
    print(f'{len(fast)} tokens written to {out}')


if __name__ == '__main__':
    main()
