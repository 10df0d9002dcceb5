from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.text.tokenizer import Tokenizer
from serve.errors import ConfigError
from serve.text.tokenizer import PIECE_CHARACTERS, UNCOUNTED_BYTES, exceeds, load_tokenizer
from tests.support.tokenizers import FOLDERS, TEXTS, make_folder


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", "{"), ("tokenizer_config.json", '{"eos_token": 5}'), ("chat_template.jinja", "{% if %}")],
)
def test_a_folder_with_a_broken_file_is_not_served_and_the_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=rf"^{file}: "):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_long_text_is_too_long_only_when_it_is(
    name: str, tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.text.tokenizer.UNCOUNTED_BYTES", 0)
    tokenizer = tokenizers[name]
    for text in ("".join(TEXTS), "a"):
        long = text * (PIECE_CHARACTERS // len(text) + 50)
        num_tokens = len(tokenizer.encode(long))
        assert not exceeds(tokenizer, long, num_tokens), text
        assert num_tokens < 2000 or exceeds(tokenizer, long, num_tokens // 2), text


def test_a_text_that_needs_little_memory_is_tokenised_once(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        counted.append(len(text))
        return (0,) * len(text)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    tokenizer = tokenizers[next(iter(FOLDERS))]
    assert not exceeds(tokenizer, "a" * UNCOUNTED_BYTES, 10)
    assert not counted
    assert exceeds(tokenizer, "a" * (UNCOUNTED_BYTES + 1), 10)
    assert counted
