"""Tokens on disk: documents joined by the end token, split once, cut without padding, in an order any step can find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.load import load_config
from finetune.data.pack import SampleOrder, Share
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows import JoinedRows, open_rows
from finetune.data.tokenizer import copy_tokenizer, end_of_text_id, open_tokenizer, set_class
from finetune.errors import ConfigError, DataError
from tests.finetune.support import small_run, write_config, write_text_folder
from tests.support.tokenizers import FOLDERS, TEXTS, make_folder, write


def prepared(tmp_path: Path, text: Path, **sections: object) -> Prepared:
    config = load_config(write_config(small_run(text, tmp_path / "run", **sections), tmp_path / "run.yaml"))  # type: ignore[arg-type]
    return prepare(config, lambda _: None)


def tokens_of(made: Prepared, side: Literal["train", "eval"]) -> list[int]:
    rows = open_rows(made, side)
    assert isinstance(rows, JoinedRows)
    return rows.stream(0, rows.num_tokens)[0].tolist()


def test_text_comes_back_from_its_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    documents = ["def a():\n    return 'é 😀'\n" * 20, "\tb = 1\r\n" * 30]
    for number, text in enumerate(documents):
        (folder / f"{number}.py").write_text(text, encoding="utf-8", newline="")
    made = prepared(tmp_path, folder, data={"train": str(folder), "pattern": "*.py", "seq_len": 8, "eval_fraction": 0})
    tokenizer = open_tokenizer(made.tokenizer_folder)
    end = end_of_text_id(made.tokenizer_folder, tokenizer)
    ids = tokens_of(made, "train")
    assert ids.count(end) == 2
    assert ids[-1] == end
    first = ids.index(end)
    assert [tokenizer.decode(ids[:first]), tokenizer.decode(ids[first + 1 : -1])] == documents
    assert (made.documents, made.eval_tokens, made.train_tokens) == (2, 0, len(ids))


def test_the_trained_tokenizer_opens_in_transformers_and_agrees(tmp_path: Path, text_folder: Path) -> None:
    from transformers import AutoTokenizer

    made = prepared(tmp_path, text_folder)
    ours = open_tokenizer(made.tokenizer_folder)
    theirs = AutoTokenizer.from_pretrained(made.tokenizer_folder)
    text = "def get_path(value):\n    return self.items.total  # naïve 😀"
    assert theirs(text)["input_ids"] == list(ours.encode(text))
    assert theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token == "<|endoftext|>"
    assert theirs.eos_token_id == made.end_of_text_id
    assert made.num_ids == len(theirs) <= 300


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", b'{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", b'{"eos_token": 5}'),
        ("special_tokens_map.json", b"[]"),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer.json", b'{"a": ' + b"[" * 200_000),
    ],
)
def test_a_broken_tokenizer_file_is_refused_as_the_server_refuses_it(tmp_path: Path, file: str, content: bytes) -> None:
    source = make_folder("gpt_neox", tmp_path)
    (source / file).write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^model\.path: {source}: {file}: "):
        copy_tokenizer(source, tmp_path / "copy", "model.path")
    (source / file).unlink()
    (tmp_path / "elsewhere").write_bytes(b"{}")
    (source / file).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="leaves the checkpoint's folder"):
        copy_tokenizer(source, tmp_path / "copy", "model.path")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_given_tokenizer_gives_the_ids_of_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = make_folder(name, tmp_path)
    copy_tokenizer(source, tmp_path / "copy", "tokenizer.path")
    set_class(tmp_path / "copy", json.loads((source / "config.json").read_text())["model_type"], "tokenizer.path")
    ours, theirs = open_tokenizer(tmp_path / "copy"), AutoTokenizer.from_pretrained(source)
    compared = [text for text in TEXTS if "<|endoftext|>" not in text]
    assert len(compared) > len(TEXTS) / 2
    for text in compared:
        assert list(ours.encode(text)) == theirs(text)["input_ids"], text
        plain = list(ours.encode(text, add_special_tokens=False))
        assert plain == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(plain) == theirs.decode(plain, skip_special_tokens=True, clean_up_tokenization_spaces=False), text


@pytest.mark.parametrize(
    ("kind", "class_name"),
    [("llama", "GemmaTokenizer"), ("wordpiece", "BertTokenizer"), ("gpt_neox_class", "RobertaTokenizer")],
)
def test_a_copy_holds_the_pipeline_of_a_class_that_the_reader_does_not_know(kind: str, class_name: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = make_folder(kind, tmp_path)
    (source / "config.json").unlink()
    config = json.loads((source / "tokenizer_config.json").read_text())
    write(source, "tokenizer_config.json", {**config, "tokenizer_class": class_name})
    copy_tokenizer(source, tmp_path / "copy", "tokenizer.path")
    text = "Hello World, naïve 123  times"
    theirs = AutoTokenizer.from_pretrained(source)(text)["input_ids"]
    assert list(open_tokenizer(tmp_path / "copy").encode(text)) == theirs
    assert list(open_tokenizer(source).encode(text)) != theirs, "why copies are settled by transformers"


def test_a_copied_tokenizer_names_its_class(tmp_path: Path) -> None:
    """Without it, the class would follow from the model that the copy is saved with."""
    silent = make_folder("gpt_neox_silent", tmp_path)

    def named(copy: Path) -> str:
        copy_tokenizer(silent, copy, "tokenizer.path")
        return str(json.loads((copy / "tokenizer_config.json").read_text())["tokenizer_class"])

    assert named(tmp_path / "of a known model") == "GPTNeoXTokenizer"
    (silent / "config.json").unlink()
    assert named(tmp_path / "of no model") == "PreTrainedTokenizerFast", "which takes the file as it is"


def test_preparing_again_finds_the_files_and_a_changed_text_makes_new_ones(tmp_path: Path) -> None:
    folder = write_text_folder(tmp_path / "text")
    first = prepared(tmp_path, folder)
    ids = Path(first.shards[0]) / "ids.bin"
    stamp = ids.stat().st_mtime_ns
    assert prepared(tmp_path, folder) == first
    assert ids.stat().st_mtime_ns == stamp
    (folder / "module_0.py").write_text("x = 1\n" * 50)
    assert prepared(tmp_path, folder).fingerprint != first.fingerprint
    assert not list((tmp_path / "run" / "data").rglob("*tmp-*"))


def test_the_split_holds_out_its_share_and_loses_nothing(tmp_path: Path, text_folder: Path) -> None:
    whole = prepared(tmp_path / "a", text_folder) if (tmp_path / "a").mkdir() is None else None
    assert whole is not None
    total = whole.train_tokens + whole.eval_tokens
    assert whole.eval_tokens == round(0.1 * total)
    sections = {"data": {"train": str(text_folder), "pattern": "*.py", "seq_len": 32, "eval_fraction": 0}}
    (tmp_path / "b").mkdir()
    unsplit = prepared(tmp_path / "b", text_folder, **sections)
    parts = tokens_of(whole, "train") + tokens_of(whole, "eval")
    assert sorted(parts) == sorted(tokens_of(unsplit, "train"))


def test_one_single_document_is_split_too(tmp_path: Path) -> None:
    folder = write_text_folder(tmp_path / "text", files=1, lines=400)
    made = prepared(tmp_path, folder)
    train, held_out = tokens_of(made, "train"), tokens_of(made, "eval")
    assert len(held_out) == round(0.1 * (len(train) + len(held_out)))
    assert held_out[-1] == made.end_of_text_id
    assert made.end_of_text_id not in train


def test_evaluation_files_of_their_own(tmp_path: Path, text_folder: Path) -> None:
    other = write_text_folder(tmp_path / "other", files=1)
    sections = {"data": {"train": str(text_folder), "eval": str(other), "pattern": "*.py", "seq_len": 32}}
    made = prepared(tmp_path, text_folder, **sections)
    tokenizer = open_tokenizer(made.tokenizer_folder)
    assert tokenizer.decode(tokens_of(made, "eval")[:-1]) == (other / "module_0.py").read_text()


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.py").write_text("x = 1")
    with pytest.raises(DataError, match=r"data\.seq_len is 32; the training text has \d+ tokens"):
        prepared(tmp_path, folder)


def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, text_folder: Path) -> None:
    bad = tmp_path / "tokenizer"
    bad.mkdir()
    (bad / "tokenizer.json").write_text(json.dumps({"model": 5}))
    tree = small_run(text_folder, tmp_path / "run")
    tree["tokenizer"] = {"path": str(bad)}
    with pytest.raises(ConfigError, match=r"tokenizer\.json: is not what the tokenizers library can use"):
        prepare(load_config(write_config(tree, tmp_path / "run.yaml")), lambda _: None)


@given(st.integers(1, 40), st.integers(0, 3), st.integers(0, 100), st.integers(1, 50))
def test_each_pass_is_a_shuffle_of_all_samples_wherever_it_is_entered(samples: int, seed: int, first: int, count: int) -> None:
    order = SampleOrder(samples, seed)
    every = order.at(0, 4 * samples + 150)
    assert (order.at(first, count) == every[first : first + count]).all()
    for number in range(4):
        assert sorted(every[number * samples : (number + 1) * samples]) == list(range(samples))


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.integers(0, 5))
def test_a_step_takes_the_same_samples_on_any_number_of_ranks(ranks: int, micro: int, step: int) -> None:
    total = 12 * micro
    taken: list[int] = []
    for rank in range(ranks):
        share = Share(rank, ranks, micro, total // (ranks * micro))
        assert share.step_samples == total
        for position in share.positions(step * total):
            taken += range(position, position + micro)
    assert sorted(taken) == list(range(step * total, (step + 1) * total))
