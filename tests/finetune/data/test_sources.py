"""Text comes from files, folders and globs, and every fault is named by its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from finetune.data.sources import Source, find_files
from finetune.errors import DataError


def texts(*files: Path, invalid_text: str = "refuse") -> list[str]:
    documents, parts = [], []
    for piece in Source(files=files, text_key="text", invalid_text=invalid_text).pieces():
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert not parts, "the last piece must end its document"
    return documents


def test_files_folders_and_globs_are_found_once_and_in_order(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "sub/c.py", "sub/d.txt", ".hidden/e.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [file.relative_to(tmp_path).as_posix() for file in find_files([str(tmp_path)], "*.py", "data.train")]
    assert names == ["a.py", "b.py", "sub/c.py"]
    glob = find_files([str(tmp_path / "*.py"), str(tmp_path / "a.py")], "*", "data.train")
    assert [file.name for file in glob] == ["a.py", "b.py"]
    assert find_files([str(tmp_path / "**" / "*.txt")], "*", "data.train") == (tmp_path / "sub" / "d.txt",)


@pytest.mark.parametrize("missing", ["nowhere", "*.none", "."])
def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path, missing: str) -> None:
    with pytest.raises(DataError, match=r"data\.train: "):
        find_files([str(tmp_path / missing)], "*.py", "data.train")


def test_jsonl_gives_one_document_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two\\nlines", "more": 1}\n', encoding="utf-8")
    assert texts(file) == ["one", "two\nlines"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "x"', ["line 3", "column", "not valid JSON"]),
        (b'["text"]', ["line 3", "must be an object", "list"]),
        (b'{"txt": "x", "id": 1}', ["line 3", "no key 'text'", "id, txt"]),
        (b'{"text": 5}', ["line 3", "'text' must be text", "int"]),
        (b'{"text": null}', ["line 3", "must be text"]),
        (b'{"text": "\xff"}', ["line 3", "byte 10", "not UTF-8"]),
        (b'{"text": "\\ud800"}', ["line 3", "surrogate"]),
        (b"[" * 100_000, ["line 3"]),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: bytes, says: list[str]) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "x"}\n\n' + line + b"\n")
    with pytest.raises(DataError) as caught:
        texts(file)
    assert str(file) in str(caught.value)
    assert [part for part in says if part not in str(caught.value)] == [], str(caught.value)


def test_text_that_is_not_utf8_is_refused_by_byte_or_skipped(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.txt", tmp_path / "bad.txt"
    good.write_text("fine")
    bad.write_bytes(b"abc\xe9")
    with pytest.raises(DataError, match=r"bad\.txt: byte 3 is not UTF-8"):
        texts(good, bad)
    assert texts(good, bad, invalid_text="skip") == ["fine"]


def test_a_long_document_comes_in_pieces_cut_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "long.txt"
    text = "".join(f"line {number}\n" for number in range(300_000)) + "x" * 1_500_000
    file.write_text(text, encoding="utf-8")
    pieces = list(Source(files=(file,), text_key="text", invalid_text="refuse").pieces())
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece.text) for piece in pieces) <= 1 << 20
    assert sum(piece.text.endswith("\n") for piece in pieces) >= len(pieces) - 2


def test_an_empty_document_is_no_document(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": ""}) + "\n" + json.dumps({"text": "x"}) + "\n")
    assert texts(file) == ["x"]
