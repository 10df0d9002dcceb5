"""``data check`` alone: it counts what ``prepare`` would lay out, finds every fault where it is, and writes nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from finetune.config import TuneConfig
from finetune.config.load import load_config
from finetune.data.check import DataReport, check_data
from finetune.data.prepare import prepare
from finetune.data.readers import items, text
from finetune.errors import DataError
from tests.finetune.data.test_packing import completions, write_jsonl
from tests.finetune.support import small_run, write_config


def silent(_: str) -> None: ...


def config_of(folder: Path, train: Any, **data: Any) -> TuneConfig:
    tree = small_run(folder, folder / "run", data={"train": train, "pattern": "*", "seq_len": 64, "eval_fraction": 0, **data})
    return load_config(write_config(tree, folder / "run.yaml"))


def report_of(folder: Path, train: Any, *, limit: int = 20, **data: Any) -> DataReport:
    found = check_data(config_of(folder, train, **data), limit=limit, say=silent)
    assert not (folder / "run").exists(), "nothing is written"
    return found


def mixed(folder: Path, seed: int) -> list[str]:
    """Long and short texts, and prompts with answers."""
    draw = random.Random(seed)
    texts = [{"text": " ".join(f"w{draw.randrange(50)}" for _ in range(draw.choice([0, 1, 40, 300])))} for _ in range(20)]
    files = [write_jsonl(folder / "t.jsonl", texts), write_jsonl(folder / "c.jsonl", completions(30))]
    return [str(file) for file in files]


@pytest.mark.parametrize("packing", ["join", "isolate", "none"])
@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_rows_and_tokens_are_those_that_are_laid_out(tmp_path: Path, packing: str, too_long: str) -> None:
    data = {"packing": packing, "too_long": too_long, "seq_len": 16}
    train = mixed(tmp_path, 1)
    report = report_of(tmp_path, train, **data)
    made = prepare(config_of(tmp_path, train, **data), silent)
    assert (report.packing, report.seq_len, report.num_faults) == (packing, 16, 0)
    assert report.rows == made.train_rows
    assert sum(source.documents for source in report.sources) == made.documents
    assert sum(source.tokens for source in report.sources) == made.tokens
    assert sum(source.targets for source in report.sources) == made.targets
    texts, chats = report.sources
    assert (texts.format, chats.format) == ("text", "completion")
    assert texts.dropped == 0, "text is cut, and loses nothing"
    if packing != "join":
        assert chats.dropped > 0
        assert too_long == "cut" or made.dropped == chats.dropped
    assert 0 < report.fill <= 1
    if packing == "join":
        assert report.fill == 1.0


def test_the_longest_document_is_named_by_its_place(tmp_path: Path) -> None:
    rows = completions(10)
    rows[6] = {"prompt": "x " * 30, "completion": "end"}
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    (source,) = report_of(tmp_path, str(file), too_long="drop").sources
    assert source.longest_place == f"{file}, line 7"
    assert source.longest > 30
    assert (source.name, source.weight, source.documents) == (str(file), 1.0, 10)


def test_faults_are_counted_beyond_those_that_are_listed_and_of_every_source(tmp_path: Path) -> None:
    good = completions(12)
    bad = [{"prompt": "a"}, *good[:3], {"prompt": 3, "completion": "b"}, *good[3:], {"completion": "c"}]
    first, second = write_jsonl(tmp_path / "a.jsonl", [*good[:1], *bad]), write_jsonl(tmp_path / "b.jsonl", good)
    with second.open("a") as out:
        out.write("{\n")
    every = report_of(tmp_path, [str(first), str(second)])
    assert every.num_faults == len(every.faults) == 4
    places = [f"{first}, line 2: ", f"{first}, line 6: ", f"{first}, line 16: ", f"{second}, line 13: "]
    assert all(fault.startswith(place) for fault, place in zip(every.faults, places, strict=True))
    assert every.num_skipped == 0
    few = report_of(tmp_path, [str(first), str(second)], limit=2)
    assert (few.num_faults, few.faults) == (4, every.faults[:2])
    skipped = report_of(tmp_path, [str(first), str(second)], limit=2, invalid="skip")
    assert (skipped.num_faults, skipped.num_skipped) == (4, 4)
    assert [source.documents for source in skipped.sources] == [13, 12]


def test_a_text_that_breaks_off_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "PIECE_CHARACTERS", 100)  # so that its first pieces are encoded before the end is seen
    monkeypatch.setattr(text, "_CHUNK_BYTES", 64)
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"begins well\n" * 500 + b"\xff")
    (folder / "b.txt").write_text("good\n" * 50)
    report = report_of(tmp_path, str(folder))
    (source,) = report.sources
    assert (source.documents, report.num_faults) == (1, 1)
    assert source.longest_place == str(folder / "b.txt")
    assert source.tokens == source.longest < 1000
    assert report.faults[0].startswith(f"{folder / 'a.txt'}: byte 6000 is not UTF-8")


@pytest.mark.parametrize(("too_long", "faults", "dropped"), [("refuse", 2, 2), ("cut", 0, 2), ("drop", 0, 2)])
def test_what_is_too_long_is_a_fault_only_where_it_is_refused(tmp_path: Path, too_long: str, faults: int, dropped: int) -> None:
    rows = completions(6)
    rows[1] = rows[4] = {"prompt": " ".join("abcdefghij" * 20), "completion": "end"}
    file = write_jsonl(tmp_path / "a.jsonl", rows)
    report = report_of(tmp_path, str(file), too_long=too_long)
    assert (report.num_faults, report.sources[0].dropped) == (faults, dropped)
    if faults:
        assert report.faults[0].startswith(f"{file}, line 2: has ")
        assert "at most 65 fit" in report.faults[0]
        with pytest.raises(DataError, match=r"line 2: has \d+ tokens"):
            prepare(config_of(tmp_path, str(file), too_long=too_long), silent)


def test_a_source_without_a_document_and_one_that_is_no_such_file_are_faults_beside_good_ones(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "words " * 50}])
    report = report_of(tmp_path, [str(empty), str(good), {"path": str(tmp_path / "broken.parquet"), "format": "text"}])
    assert report.num_faults == 2
    assert report.faults[0].startswith(f"{empty}: no document in it")
    assert "broken.parquet: not a parquet file" in report.faults[1]
    assert [source.documents for source in report.sources] == [0, 1, 0]
    assert report.rows == (report.sources[1].tokens - 1) // 64


def test_sources_of_evaluation_are_checked_and_are_no_rows_of_training(tmp_path: Path) -> None:
    train = write_jsonl(tmp_path / "t.jsonl", [{"text": "words and words " * 40}])
    held = tmp_path / "e.jsonl"
    held.write_text(json.dumps({"text": "other " * 500}) + "\n{\n")
    report = report_of(tmp_path, str(train), eval=[str(held)])
    assert [source.name for source in report.sources] == [str(train), str(held)]
    assert report.faults[0].startswith(f"{held}, line 2: ")
    assert report.rows == report_of(tmp_path, str(train)).rows
