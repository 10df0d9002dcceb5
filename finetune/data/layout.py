"""Which documents train, which evaluate, how often each appears, and how they share rows. Decided once, kept in two files.

D documents or samples   R rows   ``train.npy`` and ``eval.npy``: int64 [D, 3], shard, first token in it, tokens.
Joined: the documents in stream order. Otherwise the samples in row order, with ``train.rows.npy``: int64 [R + 1], where each
row begins among them. A sample of n tokens takes n - 1 places of its row: the last one is only ever a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from finetune.data.binning import pack
from finetune.data.shards import ShardTokens, lengths_of, place_in
from finetune.errors import DataError

Numbers = NDArray[np.int64]
LAYOUT: Final = ("train", "eval")
SHARD, BEGIN, LENGTH = 0, 1, 2
_SPLIT, _WEIGHT, _ORDER = 1, 2, 3
"""What a seeded draw is for: each use has numbers of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a layout depends on, besides the tokens."""

    seq_len: int
    packing: str
    too_long: str
    seed: int
    eval_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How many tokens and rows a layout has on each side, and how many samples it left out."""

    train_tokens: int
    train_rows: int
    eval_tokens: int
    eval_rows: int
    dropped: int
    """Samples left out, or cut to nothing, because they were too long."""


def lay_out(
    train: Sequence[Sequence[Path]],
    held_out: Sequence[Sequence[Path]],
    weights: Sequence[float],
    cuttable: Sequence[bool],
    settings: Settings,
    folder: Path,
) -> Layout:
    """Decide on all rows and write them into ``folder``.

    Args:
        train: shards of each training source; counted on from here, then on through ``held_out``.
        held_out: shards of each source of ``data.eval``; empty: a part of ``train`` is held out.
        weights: of each source, ``train`` first.
        cuttable: whether a long document of the source may be cut into several samples.

    Raises:
        DataError: a sample is too long and ``too_long`` refuses it; names its file and line.
    """
    folders = [shard for source in (*train, *held_out) for shard in source]
    tables, first = [], 0
    for source in (*train, *held_out):
        tables.append(_documents(source, first))
        first += len(source)
    work = _Work(folders, settings)
    if held_out:
        sides = (tables[: len(train)], tables[len(train) :])
    else:
        sides = _split(tables, settings)
    side_weights = (weights[: len(train)], weights[len(train) :] if held_out else [1.0] * len(train))
    side_cuttable = (cuttable[: len(train)], cuttable[len(train) :] if held_out else cuttable)
    counts = {}
    for name, side, some, cut in zip(LAYOUT, sides, side_weights, side_cuttable, strict=True):
        counts[f"{name}_tokens"], counts[f"{name}_rows"] = work.write(side, some, cut, folder / name)
    return Layout(**counts, dropped=work.dropped)


def _documents(shards: Sequence[Path], first: int) -> Numbers:
    """The documents of a source's shards, numbered from ``first``, in order."""
    parts = []
    for number, shard in enumerate(shards, first):
        lengths = lengths_of(shard)
        parts.append(np.stack([np.full(len(lengths), number), np.cumsum(lengths) - lengths, lengths], axis=1))
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros((0, 3), np.int64)


def draw(*key: int) -> np.random.Generator:
    """A generator that gives the same numbers for the same key, on every machine."""
    return np.random.Generator(np.random.PCG64(list(key)))


# -- the split


def _split(tables: Sequence[Numbers], settings: Settings) -> tuple[list[Numbers], list[Numbers]]:
    """Divide the documents of each source, all sources together, in an order drawn by the seed."""
    everything = np.concatenate(tables)
    if settings.packing == "join":
        held_from = _held_from_joined(everything[:, LENGTH], settings)
    else:
        held_from = _held_from_whole(everything[:, LENGTH], settings)
    kept, held = everything.copy(), everything.copy()
    kept[:, LENGTH] = held_from
    held[:, BEGIN] += held_from
    held[:, LENGTH] -= held_from
    bounds = np.cumsum([len(table) for table in tables])[:-1]
    train, evaluation = ([part[part[:, LENGTH] > 0] for part in np.split(side, bounds)] for side in (kept, held))
    return train, evaluation


def _held_from_joined(lengths: Numbers, settings: Settings) -> Numbers:
    """First held-out token of each document: its length (none), 0 (all) or between.

    Whole documents are held out until ``eval_fraction`` of all tokens is reached; the one that would go beyond it is cut,
    its head trains and its tail evaluates, so that one single file is split too. At least one row is held out, when the
    data has two.
    """
    total, row = int(lengths.sum()), settings.seq_len + 1
    wanted = 0 if settings.eval_fraction == 0.0 else max(round(settings.eval_fraction * total), row)
    missing = 0 if wanted > total - row else wanted
    held_from = lengths.copy()
    for index in draw(settings.seed, _SPLIT).permutation(len(lengths)):
        if missing <= 0:
            break
        take = min(missing, int(lengths[index]))
        held_from[index] -= take
        missing -= take
    return held_from


def _held_from_whole(lengths: Numbers, settings: Settings) -> Numbers:
    """First held-out token of each sample, all of it or none: samples are not cut.

    At least one is held out, and one trains, where there are two and ``eval_fraction`` is not 0.
    """
    held_from = lengths.copy()
    if settings.eval_fraction == 0.0 or len(lengths) < 2:
        return held_from
    order = draw(settings.seed, _SPLIT).permutation(len(lengths))
    before = np.cumsum(lengths[order]) - lengths[order]
    count = max(1, int((before < settings.eval_fraction * lengths.sum()).sum()))
    held_from[order[: min(count, len(lengths) - 1)]] = 0
    return held_from


# -- rows


class _Work:
    """Lays out one side after the other; counts what is dropped."""

    def __init__(self, folders: Sequence[Path], settings: Settings) -> None:
        self._folders, self._settings = folders, settings
        self._masks = ShardTokens(folders, "uint16")  # only the masks are read
        self.dropped = 0

    def write(
        self, tables: Sequence[Numbers], weights: Sequence[float], cuttable: Sequence[bool], path: Path
    ) -> tuple[int, int]:
        """Write one side; returns its tokens and rows."""
        length = self._settings.seq_len
        if self._settings.packing == "join":
            documents = _joined(self._weighted(tables, weights))
            np.save(path.with_suffix(".npy"), documents)
            tokens = int(documents[:, LENGTH].sum())
            return tokens, max(0, tokens - 1) // length
        fitting = [self._fitting(table, cut) for table, cut in zip(tables, cuttable, strict=True)]
        samples = self._weighted(fitting, weights)
        samples = samples[draw(self._settings.seed, _ORDER).permutation(len(samples))]
        if self._settings.packing == "isolate":
            order, rows = pack(samples[:, LENGTH] - 1, length)
            samples = samples[order]
        else:
            rows = np.arange(len(samples) + 1, dtype=np.int64)
        np.save(path.with_suffix(".npy"), samples)
        np.save(path.with_suffix(".rows.npy"), rows)
        return int(samples[:, LENGTH].sum()), len(rows) - 1

    def _weighted(self, tables: Sequence[Numbers], weights: Sequence[float]) -> Numbers:
        """Each source as often as its weight says; of a fraction, some of its documents once more."""
        parts: list[Numbers] = [np.zeros((0, 3), np.int64)]
        for number, (table, weight) in enumerate(zip(tables, weights, strict=True)):
            parts += [table] * int(weight)
            count = round((weight - int(weight)) * len(table))
            chosen = draw(self._settings.seed, _WEIGHT, number).permutation(len(table))[:count]
            parts.append(table[np.sort(chosen)])
        return np.concatenate(parts)

    def _fitting(self, table: Numbers, cuttable: bool) -> Numbers:
        """Documents as samples that fit a row: long ones cut in several, or treated as ``too_long`` says."""
        table = table[table[:, LENGTH] >= 2]  # one token alone has no target
        longest = self._settings.seq_len + 1
        long = table[:, LENGTH] > longest
        if not long.any():
            return table
        if cuttable:
            return _cut_up(table, self._settings.seq_len)
        if self._settings.too_long == "refuse":
            raise DataError(self._too_long(table[np.argmax(long)]))
        if self._settings.too_long == "drop":
            self.dropped += int(long.sum())
            return table[~long]
        table = table.copy()
        table[long, LENGTH] = longest
        empty = [index for index in np.flatnonzero(long) if not self._has_target(table[index])]
        self.dropped += len(empty)
        return np.delete(table, empty, axis=0)

    def _has_target(self, sample: Numbers) -> bool:
        begin, end = int(sample[BEGIN]), int(sample[BEGIN] + sample[LENGTH])
        mask = self._masks.read(int(sample[SHARD]), begin + 1, end)[1]
        return mask is None or bool(mask.any())

    def _too_long(self, sample: Numbers) -> str:
        shard = self._folders[int(sample[SHARD])]
        lengths = lengths_of(shard)
        document = int(np.searchsorted(np.cumsum(lengths), sample[BEGIN], side="right"))
        return f"{place_in(shard, document)}: {too_long_rule(int(sample[LENGTH]), self._settings.seq_len)}"


def too_long_rule(tokens: int, seq_len: int) -> str:
    """What is said of a sample that is too long."""
    most = f"at most {seq_len + 1} fit: the {seq_len} that a row holds (data.seq_len), and a last one that is only predicted"
    return f"has {tokens} tokens; {most}. Raise data.seq_len, or set data.too_long to cut or drop"


def _joined(documents: Numbers) -> Numbers:
    """The stream of these stretches in as few as possible: neighbours in a shard become one."""
    if not len(documents):
        return documents
    before, after = documents[:-1], documents[1:]
    follows = (before[:, SHARD] == after[:, SHARD]) & (before[:, BEGIN] + before[:, LENGTH] == after[:, BEGIN])
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    merged = documents[starts].copy()
    merged[:, LENGTH] = np.add.reduceat(documents[:, LENGTH], starts)
    return merged


def _cut_up(table: Numbers, seq_len: int) -> Numbers:
    """Every document in samples of at most ``seq_len + 1`` tokens, each beginning with the last token of the one before."""
    counts = np.maximum(1, -(-(table[:, LENGTH] - 1) // seq_len))
    document = np.repeat(np.arange(len(table)), counts)
    within = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    pieces = table[document].copy()
    pieces[:, BEGIN] += within * seq_len
    pieces[:, LENGTH] = np.minimum(pieces[:, LENGTH] - within * seq_len, seq_len + 1)
    return pieces
