"""Shards made by hand for tests: documents of ids that nothing else has, so that what became of each token can be counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from finetune.data.encode import Encoded
from finetune.data.readers import Part
from finetune.data.shards import ShardWriter


def part_of(name: str) -> Part:
    """A part whose places read ``name, row N``; the file itself need not exist."""
    return Part(Path(name), "parquet", 0, None)


def encoded(
    ids: Sequence[int],
    learned: Sequence[int] | None = None,
    *,
    ends: bool = True,
    text_bytes: int = 0,
    stop_id: int | None = None,
) -> Encoded:
    mask = None if learned is None else np.asarray(learned, np.uint8)
    return Encoded(np.asarray(ids, np.int64), mask, ends, text_bytes, stop_id)


def write_shard(
    folder: Path, documents: Sequence[Sequence[int]], masks: Sequence[Sequence[int]] | None = None, *, file: str = "a.parquet"
) -> Path:
    """One shard of whole documents: document N is row N + 1 of ``file``."""
    with ShardWriter(folder, "uint32", masked=masks is not None, unit=(part_of(file),)) as writer:
        for number, ids in enumerate(documents):
            writer.add(0, number, encoded(ids, None if masks is None else masks[number]))
    return folder


def numbered_documents(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Documents of these lengths whose ids count on from ``first``: each id is there once."""
    ends = np.cumsum([first, *lengths])
    return [list(range(int(end) - length, int(end))) for end, length in zip(ends[1:], lengths, strict=True)]
