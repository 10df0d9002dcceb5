"""What readers give: pieces of text, records, tokens, faults; and the parts of files they give them from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

PIECE_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one document, short enough to tokenise at once; cut at line ends where there are any."""

    text: str
    ends_document: bool


@dataclass(frozen=True, slots=True)
class Record:
    """One line of JSON or row of a table, by its keys."""

    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One document that is tokenised already."""

    ids: NDArray[np.int64]
    learned: NDArray[np.uint8] | None = None
    """1 where the token is a target; ``None``: everywhere."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong at this place, and what to do about it. The unfinished document before it is void."""

    message: str


Item = tuple[int, Piece | Record | Tokens | Fault]
"""Where in its file, and what; ``Reader.place`` puts the first into words."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of one file: what one process reads from begin to end, whoever reads the others."""

    file: Path
    kind: str
    """Key of ``finetune.data.readers.READERS``."""
    begin: int
    """In the reader's own unit: bytes of plain JSONL, rows, row groups, documents."""
    end: int | None
    """First that is no longer read; ``None``: to the end."""
    split: str | None = None
    """Which split of a ``datasets`` data set; ``None`` for other formats."""


class Reader(Protocol):
    """One kind of file. Stateless."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        """Cut a whole file into parts of about ``target_bytes``, each with its size in bytes."""
        ...

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        """Everything in ``part``, in order. Memory does not grow with the file."""
        ...

    def place(self, part: Part, position: int) -> str:
        """``file, line 3``: where ``position`` is, for a person."""
        ...


def cut(text: str) -> Iterator[Piece]:
    """Cut a document into pieces of about a megabyte, after a line end where there is one; empty documents give nothing."""
    return cut_stream(iter([text]))


def cut_stream(chunks: Iterator[str]) -> Iterator[Piece]:
    """``cut`` for a document that comes in chunks; the pieces do not depend on how it was chunked."""
    rest = ""
    for chunk in chunks:
        rest += chunk
        start = 0
        while len(rest) - start > PIECE_CHARACTERS:
            end = rest.rfind("\n", start, start + PIECE_CHARACTERS) + 1
            if end <= start:
                end = start + PIECE_CHARACTERS
            yield Piece(rest[start:end], ends_document=False)
            start = end
        rest = rest[start:]
    if rest:
        yield Piece(rest, ends_document=True)
