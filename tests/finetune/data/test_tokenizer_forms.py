"""A tokenizer of any form that is read is one to train with, and is told from every other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint.disk.folder import Folder
from checkpoint.text.tokenizer import Tokenizer, read_tokenizer
from finetune.config import TuneConfig
from finetune.config.load import load_config
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows import JoinedRows, open_rows
from finetune.errors import ConfigError
from finetune.forecast.estimate import model_config_of
from tests.checkpoint.text.test_sentencepiece import trained
from tests.finetune.support import small_run, write_config
from tests.support.models import tokenizer

TEXT = "the old naïve fox returns x1 to def the of a\n"


def sentencepiece(folder: Path, number: int) -> Path:
    folder.mkdir()
    model = trained(("bpe of bytes, as Llama's", "unigram of bytes")[number])
    (folder / "tokenizer.model").write_bytes(model)
    return folder


def pairs(folder: Path, number: int) -> Path:
    """Vocabulary and merges as GPT-2 has them, the last merges left out of one."""
    folder.mkdir()
    model = json.loads(tokenizer().to_str())["model"]
    merges = model["merges"][: len(model["merges"]) // (1 + number)]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("".join(" ".join(merge) + "\n" for merge in merges))
    return folder


def run_with(root: Path, tokenizer_path: Path) -> TuneConfig:
    (root / "text").mkdir(exist_ok=True)
    (root / "text" / "a.txt").write_text(TEXT * 20)
    data = {"train": str(root / "text"), "pattern": "*.txt", "seq_len": 8, "eval_fraction": 0, "folder": str(root / "data")}
    tree: dict[str, Any] = small_run(root / "text", root / "run", data=data)
    tree |= {"model": {"new": {"model_type": "llama"}}, "tokenizer": {"path": str(tokenizer_path)}}
    return load_config(write_config(tree, root / "run.yaml"))


def ids_of(made: Prepared) -> list[int]:
    rows = open_rows(made, "train")
    assert isinstance(rows, JoinedRows)
    return rows.stream(0, rows.num_tokens)[0].tolist()


def opened(folder: Path) -> Tokenizer:
    found = read_tokenizer(Folder(folder))
    assert found is not None
    return found


@pytest.mark.parametrize("form", [sentencepiece, pairs])
def test_a_folder_of_another_tokenizer_makes_other_data(form: Callable[[Path, int], Path], tmp_path: Path) -> None:
    for number in range(2):
        folder = form(tmp_path / str(number), number)
        found = opened(folder)
        made = prepare(run_with(tmp_path, folder), lambda _: None)
        text = [*found.encode(TEXT * 20, add_special_tokens=False), made.end_of_text_id]
        assert ids_of(made) == text
        assert model_config_of(run_with(tmp_path, folder), weights=False).vocab_size >= found.num_ids


def test_the_file_alone_may_be_named(tmp_path: Path) -> None:
    folder = sentencepiece(tmp_path / "0", 0)
    config = run_with(tmp_path, folder / "tokenizer.model")
    assert model_config_of(config, weights=False).vocab_size >= opened(folder).num_ids


def test_a_folder_without_any_is_refused_and_what_is_looked_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, says in (
        (tmp_path / "empty", r"holds no tokenizer\.json, vocab\.json with merges\.txt, tokenizer\.model"),
        (tmp_path / "absent", "no such"),
    ):
        with pytest.raises(ConfigError, match=says):
            model_config_of(run_with(tmp_path, path), weights=False)
