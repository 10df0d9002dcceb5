"""Tokens on disk: shards, each the documents of one unit of work, memory-mapped; written whole or not at all.

A shard is a folder: ``ids.bin`` (uint16 or uint32), ``learned.bin`` (uint8, 1 where a token is a target; absent when all are),
``lengths.npy`` (int64, tokens of each document), ``places.npy`` (int64 [documents, 2]: part of the unit, position in it),
``left-out.jsonl`` (records that were skipped: file, place, reason; absent when there are none) and ``facts.json``.
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from finetune.data.encode import Encoded
from finetune.data.readers.items import Part
from finetune.data.sources import Unit, place_of, places_of

_FACTS = "facts.json"
LEFT_OUT: Final = "left-out.jsonl"
_OPEN_SHARDS = 64
"""Shards mapped at a time: each holds two file descriptors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFacts:
    """What is known of a shard without opening its tokens."""

    documents: int
    tokens: int
    targets: int
    text_bytes: int
    stop_ids: tuple[int, ...]
    """Special tokens that end its conversations and completions."""
    left_out: int = 0
    """Records that could not be used and were skipped."""


class ShardWriter:
    """Writes one shard. A context manager: an error leaves nothing behind."""

    def __init__(self, folder: Path, dtype: str, *, masked: bool, unit: Unit) -> None:
        self._folder, self._dtype, self._unit = folder, dtype, unit
        self._work = folder.with_name(f"tmp-{folder.name}-{os.getpid()}")
        self._masked = masked
        self._lengths, self._places = array("q"), array("q")
        self._unfinished = self._targets = self._text_bytes = 0
        self._stops: set[int] = set()
        self._left_out: list[tuple[int, int, str]] = []
        self._whole = (0, 0, 0)
        """Tokens, targets and bytes of text up to the last whole document."""

    def __enter__(self) -> ShardWriter:
        shutil.rmtree(self._work, ignore_errors=True)
        self._work.mkdir(parents=True)
        self._ids: BinaryIO = (self._work / "ids.bin").open("wb")
        self._learned: BinaryIO | None = (self._work / "learned.bin").open("wb") if self._masked else None
        return self

    def add(self, part: int, position: int, encoded: Encoded) -> None:
        """Append a document, or the next piece of one."""
        count = len(encoded.ids)
        self._ids.write(encoded.ids.astype(self._dtype).tobytes())
        if self._learned is not None:
            mask = np.ones(count, np.uint8) if encoded.learned is None else encoded.learned
            self._learned.write(mask.tobytes())
        self._targets += count if encoded.learned is None else int(encoded.learned.sum())
        self._text_bytes += encoded.text_bytes
        self._unfinished += count
        if encoded.stop_id is not None:
            self._stops.add(encoded.stop_id)
        if encoded.ends_document:
            self._lengths.append(self._unfinished)
            self._places.extend((part, position))
            self._unfinished = 0
            self._whole = (self._whole[0] + self._lengths[-1], self._targets, self._text_bytes)

    def leave_out(self, part: int, position: int, reason: str) -> None:
        """Note a record that is skipped; the pieces of its document that were added are void."""
        tokens, self._targets, self._text_bytes = self._whole
        self._unfinished = 0
        for stream, size in ((self._ids, np.dtype(self._dtype).itemsize), (self._learned, 1)):
            if stream is not None:
                stream.seek(tokens * size)
                stream.truncate()
        self._left_out.append((part, position, reason))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for stream in (self._ids, self._learned):
            if stream is not None:
                stream.close()
        if kind is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            return
        lengths = np.frombuffer(self._lengths, dtype=np.int64) if self._lengths else np.zeros(0, np.int64)
        places = np.frombuffer(self._places, dtype=np.int64) if self._places else np.zeros(0, np.int64)
        np.save(self._work / "lengths.npy", lengths)
        np.save(self._work / "places.npy", places.reshape(-1, 2))
        facts = ShardFacts(
            documents=len(lengths),
            tokens=int(lengths.sum()),
            targets=self._targets,
            text_bytes=self._text_bytes,
            stop_ids=tuple(sorted(self._stops)),
            left_out=len(self._left_out),
        )
        if self._left_out:
            self._list_left_out()
        tree = {**asdict(facts), "unit": _unit_as_json(self._unit)}
        (self._work / _FACTS).write_text(json.dumps(tree) + "\n", encoding="utf-8")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._work.rename(self._folder)

    def _list_left_out(self) -> None:
        """In one pass over each file, however many there are."""
        with (self._work / LEFT_OUT).open("w", encoding="utf-8") as out:
            for part, group in groupby(self._left_out, key=itemgetter(0)):
                found = list(group)
                file = str(self._unit[part].file)
                places = places_of(self._unit[part], [position for _, position, _ in found])
                for place, (_, _, reason) in zip(places, found, strict=True):
                    line = {"file": file, "place": place, "reason": reason}
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")


def name_unit(folder: Path, unit: Unit) -> None:
    """Have a shard say where its files lie now: they may have been moved since it was made."""
    tree = _tree(folder)
    now = _unit_as_json(unit)
    if tree["unit"] != now:
        work = folder / f"{_FACTS}.tmp-{os.getpid()}"
        work.write_text(json.dumps({**tree, "unit": now}) + "\n", encoding="utf-8")
        work.rename(folder / _FACTS)


def _unit_as_json(unit: Unit) -> list[dict[str, Any]]:
    return [asdict(part) | {"file": str(part.file)} for part in unit]


def is_shard(folder: Path) -> bool:
    """Whether a whole shard is there."""
    return (folder / _FACTS).is_file()


def facts_of(folder: Path) -> ShardFacts:
    """What was written down of the shard in ``folder``."""
    tree = _tree(folder)
    tree.pop("unit")
    return ShardFacts(**{**tree, "stop_ids": tuple(tree["stop_ids"])})


def lengths_of(folder: Path) -> NDArray[np.int64]:
    """Tokens of each document of a shard."""
    lengths: NDArray[np.int64] = np.load(folder / "lengths.npy", allow_pickle=False)
    return lengths


def place_in(folder: Path, document: int) -> str:
    """Where a shard's document is from: ``file, line 3``."""
    part, position = np.load(folder / "places.npy", mmap_mode="r", allow_pickle=False)[document]
    values = _tree(folder)["unit"][int(part)]
    return place_of(Part(**{**values, "file": Path(values["file"])}), int(position))


def documents_between(folder: Path, begin: int, end: int) -> Iterator[tuple[str, int, int]]:
    """Where tokens [begin, end) of a shard are from: for each document its place, and the part of the range that is in it."""
    ends = np.cumsum(lengths_of(folder))
    document = int(np.searchsorted(ends, begin, side="right"))
    while begin < end:
        stop = min(end, int(ends[document]))
        yield place_in(folder, document), begin, stop
        begin, document = stop, document + 1


def _tree(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    return tree


class ShardTokens:
    """The tokens of many shards, by number. Opens them when asked, and keeps the latest open."""

    def __init__(self, folders: Sequence[Path], dtype: str) -> None:
        self._folders, self._dtype = list(folders), np.dtype(dtype)
        self._open: OrderedDict[int, tuple[NDArray[Any], NDArray[np.uint8] | None]] = OrderedDict()

    def read(self, shard: int, begin: int, end: int) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
        """Ids and targets [begin, end) of one shard; no mask when every token is a target."""
        ids, learned = self._mapped(shard)
        return ids[begin:end], None if learned is None else learned[begin:end]

    def _mapped(self, shard: int) -> tuple[NDArray[Any], NDArray[np.uint8] | None]:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        folder = self._folders[shard]
        masked = (folder / "learned.bin").is_file()
        made = (_map(folder / "ids.bin", self._dtype), _map(folder / "learned.bin", np.dtype(np.uint8)) if masked else None)
        self._open[shard] = made
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return made


def _map(file: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.zeros(0, dtype)
