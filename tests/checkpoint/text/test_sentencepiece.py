"""SentencePiece models give the ids of the sentencepiece library, and, in folders of transformers' class, those of it."""

from __future__ import annotations

import io
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.text.tokenizer import read_tokenizer
from checkpoint.text.vocabulary import id_of, tokenizer_vocab_size
from finetune.data.tokenizer import copy_tokenizer, open_tokenizer
from serve.text.pieces import Kind, decoder_kind
from tests.checkpoint.folders import flip_bit
from tests.support.tokenizers import CORPUS, write

WORDS = ["the", "of", "naïve", "Straße", "日本語", "привет", "def", "return", "ﬁne", "x1", "aaab", "aaaa", "ab"]
PLAIN = {"normalization_rule_name": "identity"}
BYTES = {**PLAIN, "byte_fallback": True, "vocab_size": 420}
KINDS: dict[str, dict[str, Any]] = {
    "bpe of bytes, as Llama's": {"model_type": "bpe", "remove_extra_whitespaces": False, **BYTES},
    "bpe": {"model_type": "bpe", "vocab_size": 150, **PLAIN},
    "bpe without a first space": {"model_type": "bpe", "vocab_size": 150, "add_dummy_prefix": False, **PLAIN},
    "bpe with symbols": {"model_type": "bpe", "user_defined_symbols": ["[sym]", "ab", "<|endoftext|>", "a"], **BYTES},
    "bpe with spaces as symbols": {
        "model_type": "bpe",
        "remove_extra_whitespaces": False,
        **BYTES,
        "user_defined_symbols": ["▁▁", "the▁of", "\n"],
    },
    "bpe in one form of Unicode": {"model_type": "bpe", "vocab_size": 150},
    "bpe in one form of Unicode, with all spaces": {"model_type": "bpe", "remove_extra_whitespaces": False, "vocab_size": 150},
    "unigram": {"model_type": "unigram", "vocab_size": 110, **PLAIN},
    "unigram of bytes": {"model_type": "unigram", **BYTES, "vocab_size": 370},
    "unigram with symbols": {"model_type": "unigram", "user_defined_symbols": ["[sym]", "ab"], **BYTES, "vocab_size": 370},
    "unigram in one form of Unicode": {"model_type": "unigram", "vocab_size": 110},
    "characters": {"model_type": "char", "vocab_size": 100, **PLAIN},
}


@cache
def trained(kind: str, **changes: Any) -> bytes:
    """A model of that kind, trained on a few hundred lines of words."""
    draw, model = random.Random(1), io.BytesIO()
    lines = [*CORPUS, *(" ".join(draw.choice(WORDS) for _ in range(12)) for _ in range(300))]
    settings = {**KINDS[kind], **changes}
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(lines), model_writer=model, minloglevel=2, hard_vocab_limit=False, **settings)
    return model.getvalue()


def random_texts(count: int) -> list[str]:
    """Words, spaces, signs that mean something to a tokenizer, and characters from all over Unicode."""
    draw = random.Random(2)
    signs = [
        " ",
        "  ",
        "▁",
        "\n",
        "\r\n",
        "\r",
        "\t",
        "\u00a0",
        "\u3000",
        "<0x0A>",
        "[sym]",
        "e\u0301",
        "a" * 7,
        "<|endoftext|>",
    ]

    def part() -> str:
        choice = draw.random()
        if choice < 0.5:
            return draw.choice(WORDS if choice < 0.3 else signs)
        number = draw.randrange(32, 0x250 if choice < 0.8 else 0x30000)
        # What combines is left out: where one is beyond six bytes, it is put together with what is before it by one of the two.
        return "" if 0xD800 <= number < 0xE000 or 0x300 <= number < 0x370 or 0x1100 <= number < 0x1200 else chr(number)

    return ["", " ", "▁", *("".join(part() for _ in range(draw.randrange(20))) for _ in range(count))]


def folder_of(root: Path, kind: str, **changes: Any) -> Folder:
    root.mkdir(parents=True, exist_ok=True)
    (root / "tokenizer.model").write_bytes(trained(kind, **changes))
    return Folder(root)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_text_equal_those_of_sentencepiece(kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, kind)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=trained(kind)), read_tokenizer(folder)
    assert ours is not None
    assert tokenizer_vocab_size(folder) == ("tokenizer.model", theirs.get_piece_size())
    assert decoder_kind(ours.backend)[0] is Kind.BYTE_FALLBACK, "it streams without decoding all that was before"
    for text in random_texts(500):
        if "Unicode" in kind and any(ord(letter) >= 0x300 and not letter.isalnum() for letter in text):
            continue  # marks of other scripts
        ids = theirs.encode(text)
        assert list(ours.encode(text, add_special_tokens=False)) == ids, text
        if theirs.unk_id() not in ids and "▁" not in text:
            assert ours.decode(ids) == theirs.decode(ids), text


@pytest.mark.parametrize(
    "named",
    [
        {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": True},
        {"add_bos_token": True, "legacy": False},
        {"add_bos_token": False, "add_eos_token": True},
        {},
    ],
)
def test_in_a_folder_of_llamas_class_ids_equal_those_of_transformers(named: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "bpe of bytes, as Llama's")
    write(tmp_path, "config.json", {"model_type": "llama"})
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **named})
    size = sentencepiece.SentencePieceProcessor(model_proto=trained("bpe of bytes, as Llama's")).get_piece_size()
    write(tmp_path, "added_tokens.json", {"<pad>": size, "[new]": size + 1})
    theirs, ours = AutoTokenizer.from_pretrained(str(tmp_path)), read_tokenizer(folder)
    assert ours is not None
    assert ours.num_ids == size + 2
    for text in [*random_texts(100), "the[new]of <pad> <s>of</s> the"]:
        ids = theirs(text).input_ids
        assert list(ours.encode(text)) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    assert ours.end_of_text_id == theirs.eos_token_id


def test_a_mistral_folder_has_the_ids_of_its_model_and_the_beginning_its_settings_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "bpe of bytes, as Llama's")
    write(tmp_path, "config.json", {"model_type": "mistral"})
    write(tmp_path, "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True})
    theirs, ours = sentencepiece.SentencePieceProcessor(model_proto=trained("bpe of bytes, as Llama's")), read_tokenizer(folder)
    assert ours is not None
    for text in random_texts(50):
        assert list(ours.encode(text)) == [theirs.bos_id(), *theirs.encode(text)], text


def test_a_run_takes_such_a_tokenizer_as_one_file_of_the_same_ids(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "unigram with symbols")
    copy_tokenizer(folder.path, tmp_path / "copy", "model.path")
    assert not (tmp_path / "copy" / "tokenizer.model").exists()
    ours, copied = read_tokenizer(folder), open_tokenizer(tmp_path / "copy")
    assert ours is not None
    for text in random_texts(50):
        assert copied.encode(text) == ours.encode(text), text
    assert copied.end_of_text_id == ours.end_of_text_id == id_of(folder, "</s>")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "word"}, "of kind WORD"),
        ({"treat_whitespace_as_suffix": True}, "with treat_whitespace_as_suffix"),
        ({"user_defined_symbols": ["a▁b"]}, "the user-defined symbol 'a▁b', and removes spaces"),
        ({"user_defined_symbols": ["ﬁ"], "normalization_rule_name": "nfkc"}, "'ﬁ', which its own normalisation changes"),
    ],
)
def test_what_has_no_equal_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(_trained_with(changes))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: .*{message}"):
        read_tokenizer(Folder(tmp_path))


def _trained_with(changes: dict[str, Any]) -> bytes:
    model = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 150, **PLAIN, **changes}
    trainer = sentencepiece.SentencePieceTrainer
    lines = iter(CORPUS * 20)
    trainer.train(sentence_iterator=lines, model_writer=model, minloglevel=2, hard_vocab_limit=False, **settings)
    return model.getvalue()


def test_a_file_with_flipped_bits_is_refused_or_opens(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "whole", "bpe of bytes, as Llama's")
    draw, refused = random.Random(3), set()
    for number in range(150):
        copy = tmp_path / str(number)
        shutil.copytree(source.path, copy)
        for _ in range(3):
            flip_bit(copy / "tokenizer.model", draw.randrange(600), draw.randrange(8))
        try:
            read_tokenizer(Folder(copy))
        except CheckpointError as error:
            refused.add(error.file)
    assert refused == {"tokenizer.model"}
