"""Shards on disk: what is added comes back, what is left out leaves no token, what fails leaves nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from finetune.data import shards
from finetune.data.readers import Part
from finetune.data.shards import (
    LEFT_OUT,
    ShardTokens,
    ShardWriter,
    documents_between,
    facts_of,
    is_shard,
    lengths_of,
    name_unit,
    place_in,
)
from tests.finetune.data.shard_files import encoded, numbered_documents, part_of, write_shard


def in_pieces(draw: random.Random, ids: list[int]) -> Iterator[tuple[list[int], bool]]:
    """A document in one to four pieces, the last of which ends it; pieces may be empty, as of a text cut at its end."""
    bounds = [0, *sorted(draw.choices(range(len(ids) + 1), k=draw.randint(0, 3))), len(ids)]
    for piece, (begin, end) in enumerate(pairwise(bounds), 2):
        yield ids[begin:end], piece == len(bounds)


@pytest.mark.parametrize("seed", range(8))
def test_documents_in_pieces_come_back_whole_with_their_targets_and_counts(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    documents = numbered_documents([draw.randint(1, 30) for _ in range(draw.randint(0, 12))])
    kept: list[int] = []
    masks: list[int] = []
    reasons = []
    text_bytes = 0
    folder = tmp_path / "shard"
    with ShardWriter(folder, "uint16", masked=True, unit=(part_of("a"), part_of("b"))) as writer:
        for number, ids in enumerate(documents):
            breaks_off = draw.random() < 0.3
            for piece, ends in in_pieces(draw, ids):
                mask = draw.choice([None, [draw.randint(0, 1) for _ in piece]])
                writer.add(number % 2, number, encoded(piece, mask, ends=ends and not breaks_off, text_bytes=len(piece)))
                if not breaks_off:
                    masks += mask or [1] * len(piece)
                    text_bytes += len(piece)
            if breaks_off:
                reasons.append(f"broken {number}")
                writer.leave_out(number % 2, number, reasons[-1])
            else:
                kept.append(number)
    tokens = [token for number in kept for token in documents[number]]
    ids, learned = ShardTokens([folder], "uint16").read(0, 0, len(tokens) + 5)
    assert learned is not None
    assert (ids.tolist(), learned.tolist()) == (tokens, masks), "nothing of a document that broke off is left behind"
    facts = facts_of(folder)
    assert (facts.documents, facts.tokens, facts.left_out) == (len(kept), len(tokens), len(documents) - len(kept))
    assert (facts.targets, facts.text_bytes) == (sum(masks), text_bytes)
    assert lengths_of(folder).tolist() == [len(documents[number]) for number in kept]
    assert [place_in(folder, at) for at in range(len(kept))] == [f"{'ab'[number % 2]}, row {number + 1}" for number in kept]
    listed = folder / LEFT_OUT
    told = [json.loads(line)["reason"] for line in listed.read_text().splitlines()] if listed.exists() else []
    assert told == reasons
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]


def test_what_was_left_out_is_listed_by_file_and_line_as_it_was_written(tmp_path: Path) -> None:
    files = [tmp_path / "ä.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        file.write_text('{"text": "1"}\n\n{"text": "2"}\n')
    unit = tuple(Part(file, "jsonl", 0, None) for file in files)
    with ShardWriter(tmp_path / "shard", "uint16", masked=False, unit=unit) as writer:
        writer.leave_out(0, 0, "too “bad”")
        writer.leave_out(0, 15, "worse")
        writer.leave_out(1, 15, "worst")
    text = (tmp_path / "shard" / LEFT_OUT).read_text(encoding="utf-8")
    assert "ä.jsonl" in text, "a reader sees names as they are"
    assert [json.loads(line) for line in text.splitlines()] == [
        {"file": str(file), "place": f"{file}, line {line}", "reason": reason}
        for file, line, reason in ((files[0], 1, "too “bad”"), (files[0], 3, "worse"), (files[1], 3, "worst"))
    ]
    assert facts_of(tmp_path / "shard").left_out == 3


def test_a_stop_token_is_known_once_and_in_order(tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "shard", "uint16", masked=False, unit=(part_of("a"),)) as writer:
        for number, stop in enumerate((9, None, 2, 9)):
            writer.add(0, number, encoded([1, 2], stop_id=stop))
    assert facts_of(tmp_path / "shard").stop_ids == (2, 9)


def test_an_error_leaves_nothing_behind_and_no_earlier_shard_is_lost(tmp_path: Path) -> None:
    folder = write_shard(tmp_path / "shard", [[1, 2, 3]])

    def fails() -> None:
        with ShardWriter(folder, "uint32", masked=False, unit=(part_of("a"),)) as writer:
            writer.add(0, 0, encoded([7] * 50))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]
    assert ShardTokens([folder], "uint32").read(0, 0, 9)[0].tolist() == [1, 2, 3]
    write_shard(folder, [[4], [5]])
    assert ShardTokens([folder], "uint32").read(0, 0, 9)[0].tolist() == [4, 5], "a whole one takes the place of the one before"


def test_a_folder_without_its_facts_is_no_shard(tmp_path: Path) -> None:
    folder = write_shard(tmp_path / "shard", [[1]])
    assert is_shard(folder)
    (folder / "facts.json").unlink()
    assert not is_shard(folder)
    assert not is_shard(tmp_path / "nowhere")


def test_a_shard_without_documents_reads_as_nothing(tmp_path: Path) -> None:
    folder = write_shard(tmp_path / "shard", [], [])
    ids, learned = ShardTokens([folder], "uint32").read(0, 0, 4)
    assert learned is not None
    assert (len(ids), len(learned), len(lengths_of(folder))) == (0, 0, 0)
    assert list(documents_between(folder, 0, 0)) == []


@pytest.mark.parametrize(("dtype", "largest"), [("uint16", 2**16 - 1), ("uint32", 2**32 - 1)])
def test_the_largest_id_of_a_type_is_kept(tmp_path: Path, dtype: str, largest: int) -> None:
    with ShardWriter(tmp_path / "shard", dtype, masked=False, unit=(part_of("a"),)) as writer:
        writer.add(0, 0, encoded([0, largest]))
    ids, learned = ShardTokens([tmp_path / "shard"], dtype).read(0, 0, 2)
    assert (ids.tolist(), learned) == ([0, largest], None), "no mask where every token is a target"


@pytest.mark.parametrize("seed", range(4))
def test_a_stretch_of_tokens_is_shared_out_over_the_documents_it_lies_in(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    documents = numbered_documents([draw.randint(1, 9) for _ in range(7)])
    folder = write_shard(tmp_path / "shard", documents)
    owner = [number for number, document in enumerate(documents) for _ in document]
    for _ in range(30):
        begin, end = sorted(draw.choices(range(len(owner) + 1), k=2))
        found = list(documents_between(folder, begin, end))
        told = [(place, token) for place, first, stop in found for token in range(first, stop)]
        assert told == [(f"a.parquet, row {owner[token] + 1}", token) for token in range(begin, end)]
        assert all(first < stop for _, first, stop in found)


def written(file: Path) -> tuple[int, int, int]:
    """What changes when a file is written, and not when it is read."""
    seen = file.stat()
    return seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns


def test_a_file_that_was_moved_is_told_by_its_new_name_and_nothing_else_is_written(tmp_path: Path) -> None:
    folder = write_shard(tmp_path / "shard", [[1, 2]], file="old.parquet")
    before, facts = written(folder / "facts.json"), facts_of(folder)
    name_unit(folder, (part_of("old.parquet"),))
    assert written(folder / "facts.json") == before, "where nothing moved, nothing is written"
    name_unit(folder, (part_of("new.parquet"),))
    assert place_in(folder, 0) == "new.parquet, row 1"
    assert facts_of(folder) == facts
    assert not list(folder.glob("*.tmp-*"))


def test_only_the_shards_read_last_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [write_shard(tmp_path / str(number), [[number]]) for number in range(3)]
    opened: list[str] = []
    mapped = shards._map

    def watched(file: Path, dtype: np.dtype[np.uint32]) -> object:
        opened.append(file.parent.name)
        return mapped(file, dtype)

    monkeypatch.setattr(shards, "_map", watched)
    monkeypatch.setattr(shards, "_OPEN_SHARDS", 2)
    tokens = ShardTokens(folders, "uint32")
    read = [int(tokens.read(number, 0, 1)[0][0]) for number in (0, 1, 0, 2, 0, 1)]
    assert read == [0, 1, 0, 2, 0, 1]
    assert opened == ["0", "1", "2", "1"], "the one that was read longest ago is closed"
