"""``data check``: everything is read once, every fault is listed with its place, and what there is is counted."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from finetune.config import TuneConfig
from finetune.data.binning import pack
from finetune.data.encode import Encoded, Encoder
from finetune.data.inputs import Inputs, find_inputs, nothing_in
from finetune.data.layout import too_long_rule
from finetune.data.readers import Fault
from finetune.data.samples import Chat
from finetune.data.settings import Say, prepare_encoding
from finetune.data.sources import Source, Unit, place_of, units_of
from finetune.data.workers import encoded_items, encoder_of
from finetune.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """What one source holds."""

    name: str
    format: str
    weight: float
    documents: int
    tokens: int
    targets: int
    longest: int
    """Tokens of its longest document."""
    longest_place: str
    dropped: int
    """Samples that ``data.too_long`` drops or cuts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """What the data holds, and what is wrong with it."""

    sources: tuple[SourceReport, ...]
    num_faults: int
    faults: tuple[str, ...]
    """The first of them, each with its place and what to do about it."""
    num_skipped: int
    """Faults that are left out, since ``data.invalid`` is ``skip``."""
    num_warnings: int
    warnings: tuple[str, ...]
    """The first of what can be trained on and is likely not meant, each with its place."""
    packing: str
    seq_len: int
    rows: int
    """Rows of one pass over the training sources, without weights and before anything is held out."""
    fill: float
    """Share of the rows' places that hold a token."""


def check_data(config: TuneConfig, *, limit: int, say: Say) -> DataReport:
    """Read all sources once. Writes nothing but temporary files.

    Args:
        limit: faults to list, and warnings, at most; all are counted.

    Raises:
        ConfigError: the sources cannot be found, or tokenizer or template are at fault.
    """
    inputs = find_inputs(config)
    with tempfile.TemporaryDirectory() as scratch:
        encoding = prepare_encoding(config, inputs, Path(scratch), say, skip_faults=True)
        encoder, _ = encoder_of(encoding)
        reading = _Reading(config, inputs, encoder, limit)
        names = [entry.path for which in ("train", "eval") for entry in config.data.sources(which)]
        reports = tuple(reading.source(name, source) for name, source in zip(names, inputs.sources, strict=True))
    rows, used = reading.rows()
    return DataReport(
        sources=reports,
        num_faults=reading.num_faults,
        faults=tuple(reading.faults),
        num_skipped=reading.num_skipped,
        num_warnings=reading.num_warnings,
        warnings=tuple(reading.warnings),
        packing=inputs.packing,
        seq_len=config.data.seq_len,
        rows=rows,
        fill=used / max(1, rows * config.data.seq_len),
    )


class _Reading:
    """Reads one source after the other."""

    def __init__(self, config: TuneConfig, inputs: Inputs, encoder: Encoder, limit: int) -> None:
        self._data, self._inputs, self._encoder, self._limit = config.data, inputs, encoder, limit
        self._lengths: list[NDArray[np.int64]] = []  # of the training samples, as they go into rows
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.num_faults = self.num_skipped = self.num_warnings = 0

    def source(self, name: str, source: Source) -> SourceReport:
        lengths, fitting = array("q"), array("q")
        faults_before = self.num_faults
        targets = dropped = longest = unfinished = 0
        longest_place, taught = "", False
        strict = source.masked and self._inputs.packing != "join"
        for unit, part, position, item in self._items(source):
            if isinstance(item, Fault):
                self._fault(unit, part, position, item.message)
                self.num_skipped += source.invalid == "skip"
                unfinished, taught = 0, False
                continue
            taught = taught or _teaches(item, unfinished, self._data.seq_len)
            unfinished += len(item.ids)
            targets += len(item.ids) if item.learned is None else int(item.learned.sum())
            if not item.ends_document:
                continue
            length, unfinished = unfinished, 0
            if length > longest:
                longest, longest_place = length, place_of(unit[part], position)
            too_long = strict and length > self._data.seq_len + 1
            if too_long and self._data.too_long == "refuse":
                self._fault(unit, part, position, too_long_rule(length, self._data.seq_len))
            dropped += too_long
            lengths.append(length)
            if taught or not (too_long and self._data.too_long == "cut"):  # a head without a target is no sample
                fitting.append(length)
            taught = False
        if not lengths and self.num_faults == faults_before:
            self._add(nothing_in(source))
        all_lengths = _numbers(lengths)
        if source in self._inputs.train:
            self._lengths.append(self._as_samples(_numbers(fitting), strict))
        return SourceReport(
            name=name,
            format=source.format,
            weight=source.weight,
            documents=len(lengths),
            tokens=int(all_lengths.sum()),
            targets=targets,
            longest=longest,
            longest_place=longest_place,
            dropped=dropped,
        )

    def _items(self, source: Source) -> Iterator[tuple[Unit, int, int, Encoded | Fault]]:
        try:
            for unit in units_of(source):
                for part, position, item in encoded_items(self._encoder, source, unit, see=partial(self._see, unit)):
                    yield unit, part, position, item
        except DataError as error:  # a file that cannot be opened as what it is: nothing of its source can be cut in units
            self._add(str(error))

    def _fault(self, unit: Unit, part: int, position: int, message: str) -> None:
        # Finding a line's number means reading the file up to it: not for what is not shown.
        self._add(f"{place_of(unit[part], position)}: {message}" if len(self.faults) < self._limit else "")

    def _see(self, unit: Unit, part: int, position: int, chat: Chat) -> None:
        """Warn of control tokens that a conversation spells out: they would end turns, or begin some, where nobody meant it."""
        for number, message in enumerate(chat.messages, 1):
            found = self._encoder.controls_in(message["content"])
            if not found:
                continue
            self.num_warnings += 1
            if len(self.warnings) < self._limit:
                names = ", ".join(map(repr, found))
                what = f"turn {number} ({message['role']}) holds {names}, which the tokenizer reads as control tokens"
                self.warnings.append(f"{place_of(unit[part], position)}: {what}; take it out, or write it otherwise")

    def _add(self, fault: str) -> None:
        self.num_faults += 1
        if len(self.faults) < self._limit:
            self.faults.append(fault)

    def _as_samples(self, lengths: NDArray[np.int64], strict: bool) -> NDArray[np.int64]:
        """The places each sample takes in rows; long text counts as several."""
        if self._inputs.packing == "join":
            return lengths
        places = lengths[lengths >= 2] - 1
        whole, rest = np.divmod(places, self._data.seq_len)
        if strict and self._data.too_long == "cut":
            return np.minimum(places, self._data.seq_len)
        if strict:
            return places[places <= self._data.seq_len]
        return np.concatenate([np.full(int(whole.sum()), self._data.seq_len), rest[rest > 0]])

    def rows(self) -> tuple[int, int]:
        """Rows of all training samples, and the places in them that are used."""
        samples = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        if self._inputs.packing == "join":
            rows = max(0, int(samples.sum()) - 1) // self._data.seq_len
            return rows, rows * self._data.seq_len
        rows = len(samples) if self._inputs.packing == "none" else len(pack(samples, self._data.seq_len)[1]) - 1
        return rows, int(samples.sum())


def _numbers(lengths: array[int]) -> NDArray[np.int64]:
    return np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)


def _teaches(piece: Encoded, at: int, seq_len: int) -> bool:
    """Whether a piece that begins at token ``at`` of its sample has a target in the part that a row takes of the sample."""
    begin, end = max(0, 1 - at), max(0, seq_len + 1 - at)  # the first token of all is predicted by nothing
    return len(piece.ids[begin:end]) > 0 if piece.learned is None else bool(piece.learned[begin:end].any())
