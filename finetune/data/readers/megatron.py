"""Megatron's ``.bin`` and ``.idx``: documents of token ids. Read in both dialects, written so that both read it.

``.idx``: ``MMIDIDX\\0\\0``, u64 version 1, u8 dtype code, u64 number of sequences, u64 number of document bounds, int32
lengths, int64 first bytes in ``.bin``, int64 document bounds; some multimodal files add an int8 mode per sequence. Codes 6 and
7 are float32 and float64 to GPT-NeoX, and float64 and float32 to Megatron-LM: the size of ``.bin`` says which.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetune.data.readers.items import Fault, Item, Part, Tokens
from finetune.data.targets import IGNORE_INDEX
from finetune.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {"uint16": 8, "int32": 4}
_FLOATS = {6: ("<f4", "<f8"), 7: ("<f8", "<f4")}
"""To GPT-NeoX, to Megatron-LM."""


@dataclass(frozen=True, slots=True)
class Index:
    """An open pair of files, memory-mapped: documents of sequences of tokens."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    first_bytes: NDArray[np.int64]
    documents: NDArray[np.int64]
    """Document d holds sequences [documents[d], documents[d + 1])."""

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def document(self, number: int) -> NDArray[Any]:
        """Ids of one document, in the file's own dtype."""
        size = self.tokens.dtype.itemsize
        parts = [
            self.tokens[self.first_bytes[s] // size : self.first_bytes[s] // size + self.lengths[s]]
            for s in range(self.documents[number], self.documents[number + 1])
        ]
        return np.concatenate(parts) if len(parts) != 1 else parts[0]


def open_index(idx: Path) -> Index:
    """Open ``PREFIX.idx`` and the ``PREFIX.bin`` beside it.

    Raises:
        DataError: they are no such pair, or do not fit together.
    """
    bin_file = idx.with_suffix(".bin")
    try:
        stamps = [(file.stat().st_size, file.stat().st_mtime_ns) for file in (idx, bin_file)]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}; Megatron data is a .bin and an .idx") from error
    return _open_index(idx, bin_file, *stamps)


@lru_cache(maxsize=8)
def _open_index(idx: Path, bin_file: Path, idx_stamp: tuple[int, int], bin_stamp: tuple[int, int]) -> Index:
    size, bin_size = idx_stamp[0], bin_stamp[0]
    try:
        with idx.open("rb") as stream:
            header = stream.read(_HEADER.size)
    except OSError as error:
        raise DataError(f"{idx}: cannot be read: {error.strerror}; check that it may be read") from error
    if not (header.startswith(_MAGIC) or _MAGIC.startswith(header)):
        raise DataError(f"{idx}: is no index of Megatron data (it does not begin with MMIDIDX); make it again")
    if len(header) < _HEADER.size:
        raise DataError(f"{idx}: is cut short: it has {size} bytes, its header alone takes {_HEADER.size}; make it again")
    _, version, code, sequences, bounds = _HEADER.unpack(header)
    if version != 1:
        raise DataError(f"{idx}: is of version {version}; version 1 alone is read; make it again")
    if bounds < 1:
        raise DataError(f"{idx}: has no document bounds, not even that of an empty file; make it again")
    needed = _HEADER.size + 12 * sequences + 8 * bounds
    if size < needed:
        raise DataError(
            f"{idx}: is cut short: it has {size} bytes, and its {sequences} sequences in {bounds - 1} documents take {needed}; "
            "copy or make it again"
        )
    lengths = _mapped(idx, "<i4", _HEADER.size, sequences)
    first_bytes = _mapped(idx, "<i8", _HEADER.size + 4 * sequences, sequences)
    documents = _mapped(idx, "<i8", _HEADER.size + 12 * sequences, bounds)
    dtype = _dtype(idx, code, int(lengths.sum(dtype=np.int64)), bin_size)
    if sequences and (
        int((first_bytes + lengths.astype(np.int64) * dtype.itemsize).max()) > bin_size
        or lengths.min() < 0
        or first_bytes.min() < 0
    ):
        raise DataError(f"{bin_file}: is shorter than {idx.name} says; make both again")
    if documents[0] < 0 or documents[-1] > sequences or (np.diff(documents) < 0).any():
        raise DataError(f"{idx}: its document bounds do not fit its {sequences} sequences; make both files again")
    tokens = np.memmap(bin_file, dtype=dtype, mode="r", shape=(bin_size // dtype.itemsize,)) if bin_size else np.zeros(0, dtype)
    return Index(tokens, lengths, first_bytes, documents)


def _mapped(file: Path, dtype: str, offset: int, count: int) -> Any:
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(count,)) if count else np.zeros(0, dtype)


def _dtype(idx: Path, code: int, num_tokens: int, bin_size: int) -> np.dtype[Any]:
    if code in _DTYPES:
        return np.dtype(_DTYPES[code])
    for candidate in _FLOATS.get(code, ()):
        if num_tokens * np.dtype(candidate).itemsize == bin_size:
            return np.dtype(candidate)
    raise DataError(f"{idx}: dtype code {code} does not fit {bin_size} bytes of {num_tokens} tokens; make both files again")


def labels_of(idx: Path) -> Path:
    """The index of the labels that may lie beside ``idx``: ``IGNORE_INDEX`` where a token is no target."""
    return idx.with_name(f"{idx.stem}_label.idx")


def has_labels(file: Path) -> bool:
    return file.suffix == ".idx" and labels_of(file).is_file()


class MegatronReader:
    """Reads Megatron's pairs of files. A part is a range of documents; a position is a document, from 0."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        index = open_index(part.file)
        total = int(index.tokens.nbytes)
        count = max(1, min(index.num_documents, -(-total // target_bytes)))
        bounds = [index.num_documents * number // count for number in range(count + 1)]
        return [(Part(part.file, part.kind, begin, end), total // count) for begin, end in pairwise(bounds)]

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        index = open_index(part.file)
        labels = open_index(labels_of(part.file)) if has_labels(part.file) else None
        if labels is not None and labels.num_documents != index.num_documents:
            counts = f"{index.num_documents} documents, {labels_of(part.file)} has {labels.num_documents}"
            raise DataError(f"{part.file}: has {counts}; make both again, or move the labels away")
        for number in range(part.begin, index.num_documents if part.end is None else part.end):
            ids = index.document(number)
            whole = ids.astype(np.int64)
            marks = labels.document(number) if labels else None
            if marks is not None and len(marks) != len(whole):
                yield number, Fault(f"has {len(whole)} tokens and {len(marks)} labels; make both files again")
            elif ids.dtype.kind == "f" and not np.array_equal(whole, ids):
                yield number, Fault("holds numbers that are not whole, so they are no token ids; it may be a file of rewards")
            elif len(whole):
                yield number, Tokens(whole, None if marks is None else (marks != IGNORE_INDEX).astype(np.uint8))

    def place(self, part: Part, position: int) -> str:
        return f"{part.file.with_suffix('.bin')}, document {position + 1}"


def write_megatron(prefix: Path, documents: Iterable[NDArray[Any]], *, dtype: str) -> int:
    """Write ``prefix.bin`` and ``prefix.idx``; whole or absent. Returns the number of documents.

    Args:
        dtype: ``uint16`` or ``int32``, which both dialects code alike.
    """
    lengths: list[int] = []
    prefix.parent.mkdir(parents=True, exist_ok=True)
    temporary = {suffix: Path(f"{prefix}{suffix}.tmp-{os.getpid()}") for suffix in (".bin", ".idx")}
    try:
        with temporary[".bin"].open("wb") as out:
            for ids in documents:
                out.write(ids.astype(dtype).tobytes())
                lengths.append(len(ids))
        sizes = np.asarray(lengths, dtype="<i4")
        ends = np.cumsum(sizes, dtype=np.int64) * np.dtype(dtype).itemsize
        with temporary[".idx"].open("wb") as out:
            out.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths), len(lengths) + 1))
            out.write(sizes.tobytes())
            out.write((ends - sizes.astype(np.int64) * np.dtype(dtype).itemsize).astype("<i8").tobytes())
            out.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
        for suffix, file in temporary.items():
            file.replace(f"{prefix}{suffix}")
    finally:
        for file in temporary.values():
            file.unlink(missing_ok=True)
    return len(lengths)
