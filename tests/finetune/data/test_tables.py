"""Parquet, data sets and Megatron files: parts of any size give the same rows, and what does not fit is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from numpy.typing import NDArray

from finetune.data.readers import READERS, Fault, Item, Part, Record, Tokens, kind_of, tables
from finetune.data.readers.megatron import open_index, write_megatron
from finetune.data.readers.tables import is_saved_dataset, open_dataset
from finetune.errors import DataError


def whole(file: Path, kind: str, split: str | None = None) -> Part:
    return Part(file, kind, 0, None, split)


def parts_of(part: Part, target_bytes: int) -> list[Part]:
    return [some for some, _ in READERS[part.kind].parts(part, target_bytes)]


def items(parts: Sequence[Part]) -> list[Item]:
    return [item for part in parts for item in READERS[part.kind].read(part, skip_invalid=False)]


def texts(parts: Sequence[Part]) -> list[tuple[int, object]]:
    return [(position, item.values["text"]) for position, item in items(parts) if isinstance(item, Record)]


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    file = tmp_path / "a.parquet"
    table = pa.table({"text": [f"text {number}" for number in range(23)]})
    pyarrow.parquet.write_table(table, file, row_group_size=5)
    return file


@pytest.mark.parametrize("rows_at_once", [1, 2, 256])
def test_parquet_rows_keep_their_number_in_parts_of_any_size(
    parquet: Path, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", rows_at_once)
    expected = [(number, f"text {number}") for number in range(23)]
    counts = []
    for target in (1, 150, 1 << 30):
        parts = parts_of(whole(parquet, "parquet"), target)
        counts.append(len(parts))
        assert [parts[0].begin, parts[-1].end] == [0, 5]
        assert all(before.end == after.begin for before, after in pairwise(parts))
        assert texts(parts) == expected
    assert counts[0] == 5, "a row group is never cut"
    assert counts[0] > counts[1] > counts[2] == 1
    assert texts([whole(parquet, "parquet")]) == expected
    assert READERS["parquet"].place(whole(parquet, "parquet"), 22) == f"{parquet}, row 23"


def test_a_parquet_file_without_rows_has_no_records(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert texts(parts_of(whole(tmp_path / "a.parquet", "parquet"), 10)) == []


def test_what_is_no_parquet_is_refused_by_name_and_damage_inside_is_a_fault_of_its_row(tmp_path: Path, parquet: Path) -> None:
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no such thing PAR1")
    for name in ("b.parquet", "missing.parquet"):
        with pytest.raises(DataError, match=rf"{name}: not a parquet file: .+; make the file again") as refused:
            parts_of(whole(tmp_path / name, "parquet"), 10)
        assert "\n" not in str(refused.value)
    third = pyarrow.parquet.ParquetFile(parquet).metadata.row_group(2).column(0)
    content = bytearray(parquet.read_bytes())
    begin = third.dictionary_page_offset or third.data_page_offset
    content[begin : begin + third.total_compressed_size] = b"\xff" * third.total_compressed_size
    parquet.write_bytes(content)
    *good, (position, fault) = items([whole(parquet, "parquet")])
    assert [where for where, _ in good] == list(range(len(good)))
    assert position == len(good) <= 10
    assert isinstance(fault, Fault)
    assert fault.message.startswith("cannot be read from here on: ")
    assert fault.message.endswith("; make the file again")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    rows = {"text": [f"text {number}" for number in range(23)], "n": list(range(23))}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    return tmp_path / "saved"


def test_rows_of_a_data_set_keep_their_number_in_parts_of_any_size(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_ROWS_AT_ONCE", 4)
    assert kind_of(saved, records=False) == "datasets"
    for target, count in ((1, 23), (200, None), (1 << 30, 1)):
        parts = parts_of(whole(saved, "datasets"), target)
        assert count in (None, len(parts)), "no part is without a row"
        assert texts(parts) == [(number, f"text {number}") for number in range(23)]
    ((_, first),) = items([Part(saved, "datasets", 7, 8)])
    assert first == Record({"text": "text 7", "n": 7})


def test_a_split_is_taken_by_name_and_otherwise_train_or_the_only_one(tmp_path: Path) -> None:
    def made(folder: str, *splits: str) -> Path:
        sets = {split: datasets.Dataset.from_dict({"text": [split]}) for split in splits}
        datasets.DatasetDict(sets).save_to_disk(str(tmp_path / folder))
        return tmp_path / folder

    both, other, two = made("both", "test", "train"), made("other", "test"), made("two", "a", "b")
    assert texts([whole(both, "datasets")]) == [(0, "train")]
    assert texts([whole(both, "datasets", "test")]) == [(0, "test")]
    assert texts([whole(other, "datasets")]) == [(0, "test")]
    for folder, split, named in ((two, None, "train"), (other, "train", "train"), (both, "dev", "dev")):
        with pytest.raises(DataError, match=f"{folder.name}: has no split '{named}'; name one of .+ by split"):
            open_dataset(folder, split)


def test_only_what_save_to_disk_made_is_a_data_set(tmp_path: Path, saved: Path) -> None:
    assert is_saved_dataset(saved)
    for name in ("state.json", "dataset_info.json"):
        (saved / name).rename(saved / "away")
        assert not is_saved_dataset(saved), f"without {name}"
        (saved / "away").rename(saved / name)
    (saved / "state.json").write_text("{")
    with pytest.raises(DataError, match=r"saved: datasets cannot open it: .+; check the name, or download it"):
        open_dataset(saved, None)
    assert kind_of(tmp_path, records=True) == "text"


@pytest.mark.parametrize(
    ("name", "plain", "records"),
    [
        ("a.jsonl", "jsonl", "jsonl"),
        ("a.NDJSON.gz", "jsonl", "jsonl"),
        ("a.json", "text", "json"),
        ("a.json.zst", "text", "json"),
        ("a.PARQUET", "parquet", "parquet"),
        ("a.idx", "text", "text"),
        ("a.py", "text", "text"),
        ("hf:org/name", "datasets", "datasets"),
    ],
)
def test_a_file_is_read_by_its_name(tmp_path: Path, name: str, plain: str, records: str) -> None:
    file = Path(name) if name.startswith("hf:") else tmp_path / name
    assert kind_of(file, records=False) == plain
    assert kind_of(file, records=True) == records


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """``t.idx`` and ``t.bin`` of documents of 3, 0, 4 and 1 tokens."""
    documents = [np.array(ids) for ids in ([1, 2, 3], [], [4, 5, 6, 7], [8])]
    assert write_megatron(tmp_path / "deep" / "t", documents, dtype="uint16") == 4
    return tmp_path / "deep" / "t.idx"


@pytest.mark.parametrize("target", [1, 3, 5, 100])
def test_documents_of_tokens_keep_their_number_and_empty_ones_are_none(pair: Path, target: int) -> None:
    parts = parts_of(whole(pair, "megatron"), target)
    assert [parts[0].begin, parts[-1].end] == [0, 4]
    found = [(position, item.ids.tolist()) for position, item in items(parts) if isinstance(item, Tokens)]
    assert found == [(0, [1, 2, 3]), (2, [4, 5, 6, 7]), (3, [8])]
    assert READERS["megatron"].place(parts[0], 2) == f"{pair.with_suffix('.bin')}, document 3"


def test_labels_say_which_tokens_are_targets_and_must_fit(pair: Path) -> None:
    def label(*documents: list[int]) -> None:
        write_megatron(pair.with_name("t_label"), [np.array(some) for some in documents], dtype="int32")

    label([-100, 2, 3], [], [4, -100, -100, -100], [8])
    masks = [item.learned for _, item in items([whole(pair, "megatron")]) if isinstance(item, Tokens)]
    assert [mask.tolist() for mask in masks if mask is not None] == [[0, 1, 1], [1, 0, 0, 0], [1]]
    label([-100, 2], [], [4, -100, -100, -100], [8])
    assert items([whole(pair, "megatron")])[0] == (0, Fault("has 3 tokens and 2 labels; make both files again"))
    label([1])
    with pytest.raises(DataError, match=r"t\.idx: has 4 documents, .*t_label\.idx has 1; make both again, or move the labels"):
        items([whole(pair, "megatron")])


def test_numbers_that_are_not_whole_are_no_token_ids(pair: Path) -> None:
    values = np.array([1.0, 2.0, 3.5, 4.0, 5.0, 6.0, 7.0, 8.0], "<f4")
    pair.with_suffix(".bin").write_bytes(values.tobytes())
    header = bytearray(pair.read_bytes())
    header[17] = 6
    struct.pack_into("<4q", header, 34 + 16, 0, 12, 12, 28)
    pair.write_bytes(header)
    rewards, *others = items([whole(pair, "megatron")])
    assert rewards == (0, Fault("holds numbers that are not whole, so they are no token ids; it may be a file of rewards"))
    assert [item.ids.tolist() for _, item in others if isinstance(item, Tokens)] == [[4, 5, 6, 7], [8]]


@pytest.mark.parametrize(
    ("at", "form", "value", "said"),
    [
        (0, "<9s", b"MMIDIDY\0\0", "is no index of Megatron data"),
        (9, "<Q", 2, "is of version 2; version 1 alone is read"),
        (17, "<B", 99, "dtype code 99 does not fit 16 bytes of 8 tokens"),
        (18, "<Q", 5, "is cut short: it has 122 bytes, and its 5 sequences in 4 documents take 134"),
        (26, "<Q", 0, "has no document bounds"),
        (34, "<i", -1, "is shorter than t.idx says"),
        (34 + 16, "<q", -2, "is shorter than t.idx says"),
        (34 + 16 + 24, "<q", 16, "is shorter than t.idx says"),
        (34 + 48, "<q", -1, "its document bounds do not fit its 4 sequences"),
        (34 + 48 + 32, "<q", 5, "its document bounds do not fit its 4 sequences"),
        (34 + 48 + 8, "<q", 3, "its document bounds do not fit its 4 sequences"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused_by_what_is_wrong(
    pair: Path, at: int, form: str, value: object, said: str
) -> None:
    content = bytearray(pair.read_bytes())
    assert len(content) == 122
    struct.pack_into(form, content, at, value)
    pair.write_bytes(content)
    with pytest.raises(DataError, match=said):
        open_index(pair)


def test_a_pair_that_is_not_whole_is_refused_and_a_failed_writer_leaves_none(pair: Path, tmp_path: Path) -> None:
    content = pair.read_bytes()
    for length, said in ((0, "header alone takes 34"), (20, "header alone takes 34"), (100, "is cut short: it has 100 bytes")):
        pair.write_bytes(content[:length])
        with pytest.raises(DataError, match=said):
            open_index(pair)
    pair.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"t\.bin: cannot be read: .+; Megatron data is a \.bin and an \.idx"):
        open_index(pair)

    def broken() -> Iterator[NDArray[np.int64]]:
        yield np.array([1, 2])
        raise KeyError

    with pytest.raises(KeyError):
        write_megatron(tmp_path / "new" / "t", broken(), dtype="uint16")
    assert list((tmp_path / "new").iterdir()) == []
