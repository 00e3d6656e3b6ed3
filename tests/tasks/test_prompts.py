import dataclasses

import pytest
import tokenizers
import transformers

from sparrow_jax.config import ConfigError, TokenizerConfig
from sparrow_jax.tasks.problems import Problem, load_problems
from sparrow_jax.tasks.prompts import PromptEncoder, fitting_prompts, take_prompts

SPECIAL = ('<|im_start|>', '<|im_end|>', '<|endoftext|>', '<think>', '</think>')
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    '{% if add_generation_prompt %}<|im_start|>assistant\n'
    '{% if opens %}<think>\n{% elif skips %}<think>\n\n</think>\n\n{% endif %}{% endif %}'
)
PROBLEM = Problem(0, 'What is 2 + 2?', '4', 'sample', {})


def byte_tokenizer(**kwargs):
    """Every byte is a token: encodes anything, decodes exactly."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token='<|im_end|>', **kwargs)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tokenizer_config(**changes):
    fields = {'path': '', 'chat_template': '', 'system_prompt': '', 'template_options': {}, 'end_tokens': ()}
    return TokenizerConfig(**(fields | changes))


@pytest.fixture
def make_encoder(data_config):
    def make(tokenizer=None, instruction='', **changes):
        return PromptEncoder(
            tokenizer_config(**changes),
            data_config(instruction=instruction),
            '',
            tokenizer=tokenizer or byte_tokenizer(),
        )

    return make


def test_prompt_text_and_ids(make_encoder):
    encoder = make_encoder(system_prompt='Be brief.', instruction=r'Use \boxed{}.')
    expected = (
        '<|im_start|>system\nBe brief.<|im_end|>\n'
        '<|im_start|>user\nWhat is 2 + 2?\nUse \\boxed{}.<|im_end|>\n<|im_start|>assistant\n'
    )
    assert encoder.text(PROBLEM) == expected
    ids = encoder.encode(PROBLEM)
    assert ids[0] == encoder.tokenizer.convert_tokens_to_ids('<|im_start|>')  # one token, not its letters
    assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == expected


def test_prompt_without_system_message_and_instruction(make_encoder):
    expected = '<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n'
    assert make_encoder().text(PROBLEM) == expected


def test_start_token_is_not_written_twice(make_encoder):
    tokenizer = byte_tokenizer(bos_token='<|endoftext|>')
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = '{{ bos_token }}' + TEMPLATE
    assert make_encoder(tokenizer).encode(PROBLEM).count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(
    ('options', 'opens'),
    [({}, False), ({'opens': True}, True), ({'skips': True}, False), ({'enable_thinking': True}, False)],
)
def test_prompt_that_opens_a_thought_is_known(make_encoder, options, opens):
    encoder = make_encoder(template_options=options)
    assert encoder.opens_think is opens
    # Only what the template writes counts, not what a problem or the system prompt speaks of.
    talk = make_encoder(system_prompt='Think in <think>', instruction='Begin with <think>', template_options=options)
    assert talk.opens_think is opens


def test_several_end_tokens_and_padding_that_is_one(make_encoder):
    tokenizer = byte_tokenizer(pad_token='<|im_end|>')
    encoder = make_encoder(tokenizer, end_tokens=('<|endoftext|>',))
    end, text_end = tokenizer.convert_tokens_to_ids(['<|im_end|>', '<|endoftext|>'])
    assert set(encoder.end_ids) == {end, text_end}
    assert encoder.pad_id == encoder.end_id == end
    _, response = encoder.encode_worked(PROBLEM, 'ab')
    # The end token belongs to the response though it equals the padding: its length says so.
    assert response[-1] == end
    assert len(response) == 3
    assert encoder.decode(response) == encoder.decode([*response[:-1], text_end]) == 'ab'
    assert encoder.decode([end, *response]) == '<|im_end|>ab'  # only what stands at the end is taken off


def test_padding_of_its_own(make_encoder):
    encoder = make_encoder(byte_tokenizer(pad_token='<|endoftext|>'))
    assert encoder.pad_id == encoder.tokenizer.pad_token_id != encoder.end_id
    assert make_encoder().pad_id == make_encoder().end_id  # none given


def test_thoughts_survive_decoding(make_encoder):
    encoder = make_encoder()
    text = '<think>\nx</think> 4 é ≤'
    assert encoder.decode(encoder.encode_worked(PROBLEM, text)[1]) == text


def test_worked_solution_behind_an_opened_thought(make_encoder):
    solution = '<think>\n2 + 2 = 4\n</think>\n\\boxed{4}'
    prompt, response = make_encoder().encode_worked(PROBLEM, solution)
    assert prompt == make_encoder().encode(PROBLEM)
    assert make_encoder().decode(response) == solution
    opening = make_encoder(template_options={'opens': True})
    prompt, response = opening.encode_worked(PROBLEM, solution)
    whole = opening.decode(prompt + response)
    assert whole.endswith('assistant\n<think>\n2 + 2 = 4\n</think>\n\\boxed{4}')
    assert whole.count('<think>') == 1
    with pytest.raises(ConfigError, match='does not close it'):
        opening.encode_worked(PROBLEM, '4')


def test_templates_from_files_and_bad_ones(make_encoder, tmp_path):
    file = tmp_path / 'plain.jinja'
    file.write_text("Q: {{ messages[-1]['content'] }} A:")
    assert make_encoder(chat_template=str(file)).text(PROBLEM) == 'Q: What is 2 + 2? A:'
    with pytest.raises(ConfigError, match=r'tokenizer\.chat_template=.*cannot be read'):
        make_encoder(chat_template=str(tmp_path / 'none.jinja'))
    file.write_text('{% for %}')
    with pytest.raises(ConfigError, match=r'tokenizer\.chat_template=.*fails'):
        make_encoder(chat_template=str(file))
    file.write_text("{{ raise_exception('no system role') }}")
    with pytest.raises(ConfigError, match='no system role'):
        make_encoder(chat_template=str(file))
    file.write_text('{{ 1 / 0 }}')
    with pytest.raises(ConfigError, match='division by zero'):
        make_encoder(chat_template=str(file))
    for forgetful in ('', 'Answer: ', "{{ messages[0]['contents'] }}"):
        file.write_text(forgetful)
        with pytest.raises(ConfigError, match='leaves out what the user says'):
            make_encoder(chat_template=str(file))
    bare = byte_tokenizer()
    bare.chat_template = None
    with pytest.raises(ConfigError, match=r'brings no chat template; set it to the path of a \.jinja file'):
        make_encoder(bare)
    with pytest.raises(ConfigError, match=r'tokenizer\.end_tokens'):
        make_encoder(end_tokens=('<|stop|>',))
    with pytest.raises(ConfigError, match=r"tokenizer\.path=''"):
        PromptEncoder(tokenizer_config(), None, '')


def test_tokenizer_is_read_from_the_model_folder(data_config, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / 'model')
    (tmp_path / 'model' / 'generation_config.json').write_text('{"eos_token_id": [257, 258]}')
    encoder = PromptEncoder(tokenizer_config(), data_config(), str(tmp_path / 'model'))
    assert encoder.end_ids == (257, 258)
    assert encoder.text(PROBLEM).startswith('<|im_start|>user')


def test_overlong_prompts_are_counted_and_skipped(make_encoder, data_config):
    problems = load_problems(data_config(), 'train')
    encoder = make_encoder()
    lengths = {p.index: len(encoder.encode(p)) for p in problems}
    limit = sorted(lengths.values())[len(lengths) // 2]
    fitting = [i for i, n in lengths.items() if n <= limit]
    assert 0 < len(fitting) < 40
    epoch = take_prompts(problems, encoder, 0, len(fitting), limit)
    assert sorted(p.index for p in epoch.problems) == fitting
    assert epoch.next_position - epoch.skipped == len(fitting)
    assert all(len(ids) <= limit for ids in epoch.prompt_ids)
    # Two steps of 5 are one of 10, from any position on.
    first = take_prompts(problems, encoder, 33, 5, limit)
    second = take_prompts(problems, encoder, first.next_position, 5, limit)
    both = take_prompts(problems, encoder, 33, 10, limit)
    assert first.problems + second.problems == both.problems
    assert first.skipped + second.skipped == both.skipped
    assert [p.index for p, _ in fitting_prompts(problems, encoder, limit)] == fitting
    with pytest.raises(ConfigError, match=r'rollout\.max_prompt_tokens=3: no training problem'):
        take_prompts(problems, encoder, 0, 1, 3)


def test_one_fitting_problem_serves_a_whole_step(make_encoder, data_config):
    problems = load_problems(data_config(), 'train')
    encoder = make_encoder()
    shortest = min(len(encoder.encode(p)) for p in problems)
    count = sum(len(encoder.encode(p)) == shortest for p in problems)
    taken = take_prompts(problems, encoder, 0, 3 * count, shortest)
    assert len({p.index for p in taken.problems}) == count
    assert dataclasses.is_dataclass(taken)
