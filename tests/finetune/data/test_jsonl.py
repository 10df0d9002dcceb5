"""Lines of JSONL: every way in which one can be wrong is a fault of its own place, and the lines around it are read."""

from __future__ import annotations

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from finetune.data.readers import READERS, Fault, Part, Record, jsonl
from finetune.data.sources import place_of, places_of

READER = READERS["jsonl"]


def read(part: Part) -> list[tuple[str, object]]:
    """The line of each item, and its values or what is wrong with it."""
    found: list[tuple[str, object]] = []
    for position, item in READER.read(part, skip_invalid=False):
        assert isinstance(item, Record | Fault)
        found.append((place_of(part, position).rpartition(", ")[2], item.values if isinstance(item, Record) else item.message))
    return found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": ', "column 10: not valid JSON: Expecting value; each line must be one JSON object"),
        (b'{"text": "a"} x', "column 15: not valid JSON: Extra data; each line must be one JSON object"),
        (b'{"text": "\xff"}', "byte 10 of the line is not UTF-8; write the file as UTF-8"),
        (b'["a"]', 'must be an object such as {"text": …}; it is list'),
        (b"3", 'must be an object such as {"text": …}; it is int'),
        (b"[" * 200_000, "the JSON is nested too deeply; a record needs a few levels only"),
        (b'{"n": ' + b"9" * 5000 + b"}", "not valid JSON: Exceeds the limit"),
    ],
    ids=["cut off", "two values", "not UTF-8", "a list", "a number", "nested", "digits"],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_line_that_is_no_object_is_a_fault_of_its_own_line(tmp_path: Path, line: bytes, said: str, suffix: str) -> None:
    content = b'{"text": "before"}\n\r\n' + line + b'\n  \n{"text": "after"}'
    file = tmp_path / f"a.jsonl{suffix}"
    file.write_bytes(gzip.compress(content) if suffix else content)
    before, (place, message), after = read(Part(file, "jsonl", 0, None))
    assert (before, after) == (("line 1", {"text": "before"}), ("line 5", {"text": "after"}))
    assert place == "line 3"
    assert isinstance(message, str)
    assert message.startswith(said)


def test_a_line_without_end_is_refused_as_one_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "_LONGEST_LINE", 64)
    fits = json.dumps({"text": "a" * 51})
    assert len(fits) == 63, "with its line end as long as a line may not be"
    shorter = json.dumps({"text": "a" * 50})
    file = tmp_path / "a.jsonl"
    file.write_text(f"{shorter}\n{fits}\n{'x' * 640}\n{shorter}\n")
    found = read(Part(file, "jsonl", 0, None))
    assert [place for place, _ in found] == ["line 1", "line 2", "line 3", "line 4"]
    assert [isinstance(what, dict) for _, what in found] == [True, False, False, True]
    assert all("MiB; JSONL has one object a line, and text belongs in a text file" in str(what) for _, what in found[1:3])
    for target in (1, 7, 64, 65, 200, 641):
        parts = [part for part, _ in READER.parts(Part(file, "jsonl", 0, None), target)]
        assert [item for part in parts for item in read(part)] == found, f"cut in pieces of {target}"


def test_a_missing_or_damaged_file_is_a_fault_where_it_begins(tmp_path: Path) -> None:
    ((_, gone),) = list(READER.read(Part(tmp_path / "no.jsonl", "jsonl", 7, 9), skip_invalid=False))
    assert gone == Fault("cannot be read: No such file or directory; check that it exists and may be read")
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(b"")[:5])
    ((_, damaged),) = list(READER.read(Part(file, "jsonl", 0, None), skip_invalid=False))
    assert isinstance(damaged, Fault)
    assert damaged.message.startswith("the compressed data is damaged (")
    assert damaged.message.endswith("; make the file again")


@pytest.mark.parametrize("seed", range(5))
def test_parts_hold_every_line_once_and_places_found_together_are_those_found_alone(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    lines = [draw.choice(["", " ", json.dumps({"n": number}), "{"]) for number in range(draw.randint(1, 40))]
    ending = draw.choice(["\n", "\r\n"])
    file = tmp_path / "a.jsonl"
    file.write_bytes(ending.join(lines).encode())
    whole = Part(file, "jsonl", 0, None)
    cut = READER.parts(whole, draw.randint(1, 60))
    assert [cut[0][0].begin, cut[-1][0].end] == [0, file.stat().st_size]
    assert all(before.end == after.begin for (before, _), (after, _) in pairwise(cut))
    assert sum(size for _, size in cut) == file.stat().st_size
    assert [item for part, _ in cut for item in read(part)] == read(whole)
    assert [place for place, _ in read(whole)] == [f"line {number}" for number, line in enumerate(lines, 1) if line.strip()]
    positions = [position for position, _ in READER.read(whole, skip_invalid=False)]
    assert places_of(whole, positions) == [place_of(whole, position) for position in positions]


def test_an_empty_file_is_one_part_without_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"")
    ((part, size),) = READER.parts(Part(tmp_path / "a.jsonl", "jsonl", 0, None), 100)
    assert (read(part), size) == ([], 0)
    assert places_of(part, []) == []
