from __future__ import annotations

from pathlib import Path

import pytest

from serve.errors import ConfigError
from serve.text.tokenizer import PIECE_CHARACTERS, Tokenizer, load_tokenizer
from tests.serve.text.folders import FOLDERS, TEXTS, make_folder, write

# Where transformers gives a special token an id past the vocabulary, for which the model has no row, Tessera reads it as text.
INVENTED = {"<|endoftext|>"}


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_equal_those_of_transformers(name: str, folders: dict[str, Path], tokenizers: dict[str, Tokenizer]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folders[name]))
    ours = tokenizers[name]
    invented = {token for token in INVENTED if theirs.get_vocab().get(token, 0) >= ours.vocab_size}
    compared = [text for text in TEXTS if not any(token in text for token in invented)]
    assert len(compared) > len(TEXTS) / 2
    for text in compared:
        assert list(ours.encode(text)) == theirs(text).input_ids, text
        plain = theirs(text, add_special_tokens=False).input_ids
        assert list(ours.encode(text, add_special_tokens=False)) == plain, text
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False), text


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "gpt2"})
    assert load_tokenizer(tmp_path) is None


def test_a_sentencepiece_file_alone_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ConfigError, match=r"tokenizer\.model.*save_pretrained"):
        load_tokenizer(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_broken_merges_line_is_named(tmp_path: Path) -> None:
    folder = make_folder("gpt2_files", tmp_path)
    with (folder / "merges.txt").open("a") as file:
        file.write("one two three\n")
    with pytest.raises(ConfigError, match=r"merges\.txt, line \d+"):
        load_tokenizer(folder)


def test_a_declared_token_with_an_impossible_id_is_named(tmp_path: Path) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<new>"}}})
    with pytest.raises(ConfigError, match=r"'<new>' the id 9999"):
        load_tokenizer(folder)


def test_truncation_saved_in_the_file_is_not_applied(tmp_path: Path) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    first = load_tokenizer(folder)
    assert first is not None
    first.backend.enable_truncation(4)
    first.backend.save(str(folder / "tokenizer.json"))
    again = load_tokenizer(folder)
    assert again is not None
    assert len(again.encode("a b c d e f g h")) > 4


@pytest.mark.parametrize("name", FOLDERS)
def test_a_long_text_is_too_long_only_when_it_is(name: str, tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers[name]
    for text in ("".join(TEXTS), "a"):
        long = text * (PIECE_CHARACTERS // len(text) + 50)
        num_tokens = len(tokenizer.encode(long))
        assert not tokenizer.exceeds(long, num_tokens), text
        assert num_tokens < 2000 or tokenizer.exceeds(long, num_tokens // 2), text
