"""Rows of tokens as a model takes them: joined documents, or samples side by side. Any row can be had at any time.

B rows asked for   L = seq_len   Memory-mapped: nothing is read before it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from finetune.data.layout import LENGTH
from finetune.data.prepared import Prepared
from finetune.data.shards import ShardTokens
from finetune.data.targets import IGNORE_INDEX

Numbers = NDArray[np.int64]


class RowBatch(NamedTuple):
    """Rows asked for together, as a model takes them."""

    inputs: Numbers
    """[B, L]"""
    targets: Numbers
    """[B, L], the input's successor; ``IGNORE_INDEX`` does not count."""
    segments: Numbers | None
    """[B, L]: number of the sample each token belongs to, from 0 in each row; padding is one more sample. ``None``: each row
    is one segment."""


class Rows(Protocol):
    """The rows of one side of the data."""

    @property
    def num_samples(self) -> int:
        """Rows in all; what is counted and shuffled as samples."""
        ...

    @property
    def num_tokens(self) -> int: ...

    def rows(self, indices: Numbers) -> RowBatch:
        """The rows of these numbers, in this order."""
        ...

    def spans(self, row: int) -> list[tuple[int, int, int]]:
        """What one row is made of, in order: shard, first token, end. A sample's last token is a target only."""
        ...


def open_rows(prepared: Prepared, side: Literal["train", "eval"]) -> Rows:
    """Open what ``prepare`` laid out."""
    tokens = ShardTokens([Path(shard) for shard in prepared.shards], prepared.dtype)
    spans = np.load(Path(prepared.folder) / f"{side}.npy", mmap_mode="r", allow_pickle=False)
    if prepared.packing == "join":
        return JoinedRows(tokens, spans, prepared.seq_len)
    rows = np.load(Path(prepared.folder) / f"{side}.rows.npy", mmap_mode="r", allow_pickle=False)
    return SampleRows(tokens, spans, rows, prepared.seq_len, prepared.end_of_text_id, isolated=prepared.packing == "isolate")


class JoinedRows:
    """All documents as one stream; row i holds its tokens [i * L, i * L + L], so every token is a target exactly once."""

    def __init__(self, tokens: ShardTokens, stretches: Numbers, seq_len: int) -> None:
        self._tokens, self._stretches, self._seq_len = tokens, stretches, seq_len
        self._ends = np.cumsum(stretches[:, LENGTH])

    @property
    def num_tokens(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def num_samples(self) -> int:
        """Whole rows; the tail that does not fill one is not among them."""
        return max(0, (self.num_tokens - 1) // self._seq_len)

    def rows(self, indices: Numbers) -> RowBatch:
        inputs = np.empty((len(indices), self._seq_len), np.int64)
        targets = np.empty_like(inputs)
        for row, index in enumerate(indices):
            ids, learned = self.stream(int(index) * self._seq_len, self._seq_len + 1)
            inputs[row] = ids[:-1]
            targets[row] = np.where(learned[1:], ids[1:], IGNORE_INDEX)
        return RowBatch(inputs, targets, None)

    def spans(self, row: int) -> list[tuple[int, int, int]]:
        return [(shard, first, first + count) for shard, first, count in self._stretch(row * self._seq_len, self._seq_len + 1)]

    def stream(self, begin: int, count: int) -> tuple[Numbers, NDArray[np.bool_]]:
        """Tokens [begin, begin + count) of the stream, and which of them are targets."""
        ids = np.empty(count, np.int64)
        learned = np.ones(count, np.bool_)
        at = 0
        for shard, first, taken in self._stretch(begin, count):
            some, mask = self._tokens.read(shard, first, first + taken)
            ids[at : at + taken] = some
            if mask is not None:
                learned[at : at + taken] = mask
            at += taken
        return ids, learned

    def _stretch(self, begin: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Where tokens [begin, begin + count) of the stream lie: shard, first token there, how many."""
        number = int(np.searchsorted(self._ends, begin, side="right"))
        while count > 0:
            shard, first, length = (int(value) for value in self._stretches[number])
            skipped = begin - (int(self._ends[number]) - length)
            taken = min(count, length - skipped)
            yield shard, first + skipped, taken
            begin, count, number = begin + taken, count - taken, number + 1


class SampleRows:
    """Whole samples, one or several a row, filled up with ``pad`` that is no target."""

    def __init__(self, tokens: ShardTokens, samples: Numbers, rows: Numbers, seq_len: int, pad: int, *, isolated: bool) -> None:
        self._tokens, self._samples, self._rows = tokens, samples, rows
        self._seq_len, self._pad, self._isolated = seq_len, pad, isolated

    @property
    def num_tokens(self) -> int:
        return int(self._samples[:, LENGTH].sum())

    @property
    def num_samples(self) -> int:
        return len(self._rows) - 1

    def spans(self, row: int) -> list[tuple[int, int, int]]:
        samples = self._samples[self._rows[row] : self._rows[row + 1]].tolist()
        return [(shard, begin, begin + length) for shard, begin, length in samples]

    def rows(self, indices: Numbers) -> RowBatch:
        shape = (len(indices), self._seq_len)
        inputs, targets = np.full(shape, self._pad, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        segments = np.zeros(shape, np.int64)
        for row, index in enumerate(indices):
            at = 0
            samples = self.spans(int(index))
            for number, (shard, begin, end) in enumerate(samples):
                ids, mask = self._tokens.read(shard, begin, end)
                here = slice(at, at + len(ids) - 1)
                inputs[row, here] = ids[:-1]
                targets[row, here] = ids[1:] if mask is None else np.where(mask[1:], ids[1:].astype(np.int64), IGNORE_INDEX)
                segments[row, here] = number
                at += len(ids) - 1
            segments[row, at:] = len(samples)
        return RowBatch(inputs, targets, segments if self._isolated else None)
