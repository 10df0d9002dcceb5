from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.text.chat import ChatRejected, ChatTemplate
from checkpoint.text.tokenizer import read_tokenizer
from tests.support.tokenizers import make_folder, write

TEMPLATE = """{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " hi <b> "},
    {"role": "assistant", "content": "hello"},
]


@pytest.mark.parametrize("open_turn", [True, False])
@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_prompts_equal_those_of_transformers(place: str, open_turn: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_folder("gpt_neox", tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    if place == "file":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        both = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
        config["chat_template"] = TEMPLATE if place == "config" else both
        write(folder, "tokenizer_config.json", config)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(
        TURNS, tokenize=False, add_generation_prompt=open_turn
    )
    tokenizer = read_tokenizer(Folder(folder))
    assert tokenizer is not None
    assert tokenizer.chat is not None
    assert tokenizer.chat.render(TURNS, add_generation_prompt=open_turn, max_bytes=10_000) == theirs


def render(source: str, content: str = "hi", **options: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, **options)
    return template.render([{"role": "user", "content": content}], add_generation_prompt=True, max_bytes=1000)


def test_a_template_sees_the_special_tokens_and_its_helpers() -> None:
    source = "{{ bos_token }}{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{{ eos_token }}"
    assert render(source, 'a "<b>" ü') == '<s>"a \\"<b>\\" ü"</s>'


def test_a_refusal_is_told_in_the_templates_words() -> None:
    wizard = [{"role": "wizard", "content": "hi"}]
    with pytest.raises(ChatRejected, match="no such role") as caught:
        ChatTemplate(TEMPLATE, {}).render(wizard, add_generation_prompt=False, max_bytes=1000)
    assert caught.value.said == "no such role"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{{ 10 ** (10 ** 8) }}",
        "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n }}",
        "{{ 'x' * 10 ** 10 }}",
        "{{ [messages] * 10 ** 10 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_what_the_sandbox_forbids_or_the_template_gets_wrong_is_a_rejection(source: str) -> None:
    with pytest.raises(ChatRejected) as caught:
        render(source)
    assert "hi" not in str(caught.value).replace("this", "")


def test_the_prompt_may_not_grow_without_bound() -> None:
    with pytest.raises(ChatRejected, match="more than 1000 bytes"):
        render("{% for i in range(2000) %}x{% endfor %}")


def test_a_template_may_reckon() -> None:
    assert render("{{ 3 * 4 ** 2 }} {{ '-' * 3 }} {{ 2.5 * 2 }} {{ 2 ** -1 }}") == "48 --- 5.0 0.5"


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ " + "(" * 5000 + ")" * 5000 + " }}", "{% for i in x %}" * 60 + "{% endfor %}" * 60]
)
def test_a_template_that_does_not_compile_is_a_configuration_error(source: str) -> None:
    with pytest.raises(CheckpointError, match=r"^some\.jinja: .*does not compile"):
        ChatTemplate(source, {}, file="some.jinja")


def test_a_template_that_does_not_compile_names_its_line() -> None:
    with pytest.raises(CheckpointError, match=r"^chat_template\.jinja: line 2: the chat template does not compile"):
        ChatTemplate("{% if x %}\n{% fi %}", {})


def test_marks_are_written_around_what_the_template_encloses_and_change_nothing_else() -> None:
    source = "{{ eos_token }}{% generation %}{{ messages[0].content }}{% endgeneration %}{{ bos_token }}"
    assert render(source, marks=("[", "]")) == "</s>[hi]<s>"
    assert render(source) == "</s>hi<s>"
    assert ChatTemplate(source, {}).encloses_answers
    assert not ChatTemplate("{{ messages[0].content }}", {}).encloses_answers


def test_the_time_that_templates_are_told_is_the_one_handed_in() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 1, 2)) == "02 Jan 2026"


def test_tools_are_seen_by_the_template() -> None:
    template = ChatTemplate("{{ tools | tojson }}", {})
    assert template.render([], add_generation_prompt=False, max_bytes=99, tools=[{"name": "f"}]) == '[{"name": "f"}]'
    assert template.render([], add_generation_prompt=False, max_bytes=99) == "null"
