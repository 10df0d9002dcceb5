from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoint import CheckpointError
from checkpoint.disk.folder import Folder
from checkpoint.text.tokenizer import Tokenizer, read_tokenizer
from tests.support.tokenizers import FOLDERS, TEXTS, make_folder, write

# Where transformers gives a special token an id past the vocabulary, for which the model has no row, Tessera reads it as text.
INVENTED = {"<|endoftext|>"}


def opened(path: Path) -> Tokenizer | None:
    """The tokenizer of a folder, its chat template compiled."""
    tokenizer = read_tokenizer(Folder(path))
    if tokenizer is not None:
        _ = tokenizer.chat
    return tokenizer


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_folder(name, tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(str(folder)), opened(folder)
    assert ours is not None
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
    assert opened(tmp_path) is None


def test_a_sentencepiece_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is no SentencePiece model"):
        opened(tmp_path)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        opened(tmp_path)


def test_a_broken_merges_line_is_named(tmp_path: Path) -> None:
    folder = make_folder("gpt2_files", tmp_path)
    with (folder / "merges.txt").open("a") as file:
        file.write("one two three\n")
    with pytest.raises(CheckpointError, match=r"merges\.txt: line \d+"):
        opened(folder)


def test_a_declared_token_with_an_impossible_id_is_named(tmp_path: Path) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<new>"}}})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: gives '<new>' the id 9999"):
        opened(folder)


BROKEN: dict[str, tuple[str, str | bytes]] = {
    "added_tokens_decoder is a list": ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
    "an id that is no number": ("tokenizer_config.json", '{"added_tokens_decoder": {"one": {"content": "x"}}}'),
    "a token without content": ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {}}}'),
    "a token that is a number": ("tokenizer_config.json", '{"added_tokens_decoder": {"1": 5}}'),
    "a flag that is a text": ("tokenizer_config.json", '{"added_tokens_decoder": {"1": {"content": "x", "special": "no"}}}'),
    "a special token that is a number": ("tokenizer_config.json", '{"eos_token": 5}'),
    "a class that is a list": ("tokenizer_config.json", '{"tokenizer_class": ["GPT2Tokenizer"]}'),
    "half a surrogate pair": ("tokenizer_config.json", r'{"eos_token": "\ud83d"}'),
    "deep JSON": ("tokenizer_config.json", '{"a": ' + "[" * 200 + "]" * 200 + "}"),
    "deeper JSON": ("tokenizer.json", '{"a": ' + "[" * 200_000 + "]" * 200_000 + "}"),
    "a map that is a list": ("special_tokens_map.json", "[]"),
    "a template that is no UTF-8": ("chat_template.jinja", b"{{ messages }}\xff"),
    "a template that is a number": ("tokenizer_config.json", '{"chat_template": 5}'),
    "templates that are numbers": ("tokenizer_config.json", '{"chat_template": [5]}'),
    "a template among several that is a list": (
        "tokenizer_config.json",
        '{"chat_template": [{"name": "default", "template": []}]}',
    ),
    "a template that does not compile": ("chat_template.jinja", "{% if %}"),
    "a template of four megabytes": ("chat_template.jinja", "x" * (4 << 20)),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_refused_by_its_name(tmp_path: Path, fault: str) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    file, content = BROKEN[fault]
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=rf"^{file}: "):
        opened(folder)


@pytest.mark.parametrize("content", [b"\xff \xfe\n", b"a\n", b"nowhere known\n"])
def test_broken_merges_are_refused_by_their_name(tmp_path: Path, content: bytes) -> None:
    folder = make_folder("gpt2_files", tmp_path)
    (folder / "merges.txt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"^merges\.txt: "):
        opened(folder)


@pytest.mark.parametrize("ids", [-1, 1.5, "one", 1 << 40, None])
def test_ids_of_an_old_vocabulary_are_ids(tmp_path: Path, ids: object) -> None:
    folder = make_folder("gpt2_files", tmp_path)
    write(folder, "vocab.json", {"a": ids})
    with pytest.raises(CheckpointError, match=r"^vocab\.json: .* id"):
        opened(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=rf"^{name}: is a link that leaves"):
        opened(folder)


def test_a_tokenizer_that_puts_unknown_ids_around_every_text_says_so_by_its_largest_id(tmp_path: Path) -> None:
    folder = make_folder("llama3", tmp_path)
    text = (folder / "tokenizer.json").read_text()
    assert '"ids":[0]' in text.replace(" ", "").replace("\n", "")
    content = json.loads(text)
    content["post_processor"]["special_tokens"]["<|begin_of_text|>"]["ids"] = [70_000]
    write(folder, "tokenizer.json", content)
    tokenizer = opened(folder)
    assert tokenizer is not None
    assert tokenizer.largest_id == 70_000


def test_truncation_saved_in_the_file_is_not_applied(tmp_path: Path) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    first = opened(folder)
    assert first is not None
    first.backend.enable_truncation(4)
    first.backend.save(str(folder / "tokenizer.json"))
    again = opened(folder)
    assert again is not None
    assert len(again.encode("a b c d e f g h")) > 4


@pytest.mark.parametrize(
    ("name", "leading", "prepends"),
    [("gpt_neox", (), False), ("gptj_prefix_space", (), True), ("llama", (1,), True), ("llama3", (0,), False)],
)
def test_what_is_put_before_a_text_is_known(tmp_path: Path, name: str, leading: tuple[int, ...], prepends: bool) -> None:
    tokenizer = opened(make_folder(name, tmp_path))
    assert tokenizer is not None
    assert (tokenizer.leading_ids, tokenizer.prepends_space) == (leading, prepends)


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, ("<|endoftext|>", "<|endoftext|>")),
        ({"eos_token": "<|padding|>"}, ("<|padding|>", "<|padding|>")),
        ({"eos_token": {"content": "<|padding|>"}}, ("<|padding|>", "<|padding|>")),
        ({"eos_token": "<none>"}, ("<none>", "<|endoftext|>")),
    ],
)
def test_the_token_that_ends_a_text_is_the_named_one_or_one_that_is_known(
    tmp_path: Path, named: dict[str, object], expected: tuple[str, str]
) -> None:
    folder = make_folder("gpt_neox", tmp_path)
    write(folder, "tokenizer_config.json", named)
    (folder / "config.json").unlink()
    tokenizer = opened(folder)
    assert tokenizer is not None
    assert tokenizer.end_of_text_id is not None
    ends = tokenizer.backend.id_to_token(tokenizer.end_of_text_id)
    assert (tokenizer.special_tokens["eos_token"], ends) == expected


def test_a_vocabulary_may_have_no_token_that_ends_a_text(tmp_path: Path) -> None:
    folder = make_folder("wordpiece", tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tokenizer = opened(folder)
    assert tokenizer is not None
    assert tokenizer.end_of_text_id is None
    assert "eos_token" not in tokenizer.special_tokens


def test_every_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_bytes = Folder.read_bytes

    def noted(self: Folder, name: str, **limit: int) -> bytes:
        read.append(name)
        return read_bytes(self, name, **limit)

    monkeypatch.setattr(Folder, "read_bytes", noted)
    opened(make_folder("gpt_neox", tmp_path))
    assert read.count("tokenizer.json") == 1
    assert len(read) == len(set(read)), read
