"""Targets are exactly the assistant's words and the token that ends them, whatever the template and the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from checkpoint.text.chat import ChatTemplate
from checkpoint.text.tokenizer import Tokenizer
from finetune.data.chat import ChatTargets
from finetune.data.encode import Encoded, Encoder
from finetune.data.readers import Fault
from finetune.data.samples import Chat, Completion, Malformed
from finetune.data.templates import TEMPLATES, named_template
from finetune.errors import ConfigError

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
WORDS = (
    "Hello there, how are you? The answer is 42. User: Assistant: [INST] [/INST] \n\n  ### Response: yes no <think> </think>"
)

CHATML = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA2 = """\
{%- if messages[0].role == 'system' -%}{%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' -%}
{%- set turns = messages[1:] -%}{%- else -%}{%- set system = '' -%}{%- set turns = messages -%}{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{ raise_exception('roles must alternate user/assistant/user') }}{%- endif -%}
{%- if message.role == 'user' -%}
{{ '<s>[INST] ' + (system if loop.first else '') + message.content | trim + ' [/INST]' }}
{%- else -%}{{ ' ' + message.content | trim + ' </s>' }}{%- endif -%}
{%- endfor -%}"""

PLAIN = """\
{%- for message in messages -%}{{ message.role | capitalize + ': ' + message.content + '\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}"""

MARKED = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ '<|im_start|>assistant\n' }}
{%- generation -%}{{ message.content }}{%- endgeneration -%}
{{ '<|im_end|>\n' }}{%- else -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}"""

# Writes an empty thought before the last answer only, and takes thoughts out of earlier ones.
THINKING = """\
{%- for message in messages -%}
{%- set content = message.content.split('</think>')[-1] -%}
{%- if message.role == 'assistant' and loop.last -%}
{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content + '<|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2's: spaces go to the word that follows, and line ends together."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([WORDS] * 20, trainer)
    return tokenizer


def sentence_piece() -> tokenizers.Tokenizer:
    """As Llama's: a space is put before every text."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", *SPECIALS], show_progress=False)
    tokenizer.train_from_iterator([WORDS.replace(" ", "▁")] * 20, trainer)
    return tokenizer


TOKENIZERS = {"byte_level": Tokenizer(byte_level()), "sentence_piece": Tokenizer(sentence_piece())}


def template(source: str, eos: str = "<|endoftext|>") -> ChatTargets:
    return ChatTargets(source, {"eos_token": eos}, SPECIALS, datetime(2026, 1, 2), "test.jinja")


def encoder(source: str | None, kind: str = "byte_level", eos: str = "<|endoftext|>", train_on: str = "completion") -> Encoder:
    tokenizer = TOKENIZERS[kind]
    made = template(source, eos) if source is not None else None
    return Encoder(tokenizer, tokenizer.backend.token_to_id(eos) or 0, made, train_on, ("assistant",))


def chat(*turns: str, weights: Sequence[bool] | None = None) -> Chat:
    """Turns of user and assistant in alternation."""
    messages = tuple({"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns))
    return Chat(messages, tuple(weights or [True] * len(turns)))


def encoded(some: Encoder, sample: Chat | Completion) -> Encoded:
    (made,) = some.encode([sample])
    assert isinstance(made, Encoded), made
    return made


def targets(made: Encoded, kind: str = "byte_level") -> list[str]:
    """The text of each run of targets."""
    assert made.learned is not None
    runs: list[list[int]] = []
    before = 0
    for token, learned in zip(made.ids.tolist(), made.learned.tolist(), strict=True):
        if learned and not before:
            runs.append([])
        if learned:
            runs[-1].append(token)
        before = learned
    return [TOKENIZERS[kind].decode(run, skip_special_tokens=False).strip(" ") for run in runs]


TURNS = ("Hello there", "The answer is 42.", "how are you?", "yes\n\nno")

EXPECTED = {
    "chatml": (CHATML, ["The answer is 42.<|im_end|>", "yes\n\nno<|im_end|>"]),
    "llama2": (LLAMA2, ["The answer is 42. </s>", "yes\n\nno </s>"]),
    "plain": (PLAIN, ["The answer is 42.\n", "yes\n\nno\n<|endoftext|>"]),
    "marked": (MARKED, ["The answer is 42.<|im_end|>", "yes\n\nno<|im_end|>"]),
    "thinking": (THINKING, ["The answer is 42.<|im_end|>", "<think>\n\n</think>\n\nyes\n\nno<|im_end|>"]),
    "our plain": (TEMPLATES["plain"], ["The answer is 42.<|endoftext|>", "yes\n\nno<|endoftext|>"]),
    "our instruct": (TEMPLATES["instruct"], ["The answer is 42.<|endoftext|>", "yes\n\nno<|endoftext|>"]),
    "our chatml": (TEMPLATES["chatml"], ["The answer is 42.<|im_end|><|endoftext|>", "yes\n\nno<|im_end|><|endoftext|>"]),
}


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize("name", list(EXPECTED))
def test_targets_are_the_answers_and_what_ends_them(name: str, kind: str) -> None:
    source, expected = EXPECTED[name]
    made = encoded(encoder(source, kind), chat(*TURNS))
    assert targets(made, kind) == expected
    assert made.learned is not None
    assert made.learned[-1] == 1, "nothing is learned from what follows the last target"


@pytest.mark.parametrize("name", ["chatml", "llama2", "plain", "our plain", "our instruct", "our chatml"])
def test_a_turn_begins_with_the_tokens_a_server_makes_of_the_prompt(name: str) -> None:
    source, _ = EXPECTED[name]
    tokenizer = TOKENIZERS["byte_level"]
    for answer in ("The answer is 42.", "\n\nyes", "  no"):
        made = encoded(encoder(source), chat("Hello there", answer))
        served = ChatTemplate(source, {"eos_token": "<|endoftext|>"})
        prompt = served.render(chat("Hello there").messages, add_generation_prompt=True, max_bytes=999)
        ids = list(tokenizer.encode(prompt, add_special_tokens=False))
        assert made.learned is not None
        assert made.ids[: len(ids)].tolist() == ids
        assert made.learned[: len(ids)].tolist() == [0] * len(ids)
        assert made.learned[len(ids) :].all()


@pytest.mark.parametrize("name", ["chatml", "llama2", "marked", "thinking"])
def test_tokens_are_those_of_the_whole_text_where_turns_are_bordered_by_special_tokens(name: str) -> None:
    source, _ = EXPECTED[name]
    made = encoded(encoder(source), chat(*TURNS))
    text = template(source).render_whole(chat(*TURNS))
    ids = list(TOKENIZERS["byte_level"].encode(text, add_special_tokens=False))
    assert made.ids.tolist() == ids[: len(made.ids)]


def test_text_is_rendered_as_transformers_renders_it() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for name, (source, _) in EXPECTED.items():
        conversation = chat(*TURNS)
        messages = [dict(message) for message in conversation.messages]
        (theirs,), indices = render_jinja_template(
            [messages], chat_template=source, eos_token="<|endoftext|>", return_assistant_tokens_mask=name == "marked"
        )
        assert template(source).render_whole(conversation) == theirs
        if name == "marked":
            ours = template(source).render(conversation, [False, True, False, True]).spans
            assert [(begin, end - len("<|im_end|>")) for begin, end in ours] == [tuple(pair) for pair in indices[0]]


def test_the_dialect_of_transformers_is_understood() -> None:
    source = (
        "{% for message in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ message | tojson }} {{ strftime_now('%Y') }} {{ eos_token }}{% endfor %}"
    )
    assert template(source).render_whole(chat("ä<", "b")) == '{"role": "user", "content": "ä<"} 2026 <|endoftext|>'


def test_only_some_turns_are_targets() -> None:
    for source in (CHATML, MARKED):
        last = encoded(encoder(source, train_on="last"), chat(*TURNS))
        assert targets(last) == ["yes\n\nno<|im_end|>"]
        weighted = encoded(encoder(source), chat(*TURNS, weights=[True, True, True, False]))
        assert targets(weighted) == ["The answer is 42.<|im_end|>"]
    everything = encoded(encoder(CHATML, train_on="all"), chat(*TURNS))
    assert everything.learned is not None
    assert everything.learned.all()


def test_short_words_are_not_looked_for_in_the_templates_own() -> None:
    last_only = """\
{%- for message in messages -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '\n' }}
{%- if loop.last -%}{{ eos_token }}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
    made = encoded(encoder(last_only), chat("e", "a", "s", ""))
    assert targets(made) == ["a\n", "\n<|endoftext|>"]
    both = Encoder(TOKENIZERS["byte_level"], 0, template(CHATML), "completion", ("user", "assistant"))
    assert targets(encoded(both, chat("e", "a"))) == ["e<|im_end|>", "a<|im_end|>"]


def test_other_roles_can_be_targets() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    both = Encoder(tokenizer, 0, template(CHATML), "completion", ("user", "assistant"))
    made = encoded(both, chat("Hello there", "yes"))
    assert targets(made) == ["Hello there<|im_end|>", "yes<|im_end|>"]


@pytest.mark.parametrize("kind", list(TOKENIZERS))
@pytest.mark.parametrize(
    ("prompt", "completion"), [("Hello ", "there"), ("Hello", " there"), ("Hello\n\n", "yes"), ("", "yes")]
)
def test_completions_end_in_the_end_of_text(kind: str, prompt: str, completion: str) -> None:
    made = encoded(encoder(None, kind), Completion(prompt, completion))
    assert targets(made, kind) == [completion.strip(" ") + "<|endoftext|>"]
    text = TOKENIZERS[kind].decode(made.ids.tolist(), skip_special_tokens=False)
    assert text == prompt + completion + "<|endoftext|>"
    if kind == "byte_level":
        head = list(TOKENIZERS[kind].encode(prompt, add_special_tokens=False))
        assert made.ids[: len(head)].tolist() == head


def test_the_tokenizers_own_leading_token_comes_before_a_completion() -> None:
    from tokenizers.processors import TemplateProcessing

    backend = byte_level()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 3)])
    tokenizer = Tokenizer(backend)
    made = encoded(Encoder(tokenizer, 0, None, "completion", ("assistant",)), Completion("Hello", " there"))
    assert made.ids.tolist() == [3, *tokenizer.encode("Hello", add_special_tokens=False), *made.ids[-2:].tolist()]
    assert made.learned is not None
    assert made.learned[0] == 0


@pytest.mark.parametrize(
    ("source", "sample", "says"),
    [
        (LLAMA2, Chat(({"role": "assistant", "content": "a"},), (True,)), "roles must alternate"),
        (CHATML, Chat(({"role": "user", "content": "a"},), (True,)), "has no turn of assistant to learn"),
        (None, chat("a", "b"), "name one by data.chat_template"),
        ("{{ messages[7].content }}", chat("a", "b"), "fails on the conversation"),
        ("{{ messages | length }}{{ messages[-1].content | upper }}", chat("a", "b", "c", "d"), "{% generation %}"),
    ],
)
def test_what_a_template_cannot_render_is_a_fault(source: str | None, sample: Chat, says: str) -> None:
    (fault,) = encoder(source).encode([sample])
    assert isinstance(fault, Fault)
    assert says in fault.message


def test_a_template_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(ConfigError, match=r"test\.jinja: line 2: the chat template does not compile"):
        template("{% if x %}\n{% fi %}")


def test_a_template_cannot_leave_its_sandbox() -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}{{ messages.__class__.__subclasses__() }}"):
        with pytest.raises(Malformed):
            template(source).render_whole(chat("a"))


def test_the_text_is_what_a_server_renders_whatever_the_conversation_holds() -> None:
    odd = chat("Hello \ufdd0there\ufdd1", "yes \ufdd2 no")
    for name, (source, _) in EXPECTED.items():
        served = ChatTemplate(source, {"eos_token": "<|endoftext|>"})
        text = served.render(odd.messages, add_generation_prompt=False, max_bytes=999)
        assert template(source).render_whole(odd) == text, name
    made = encoded(encoder(CHATML), odd)
    assert targets(made) == ["yes \ufdd2 no<|im_end|>"]


def test_parts_that_the_template_alters_cannot_be_told_apart() -> None:
    trimmed = """\
{%- for message in messages -%}{%- set words -%}{% generation %}{{ message.content }} {% endgeneration %}{%- endset -%}
{{ words | trim }}{{ eos_token }}{%- endfor -%}"""
    (fault,) = encoder(trimmed).encode([chat("Hello", "yes")])
    assert isinstance(fault, Fault)
    assert "the chat template alters what it encloses" in fault.message
    assert template(trimmed).render_whole(chat("Hello", "yes")) == "Hello<|endoftext|>yes<|endoftext|>"


def test_a_named_template_that_no_server_would_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "long.jinja").write_text("x" * (1 << 20) + "x")
    with pytest.raises(ConfigError, match=r"long\.jinja has 1048577 bytes; a template has at most 1048576"):
        named_template(str(tmp_path / "long.jinja"))
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read"):
        named_template(str(tmp_path / "none.jinja"))
