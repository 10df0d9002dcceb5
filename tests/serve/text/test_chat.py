from __future__ import annotations

import json
from pathlib import Path

import pytest

from serve.errors import ConfigError
from serve.text.chat import ChatRejected, ChatTemplate
from serve.text.tokenizer import load_tokenizer
from tests.serve.text.folders import make_folder, write

TEMPLATE = """{% for message in messages %}
{% if message.role not in ('system', 'user', 'assistant') %}{{ raise_exception('no such role') }}{% endif %}
<|im_start|>{{ message['role'] }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TURNS = [("system", "Be brief."), ("user", " hi <b> "), ("assistant", "hello")]


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
        [{"role": role, "content": content} for role, content in TURNS], tokenize=False, add_generation_prompt=open_turn
    )
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    assert tokenizer.chat is not None
    assert tokenizer.chat.render(TURNS, add_generation_prompt=open_turn, max_bytes=10_000) == theirs


def render(source: str, turns: list[tuple[str, str]] | None = None, max_bytes: int = 1000) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(turns or [("user", "hi")], add_generation_prompt=True, max_bytes=max_bytes)


def test_a_template_sees_the_special_tokens_and_its_helpers() -> None:
    source = "{{ bos_token }}{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}{{ eos_token }}"
    assert render(source, [("user", 'a "<b>" ü')]) == '<s>"a \\"<b>\\" ü"</s>'


def test_a_refusal_is_told_in_the_templates_words() -> None:
    with pytest.raises(ChatRejected, match="no such role"):
        ChatTemplate(TEMPLATE, {}).render([("wizard", "hi")], add_generation_prompt=False, max_bytes=1000)


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
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate(source, {})
