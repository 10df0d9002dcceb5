"""Every kind of file gives its records in order, cut into parts or not, and its faults by place."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.data.readers import READERS, Fault, Part, Record, Tokens, kind_of
from finetune.data.readers.megatron import open_index, write_megatron
from finetune.data.sources import Source, find_files, place_of
from finetune.errors import DataError


def whole(file: Path, kind: str | None = None, split: str | None = None) -> Part:
    return Part(file, kind or kind_of(file, records=False), 0, None, split)


def read(parts: Sequence[Part]) -> list[object]:
    found: list[object] = []
    for part in parts:
        for position, item in READERS[part.kind].read(part, skip_invalid=False):
            found.append(item.values if isinstance(item, Record) else (place_of(part, position), item))
    return found


def cut(part: Part, target_bytes: int) -> list[Part]:
    return [some for some, _ in READERS[part.kind].parts(part, target_bytes)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(st.lists(st.text(max_size=12), max_size=12), st.integers(1, 40), st.booleans(), st.booleans())
def test_jsonl_cut_anywhere_gives_the_same_lines_and_places(
    tmp_path: Path, texts: list[str], target: int, ends: bool, blank: bool
) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    file.write_text(("\n\n" if blank else "\n").join(lines) + ("\n" if ends else ""), encoding="utf-8")
    part = whole(file)
    assert read(cut(part, target)) == [{"text": text} for text in texts]
    placed = [
        place_of(some, position)
        for some in cut(part, target)
        for position, _ in READERS["jsonl"].read(some, skip_invalid=False)
    ]
    assert placed == [f"{file}, line {1 + number * (2 if blank else 1)}" for number in range(len(texts))]


def test_compressed_jsonl_is_read_and_its_faults_are_placed(tmp_path: Path) -> None:
    text = b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "b"}\n{"text": \n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text[:20]) + gzip.compress(text[20:]))  # two members are one file
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(text[:20]) + zstandard.compress(text[20:]))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        one, two, (place, fault) = read(cut(whole(tmp_path / name), 3))  # type: ignore[misc]
        assert [one, two] == [{"text": "a"}, {"text": "b"}]
        assert place == f"{tmp_path / name}, line 4"
        assert isinstance(fault, Fault)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 500)[:-12]),
        ("a.jsonl.zst", zstandard.compress(b'{"text": "x"}\n' * 500)[:-9]),
        ("a.jsonl.zst", b"no such thing"),
    ],
    ids=["gz", "zst", "neither"],
)
def test_a_truncated_compressed_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    place, fault = read([whole(tmp_path / name)])[-1]  # type: ignore[misc]
    assert name in place
    assert "the compressed data is damaged" in fault.message


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "héllo"), ("a.jsonl", '{"text": "héllo"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert [piece.text for piece in Source(files=(tmp_path / name,)).pieces()] == ["héllo"]


def test_a_json_list_is_read_record_by_record(tmp_path: Path) -> None:
    file = tmp_path / "alpaca.json"
    records = [{"instruction": f"ä{number}", "output": "[x], {y}"} for number in range(3000)]
    file.write_text(json.dumps(records, indent=1, ensure_ascii=False), encoding="utf-8")
    assert kind_of(file, records=False) == "text", "a .json file among sources is text, unless records are asked for"
    assert read([whole(file, "json")]) == records
    file.write_text('[{"a": 1}, 5, {"a": ]')
    first, (place, fault), (last_place, last) = read([whole(file, "json")])  # type: ignore[misc]
    assert (first, place) == ({"a": 1}, f"{file}, record 2")
    assert "must be an object" in fault.message
    assert "JSON" in last.message
    assert last_place.startswith(str(file))


def test_parquet_is_read_by_row_groups(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "a.parquet"
    rows = [{"text": f"row {number}", "turns": [{"role": "user"}]} for number in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=300)
    parts = cut(whole(file), 1)
    assert [(part.begin, part.end) for part in parts] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert read(parts) == rows
    assert place_of(parts[3], next(READERS["parquet"].read(parts[3], skip_invalid=False))[0]) == f"{file}, row 901"
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match=r"b\.parquet: not a parquet file"):
        cut(whole(tmp_path / "b.parquet"), 1)


def test_a_saved_data_set_is_read_by_split(tmp_path: Path) -> None:
    import datasets

    rows = [{"text": f"row {number}", "n": number} for number in range(700)]
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:3])})
    both.save_to_disk(tmp_path / "set")
    (found,) = find_files([str(tmp_path / "set")], "*.py", "data.train")
    assert kind_of(found, records=False) == "datasets"
    assert read(cut(whole(found), 1 << 10)) == rows
    assert read([whole(found, split="test")]) == rows[:3]
    with pytest.raises(DataError, match=r"no split 'dev'; name one of train, test"):
        read([whole(found, split="dev")])


def test_a_data_set_by_name_is_read_by_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of plain files goes by its name as a data set of the hub does."""
    folder = tmp_path / "poems"
    folder.mkdir()
    for split, count in (("train", 30), ("test", 2)):
        rows = (json.dumps({"text": f"{split} {number}"}) + "\n" for number in range(count))
        (folder / f"{split}.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, split, count in (("hf:poems", "train", 30), ("hf:poems:test", "test", 2), ("hf:poems,default:test", "test", 2)):
        (found,) = find_files([name], "*", "data.train")
        assert kind_of(found, records=False) == "datasets"
        assert read([whole(found)]) == [{"text": f"{split} {number}"} for number in range(count)]


def test_a_data_set_by_name_says_what_to_do_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (found,) = find_files(["hf:nobody/nothing,config:test"], "*", "data.train")
    with pytest.raises(DataError, match=r"hf:nobody/nothing,config:test: datasets cannot open it: .*save_to_disk"):
        READERS["datasets"].parts(whole(found), 1)


# -- Megatron


def write_index(prefix: Path, code: int, dtype: str, documents: list[list[int]], tail: bytes = b"") -> Path:
    """An index as both projects write it, by hand."""
    lengths = [len(document) for document in documents]
    data = b"".join(np.asarray(document, dtype).tobytes() for document in documents)
    pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index = head + np.asarray(lengths, "<i4").tobytes() + pointers.astype("<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index + np.arange(len(lengths) + 1, dtype="<i8").tobytes() + tail)
    prefix.with_suffix(".bin").write_bytes(data)
    return prefix.with_suffix(".idx")


@pytest.mark.parametrize(
    ("code", "dtype"),
    [(1, "u1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"), (6, "<f4"), (6, "<f8"), (7, "<f8"), (7, "<f4")],
    ids=lambda value: str(value),
)
def test_megatron_files_of_both_dialects_are_read(tmp_path: Path, code: int, dtype: str) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 100]]
    idx = write_index(tmp_path / f"d{code}{dtype[1:]}", code, dtype, documents, tail=b"\x00\x00\x00")
    for named in (idx, idx.with_suffix(".bin"), idx.with_suffix("")):
        assert find_files([str(named)], "*", "data.train") == (idx,)
    parts = cut(whole(idx), 1)
    assert len(parts) == 3
    found = [item for part in parts for _, item in READERS["megatron"].read(part, skip_invalid=False)]
    assert [item.ids.tolist() for item in found if isinstance(item, Tokens)] == documents


def test_written_megatron_files_have_the_bytes_of_the_format(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [4], [5, 6, 100]]
    for dtype, code, numpy in (("uint16", 8, "<u2"), ("int32", 4, "<i4")):
        expected = write_index(tmp_path / f"expected{code}", code, numpy, documents)
        write_megatron(tmp_path / f"made{code}", [np.asarray(document) for document in documents], dtype=dtype)
        for suffix in (".bin", ".idx"):
            assert (tmp_path / f"made{code}{suffix}").read_bytes() == expected.with_suffix(suffix).read_bytes()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda idx: idx.write_bytes(b"MMIDIDY" + idx.read_bytes()[7:]), "is no index of Megatron data"),
        (lambda idx: idx.write_bytes(b""), r"is cut short: it has 0 bytes, its header alone takes 34"),
        (lambda idx: idx.write_bytes(idx.read_bytes()[:20]), "is cut short: it has 20 bytes, its header alone takes 34"),
        (lambda idx: idx.write_bytes(idx.read_bytes()[:40]), "is cut short: it has 40 bytes, and its 2 sequences in 2"),
        (lambda idx: idx.write_bytes(idx.read_bytes()[:9] + b"\x02" + idx.read_bytes()[10:]), "is of version 2"),
        (lambda idx: idx.with_suffix(".bin").write_bytes(b"\x00"), "is shorter than"),
        (lambda idx: idx.write_bytes(idx.read_bytes()[:17] + b"\x09" + idx.read_bytes()[18:]), "dtype code 9 does not fit"),
    ],
    ids=["magic", "empty", "header", "cut", "version", "bin", "code"],
)
def test_a_damaged_megatron_pair_is_refused(tmp_path: Path, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    idx = write_index(tmp_path / "d", 8, "<u2", [[1, 2], [3]])
    damage(idx)
    with pytest.raises(DataError, match=says):
        open_index(idx)
