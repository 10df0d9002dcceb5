"""Rows: what goes in comes out once, samples are cut or not as asked, weights count, and any row can be had at any time."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.config.load import load_config
from finetune.data.binning import pack
from finetune.data.prepare import Prepared, prepare
from finetune.data.rows import SampleRows, open_rows
from finetune.data.targets import IGNORE_INDEX
from finetune.data.tokenizer import open_tokenizer
from finetune.errors import DataError
from tests.finetune.support import small_run, write_config


def write_jsonl(file: Path, records: list[Any]) -> Path:
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def completions(count: int, *, longest: int = 20, tag: str = "") -> list[dict[str, str]]:
    """Prompts of different lengths, each with an answer that says which it is."""
    return [
        {"prompt": f"{tag}{number}:" + " x" * (number % longest), "completion": f" <{tag}{number}>"} for number in range(count)
    ]


def prepared(folder: Path, train: Any, **data: Any) -> Prepared:
    folder.mkdir(exist_ok=True)
    tree = small_run(folder, folder / "run", data={"train": train, "seq_len": 64, "pattern": "*", "eval_fraction": 0, **data})
    return prepare(load_config(write_config(tree, folder / "run.yaml")), lambda _: None)


def answers(made: Prepared, side: str = "train") -> list[str]:
    """The targets of every sample of every row."""
    rows, tokenizer = open_rows(made, side), open_tokenizer(made.tokenizer_folder)  # type: ignore[arg-type]
    found = []
    for number in range(rows.num_samples):
        inputs, targets, segments = rows.rows(np.array([number]))
        assert inputs.shape == targets.shape == (1, made.seq_len)
        numbers = np.zeros_like(inputs) if segments is None else segments
        assert (np.diff(numbers[0]) >= 0).all()
        for segment in range(int(numbers.max()) + 1):
            mine = targets[0][(numbers[0] == segment) & (targets[0] != IGNORE_INDEX)]
            if len(mine):
                found.append(tokenizer.decode(mine.tolist(), skip_special_tokens=False).strip())
    return found


@given(st.lists(st.integers(1, 50), max_size=120), st.integers(1, 40))
def test_packing_puts_every_sample_in_one_row_and_no_row_overflows(sizes: list[int], window: int) -> None:
    order, rows = pack(np.asarray(sizes, np.int64), 50, window)
    assert sorted(order.tolist()) == list(range(len(sizes)))
    fill = [sum(sizes[sample] for sample in order[begin:end]) for begin, end in pairwise(rows)]
    assert all(0 < size <= 50 for size in fill)
    if window >= len(sizes):
        assert len([size for size in fill if size <= 25]) <= 1, "two rows that fit into one"


@pytest.mark.parametrize("packing", ["isolate", "none"])
def test_each_sample_is_there_once_with_its_targets(tmp_path: Path, packing: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", completions(40))
    made = prepared(tmp_path / "p", str(file), packing=packing)
    assert Counter(answers(made)) == Counter(f"<{number}><|endoftext|>" for number in range(40))
    rows = open_rows(made, "train")
    assert isinstance(rows, SampleRows)
    assert made.train_rows == rows.num_samples == (40 if packing == "none" else rows.num_samples)
    if packing == "isolate":
        assert rows.num_samples < 25
    assert prepared(tmp_path / "p", str(file), packing=packing) == made


def test_samples_can_be_joined_too(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", completions(40))
    made = prepared(tmp_path / "p", str(file), packing="join")
    inputs, targets, segments = open_rows(made, "train").rows(np.arange(made.train_rows))
    assert segments is None
    assert (targets[:, :-1] == inputs[:, 1:])[targets[:, :-1] != IGNORE_INDEX].all()
    tokenizer = open_tokenizer(made.tokenizer_folder)
    text = tokenizer.decode(targets[targets != IGNORE_INDEX].tolist(), skip_special_tokens=False)
    assert text.startswith(" <0><|endoftext|> <1><|endoftext|>")


def test_text_is_packed_in_pieces_that_hold_every_token_once(tmp_path: Path) -> None:
    text = " ".join(f"word{number}" for number in range(400))
    write_jsonl(tmp_path / "t.jsonl", [{"text": text}, {"text": "short"}])
    write_jsonl(tmp_path / "c.jsonl", completions(10))
    made = prepared(tmp_path / "p", [str(tmp_path / "t.jsonl"), str(tmp_path / "c.jsonl")])
    assert made.packing == "isolate", "one conversation among the sources is enough"
    rows = open_rows(made, "train").rows(np.arange(made.train_rows))
    long = [tokens for tokens in open_rows_samples(made) if len(tokens) > 30]
    tokenizer = open_tokenizer(made.tokenizer_folder)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    starts = [ids[first : first + 5] for first in range(0, len(ids), 64)]
    assert [start for start in starts if len(start) == 5 and not any(piece[:5] == start for piece in long)] == []
    assert (rows.targets != IGNORE_INDEX).sum() >= len(ids)


def open_rows_samples(made: Prepared) -> list[list[int]]:
    rows = open_rows(made, "train")
    assert isinstance(rows, SampleRows)
    return [rows._tokens.read(*span)[0].tolist() for row in range(rows.num_samples) for span in rows.spans(row)]


def test_too_long_samples_are_refused_by_line_dropped_or_cut(tmp_path: Path) -> None:
    records = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "x y " * 60, "completion": "b"},
        {"prompt": "q", "completion": "c " * 90},
    ]
    file = write_jsonl(tmp_path / "a.jsonl", records)
    most = r"at most 65 fit: the 64 that a row holds \(data\.seq_len\), and a last one that is only predicted"
    with pytest.raises(DataError, match=rf"a\.jsonl, line 2: has \d+ tokens; {most}"):
        prepared(tmp_path / "p", str(file))
    dropped = prepared(tmp_path / "p", str(file), too_long="drop")
    assert (dropped.dropped, answers(dropped)) == (2, ["a<|endoftext|>"])
    cut = prepared(tmp_path / "p", str(file), too_long="cut")
    assert cut.dropped == 1, "a sample whose head holds no target teaches nothing"
    assert sorted(len(answer) > 30 for answer in answers(cut)) == [False, True]


def test_weights_repeat_a_source_and_take_a_part_of_it(tmp_path: Path) -> None:
    for tag in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{tag}.jsonl", completions(20, longest=4, tag=tag))
    sources = [
        {"path": str(tmp_path / "a.jsonl"), "weight": 2},
        str(tmp_path / "b.jsonl"),
        {"path": str(tmp_path / "c.jsonl"), "weight": 0.25},
    ]
    made = prepared(tmp_path / "p", sources)
    counts = Counter(answers(made))
    by_tag = {tag: sorted(count for answer, count in counts.items() if answer.startswith(f"<{tag}")) for tag in "abc"}
    assert by_tag == {"a": [2] * 20, "b": [1] * 20, "c": [1] * 5}
    shards = made.shards
    sources[0]["weight"] = 1.5  # type: ignore[index]
    again = prepared(tmp_path / "p", sources)
    assert again.shards == shards, "another weight needs no new tokens"
    assert again.fingerprint != made.fingerprint
    assert len(answers(again)) == 20 + 10 + 20 + 5


def test_weights_count_in_a_joined_stream(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("alpha " * 200)
    (tmp_path / "b.txt").write_text("beta " * 200)
    once = prepared(tmp_path / "p", [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
    twice = prepared(tmp_path / "p", [{"path": str(tmp_path / "a.txt"), "weight": 2}, str(tmp_path / "b.txt")])
    rows = open_rows(twice, "train")
    text = open_tokenizer(twice.tokenizer_folder).decode(rows.rows(np.arange(rows.num_samples)).inputs.ravel().tolist())
    assert once.packing == twice.packing == "join"
    assert text.count("alpha") > 390
    assert text.count("beta") in range(130, 201), "but for the tail that fills no row"


def test_whole_conversations_are_held_out_and_lost_nowhere(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", completions(50))
    made = prepared(tmp_path / "p", str(file), eval_fraction=0.2)
    held = answers(made, "eval")
    assert 4 <= len(held) <= 16
    assert Counter(answers(made) + held) == Counter(f"<{number}><|endoftext|>" for number in range(50))
    assert held == answers(prepared(tmp_path / "q", str(file), eval_fraction=0.2), "eval"), "the same ones for the same seed"
    assert held != answers(prepared(tmp_path / "p", str(file), eval_fraction=0.2, seed=1), "eval")


def test_an_empty_source_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"empty\.jsonl: no document in it"):
        prepared(tmp_path / "p", [str(write_jsonl(tmp_path / "a.jsonl", completions(5))), str(tmp_path / "empty.jsonl")])


def test_a_json_list_named_by_itself_is_records_and_in_a_folder_is_text(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / "a.json"
    file.write_text(json.dumps(completions(30)))
    assert prepared(tmp_path / "p", str(file)).documents == 30
    assert prepared(tmp_path / "p", str(folder)).documents == 1
    assert prepared(tmp_path / "p", {"path": str(folder), "format": "completion"}).documents == 30
