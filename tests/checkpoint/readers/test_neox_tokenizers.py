"""The tokenizers of GPT-NeoX's kinds are found by what the settings name, and say how many rows have a token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from checkpoint import Given, open_structure
from checkpoint.text.tokenizer import Tokenizer, read_tokenizer
from finetune.data.tokenizer import open_tokenizer, usual_folder
from tests.checkpoint.readers.test_neox import saved
from tests.checkpoint.text.test_sentencepiece import random_texts, trained
from tests.support.models import build, tokenizer
from tests.support.neox import Form, save_neox


def opened(root: Path, **given: str) -> tuple[Tokenizer, dict[str, Any]]:
    with open_structure(root, given=Given(**given)) as structure:
        found = read_tokenizer(structure.tokenizer)
        assert found is not None
        return found, dict(structure.config)


@pytest.mark.parametrize("where", ["beside the weights", "above them", "given"])
@pytest.mark.parametrize("ends", ["<|endoftext|>", "nothing"])
def test_a_sentencepiece_model_is_found_by_the_name_the_settings_give(ends: str, where: str, tmp_path: Path) -> None:
    symbols = {"user_defined_symbols": "[sym],ab,<|endoftext|>"} if ends == "<|endoftext|>" else {}
    data = trained("bpe of bytes, as Llama's", **symbols)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=data)
    _, folder = saved_with_rows(tmp_path, 512, **{"tokenizer-type": "SPMTokenizer", "vocab-file": "/x/pile.model"})
    place = {"beside the weights": folder, "above them": tmp_path, "given": tmp_path / "other"}[where]
    place.mkdir(exist_ok=True)
    (place / "pile.model").write_bytes(data)
    found, config = opened(tmp_path, **({"tokenizer": str(place / "pile.model")} if where == "given" else {}))
    for text in [*random_texts(50), "one<|endoftext|>two"]:
        assert list(found.encode(text)) == theirs.encode(text), text
    assert config["vocab_size"] == theirs.get_piece_size() < 512
    assert config["eos_token_id"] == theirs.piece_to_id("<|endoftext|>")


def saved_with_rows(root: Path, rows: int, **settings: Any) -> tuple[object, Path]:
    model = build("gpt_neox", vocab_size=rows, hidden_size=32, num_hidden_layers=1)
    return model, save_neox(root, model, Form(model_parallel=2), **{"make-vocab-size-divisible-by": 128, **settings})


def test_a_token_of_the_tokenizer_of_characters_is_a_byte(tmp_path: Path) -> None:
    saved_with_rows(tmp_path, 512, **{"tokenizer-type": "CharLevelTokenizer"})
    with open_structure(tmp_path) as structure:
        found = read_tokenizer(structure.tokenizer)
        written = open_tokenizer(usual_folder(structure.tokenizer, "model.path"))
        assert structure.config["vocab_size"] == 512
        assert structure.config["eos_token_id"] == 0
    assert found is not None
    for text in ["", "naïve Ā ŀ 日本語 \x00 and \x01\n", *random_texts(100)]:
        text = text.replace("<|endoftext|>", "")
        ids = list(text.encode())
        assert list(found.encode(text)) == list(written.encode(text)) == ids
        assert found.decode([number for number in ids if number]) == text.replace("\0", "")
    assert found.end_of_text_id == written.end_of_text_id == 0


@pytest.mark.parametrize("above", [False, True])
def test_a_folder_of_transformers_is_found_by_its_last_name(above: bool, tmp_path: Path) -> None:
    _, folder = saved(tmp_path, **{"tokenizer-type": "HFGPT2Tokenizer", "vocab-file": "/models/our-gpt2/"})
    place = (tmp_path if above else folder) / "our-gpt2"
    place.mkdir()
    tokenizer().save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    found, config = opened(tmp_path)
    text = "the lazy dog<|endoftext|>"
    assert list(found.encode(text)) == tokenizer().encode(text).ids
    assert config["vocab_size"] == tokenizer().get_vocab_size()


def test_the_padding_token_that_its_trainer_adds_counts_as_one_of_the_tokenizers(tmp_path: Path) -> None:
    count = tokenizer().get_vocab_size()
    model = build("gpt_neox", vocab_size=2 * count, hidden_size=32, num_hidden_layers=1)  # where one more fills up again
    form = Form(model_parallel=2, multiple=count // 2)
    save_neox(tmp_path, model, form, **{"tokenizer-type": "HFGPT2Tokenizer", "vocab-file": "/models/our-gpt2"})
    (tmp_path / "our-gpt2").mkdir()
    tokenizer().save(str(tmp_path / "our-gpt2" / "tokenizer.json"))
    assert opened(tmp_path)[1]["vocab_size"] == count


@pytest.mark.parametrize("above", [False, True])
def test_the_folder_that_the_converter_of_llama_writes_is_found(above: bool, tmp_path: Path) -> None:
    model, folder = saved(tmp_path, "heads that share keys")
    shutil.rmtree(folder / "configs")
    place = (tmp_path if above else folder) / "tokenizer"
    place.mkdir()
    tokenizer().save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    assert list(opened(tmp_path)[0].encode("the lazy dog")) == tokenizer().encode("the lazy dog").ids
