"""A prompt of ``predict`` is the ids that a server would compute with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoint.tokenizer_files import TEMPLATE, TOKENIZER_FILES
from finetune.errors import DataError
from finetune.trained.generate import Completer, Prompt, Sampling
from serve.text.tokenizer import load_tokenizer
from tests.support.models import save
from tests.support.tokenizers import make_folder

MESSAGES = ({"role": "user", "content": "Hello world"},)


def test_a_prompt_gets_the_ids_of_a_server(tmp_path: Path) -> None:
    folder = save("llama", tmp_path / "model", with_tokenizer=False, vocab_size=700)
    for file in make_folder("llama", tmp_path).iterdir():
        if file.name in TOKENIZER_FILES:
            shutil.copy(file, folder)
    (folder / TEMPLATE).write_text("{{ bos_token }}[INST] {{ messages[0].content }} [/INST]")
    completer, served = Completer(folder), load_tokenizer(folder)
    assert served is not None
    assert served.chat is not None
    ids = completer._ids(Prompt(text="Hello world"), Sampling())
    assert ids == list(served.encode("Hello world"))
    assert ids[0] == served.backend.token_to_id("<s>"), "the tokenizer puts it before every text"
    text = served.chat.render(MESSAGES, add_generation_prompt=True, max_bytes=999)
    assert text == "<s>[INST] Hello world [/INST]"
    assert completer._ids(Prompt(messages=MESSAGES), Sampling()) == list(served.encode(text, add_special_tokens=False))

    (folder / TEMPLATE).write_text("{{ raise_exception('no ' + messages[0].role) }}")
    with pytest.raises(DataError, match=r"^p, line 1: the chat template of .* cannot render these messages: no user$"):
        Completer(folder)._ids(Prompt(messages=MESSAGES, place="p, line 1"), Sampling())
    (folder / TEMPLATE).write_text("{% if %}")
    with pytest.raises(DataError, match=r"cannot render these messages: chat_template\.jinja: line 1: .*does not compile"):
        Completer(folder)._ids(Prompt(messages=MESSAGES, place="p, line 1"), Sampling())
