"""A prompt of ``predict`` is the ids that a server would compute with; files of prompts, batches, and the room there is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import GenerationConfig

from checkpoint.text.tokenizer_files import TEMPLATE, TOKENIZER_FILES
from finetune.errors import DataError
from finetune.trained.generate import Completer, Prompt, Sampling, read_prompts
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


# -- with a model that repeats what it is given


class Repeats:
    """In the place of a model: answers every row with its own last token, and keeps what it was asked."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.asked: list[tuple[list[list[int]], list[list[int]], GenerationConfig, int]] = []

    def generate(self, ids: torch.Tensor, *, attention_mask: torch.Tensor, generation_config: GenerationConfig) -> torch.Tensor:
        self.asked.append((ids.tolist(), attention_mask.tolist(), generation_config, torch.initial_seed()))
        return torch.cat([ids, ids[:, -1:]], dim=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("generate")
    made = save("llama", root / "model", with_tokenizer=False, vocab_size=700, max_position_embeddings=32)
    for file in make_folder("llama", root).iterdir():
        if file.name in TOKENIZER_FILES:
            shutil.copy(file, made)
    return made


@pytest.fixture
def completer(folder: Path) -> Completer:
    made: Any = Completer(folder)
    made._model = Repeats()
    return cast(Completer, made)


def asked(completer: Completer) -> list[tuple[list[list[int]], list[list[int]], GenerationConfig, int]]:
    model: Any = completer._model
    return cast("list[tuple[list[list[int]], list[list[int]], GenerationConfig, int]]", model.asked)


def texts(*words: str) -> list[Prompt]:
    return [Prompt(text=word, place=f"p, line {number}") for number, word in enumerate(words, 1)]


def test_prompts_of_a_batch_end_together_and_each_answer_is_its_own(completer: Completer) -> None:
    prompts = texts("Hello", "Hello world and more words", "a", "b b", "c")
    answers = list(completer.complete(prompts, Sampling(seed=7, max_new_tokens=4), batch=2))
    assert len(answers) == 5
    for first, (rows, masks, settings, seed) in zip((0, 2, 4), asked(completer), strict=True):
        assert seed == 7 + first, "what a batch yields does not depend on those before it"
        wanted = [completer._ids(prompt, Sampling(max_new_tokens=4)) for prompt in prompts[first : first + 2]]
        assert [row[-len(ids) :] for row, ids in zip(rows, wanted, strict=True)] == wanted
        assert [sum(mask) for mask in masks] == [len(ids) for ids in wanted]
        assert all(mask == sorted(mask) for mask in masks), "filled up in front"
        assert settings.max_new_tokens == 4
        assert settings.do_sample is False
    assert [row[-1] for rows, *_ in asked(completer) for row in rows] == [completer._ids(p, Sampling())[-1] for p in prompts]


def test_sampling_draws_from_what_is_asked_and_a_temperature_of_zero_draws_nothing(completer: Completer) -> None:
    list(completer.complete(texts("a"), Sampling(temperature=0.5, top_p=0.75)))
    ((_, _, settings, _),) = asked(completer)
    assert (settings.do_sample, settings.temperature, settings.top_p, settings.top_k) == (True, 0.5, 0.75, 0)


@pytest.mark.parametrize(("new", "kept"), [(8, 24), (31, 1), (32, 1), (500, 1)])
def test_a_prompt_without_room_loses_its_beginning_and_keeps_its_end(completer: Completer, new: int, kept: int) -> None:
    (long,) = texts("word " * 100)
    whole = completer._tokenizer.encode(long.text or "")
    assert completer._ids(long, Sampling(max_new_tokens=new)) == list(whole)[-kept:]
    list(completer.complete([long], Sampling(max_new_tokens=new)))
    assert asked(completer)[0][2].max_new_tokens == min(new, 32 - kept), "never beyond the longest position"


def test_a_prompt_without_a_token_begins_as_the_model_does_or_is_refused_by_its_line(completer: Completer) -> None:
    (prompt,) = texts("")
    inside: Any = completer
    inside._tokenizer = SimpleNamespace(encode=lambda text, **_: [], end_of_text_id=None)
    for defaults, start in (
        ({"bos_token_id": 5, "eos_token_id": 6}, 5),
        ({"eos_token_id": [8, 9]}, 8),
        ({"eos_token_id": 6}, 6),
    ):
        inside._defaults = defaults
        assert completer._ids(prompt, Sampling()) == [start]
    inside._defaults = {}
    with pytest.raises(DataError, match=r"^p, line 1: the prompt has no token, and the model no token to begin with$"):
        completer._ids(prompt, Sampling())


# -- files of prompts


def test_a_line_is_a_prompt_and_a_place(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes('one\r\n\n  two {"prompt": 1}\n \nthree\u2028more'.encode())
    found = read_prompts(file)
    assert [prompt.text for prompt in found] == ["one", '  two {"prompt": 1}', "three\u2028more"]
    assert [prompt.place for prompt in found] == [f"{file}, line {number}" for number in (1, 3, 5)]
    assert all(prompt.shown == prompt.text for prompt in found)


def test_a_record_is_a_text_or_a_chat(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [{"prompt": "p", "more": 1}, {"text": "t"}, {"messages": chat}]
    file.write_text("\n".join(map(json.dumps, lines)))
    first, second, third = read_prompts(file)
    assert (first.text, second.text, third.text) == ("p", "t", None)
    assert third.messages == tuple(chat)
    assert (second.shown, third.shown) == ("t", "b")


RULE = "it must be an object with one of the keys prompt, text, messages"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", f"is a list; {RULE}"),
        ("7", f"is a int; {RULE}"),
        ("{}", f"has none of them; {RULE}"),
        ('{"prompt": "a", "text": "b"}', f"has prompt, text; {RULE}"),
        ('{"text": null}', "text is a NoneType; it must be text"),
        ('{"messages": "a"}', "messages must be a list of at least one message"),
        ('{"messages": []}', "messages must be a list of at least one message"),
        ('{"messages": ["a"]}', "every message must be an object with the texts role and content"),
        (
            '{"messages": [{"role": "user", "content": ["a"]}]}',
            "every message must be an object with the texts role and content",
        ),
        ('{"prompt": ', "not valid JSON: Expecting value at column 12"),
    ],
)
def test_a_record_that_is_no_prompt_is_refused_by_its_line_and_rule(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(DataError) as refused:
        read_prompts(file)
    assert str(refused.value) == f"{file}, line 3: {said}"


def test_a_file_that_cannot_be_read_or_holds_nothing_is_refused_by_its_option(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.jsonl").write_text(" \n\n")
    for name, said in (("latin.txt", "cannot be read"), ("no.txt", "cannot be read"), ("empty.jsonl", "holds no prompt")):
        with pytest.raises(DataError, match=rf"^--prompts: {tmp_path / name}: {said}"):
            read_prompts(tmp_path / name)
