"""Llama 3's vocabulary, in tiktoken's form, gives the ids of transformers' own converter; others are refused."""

from __future__ import annotations

import base64
import random
from pathlib import Path

import pytest
from transformers.convert_slow_tokenizer import TikTokenConverter

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.readers.surroundings import tokenizer_at
from checkpoint.text import tiktoken_file
from checkpoint.text.tokenizer import Tokenizer, read_tokenizer
from checkpoint.text.vocabulary import id_of, tokenizer_vocab_size
from finetune.data.tokenizer import copy_tokenizer, open_tokenizer
from tests.support.models import tokenizer

TEXT = "The quick brown fox's naïve café\n\n  def f(x1234):\treturn 'I'LL'   日本語 🙂  <|eot_id|>x<|begin_of_text|> \r\n"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every byte, and what a small tokenizer joins, in its order."""
    letters = {letter: byte for byte, letter in enumerate(tiktoken_file._spelled_bytes())}
    vocab = sorted(tokenizer().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    joined = [bytes(letters[letter] for letter in piece) for piece, _ in vocab if len(piece) > 1 and set(piece) <= set(letters)]
    shuffled = [bytes([byte]) for byte in range(256)]
    random.Random(3).shuffle(shuffled)
    monkeypatch.setattr(tiktoken_file, "LLAMA_3_TOKENS", 256 + len(joined))
    return shuffled + joined


def write(path: Path, ranks: list[bytes]) -> Path:
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(ranks)))
    return path


def opened(folder: Folder) -> Tokenizer:
    made = read_tokenizer(folder, "llama")
    assert made is not None
    return made


def test_it_has_the_ids_of_transformers_converter(tmp_path: Path, ranks: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "tokenizer.model", ranks)
    found = opened(Folder(tmp_path))
    monkeypatch.setattr(TikTokenConverter, "load_tiktoken_bpe", staticmethod(lambda _: {t: r for r, t in enumerate(ranks)}))
    want = TikTokenConverter(vocab_file="", extra_special_tokens=tiktoken_file._special_tokens()).converted()
    draw = random.Random(1)
    texts = [TEXT, *("".join(draw.choices(TEXT, k=40)) for _ in range(200))]
    for text in texts:
        ids = found.encode(text)
        assert ids[0] == len(ranks) == found.backend.token_to_id("<|begin_of_text|>")
        assert list(ids[1:]) == want.encode(text).ids
        assert found.decode(ids, skip_special_tokens=False) == "<|begin_of_text|>" + text
    assert found.end_of_text_id == len(ranks) + 1
    assert found.num_ids == len(ranks) + 256
    assert tokenizer_vocab_size(Folder(tmp_path)) == ("tokenizer.model", len(ranks) + 256)
    assert id_of(Folder(tmp_path), "<|eot_id|>") == len(ranks) + 9
    assert id_of(Folder(tmp_path), "<|nothing|>") is None


def test_a_run_that_trains_with_it_writes_a_tokenizer_json_of_the_same_ids(tmp_path: Path, ranks: list[bytes]) -> None:
    (tmp_path / "source").mkdir()
    write(tmp_path / "source" / "tokenizer.model", ranks)
    copy_tokenizer(tmp_path / "source", tmp_path / "copy", "tokenizer.path")
    assert (tmp_path / "copy" / "tokenizer.json").is_file()
    assert open_tokenizer(tmp_path / "copy").encode(TEXT) == opened(Folder(tmp_path / "source")).encode(TEXT)


def test_it_may_have_any_name_where_it_is_given(tmp_path: Path, ranks: list[bytes]) -> None:
    path = write(tmp_path / "llama3.tiktoken", ranks)
    assert opened(tokenizer_at(str(path))).num_ids == len(ranks) + 256


def test_the_special_tokens_are_256_and_those_that_are_known_have_their_places() -> None:
    found = tiktoken_file._special_tokens()
    assert len(set(found)) == 256
    assert found[:12] == [
        "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
        "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|reserved_special_token_3|>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda ranks: ranks[:-1], "does not say how texts are cut into words"),
        (lambda ranks: [*ranks[:-1], ranks[0]], "a token twice"),
        (lambda ranks: [*ranks[:9], b"twoo", *ranks[10:]], "not every byte"),
    ],
)
def test_another_vocabulary_is_refused_by_file_and_rule(tmp_path: Path, ranks: list[bytes], change: object, rule: str) -> None:
    assert callable(change)
    write(tmp_path / "tokenizer.model", change(ranks))
    for read in (opened, tokenizer_vocab_size):
        with pytest.raises(CheckpointError, match=rule) as caught:
            read(Folder(tmp_path))
        assert caught.value.file == "tokenizer.model"


@pytest.mark.parametrize("line", [b"IQ== 300", b"IQ==", b"I! 256", b"IQ=== 256", b"IQ== -1", b""])
def test_a_line_that_is_no_token_with_its_rank_is_named(tmp_path: Path, ranks: list[bytes], line: bytes) -> None:
    path = write(tmp_path / "tokenizer.model", ranks)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:256], line, *lines[257:]]))
    with pytest.raises(CheckpointError, match="line 257"):
        opened(Folder(tmp_path))
