"""Where text comes from: files, folders, globs; plain text or JSONL. Every fault is named by file and line."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import DataError

_PIECE_BYTES = 1 << 20
JSONL_SUFFIXES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one document, short enough to tokenise at once; cut at line ends only."""

    text: str
    ends_document: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of one data set, in a fixed order, and how they are read."""

    files: tuple[Path, ...]
    text_key: str
    invalid_text: str
    """``refuse`` or ``skip`` files that are not UTF-8."""
    check: Callable[[], None] = lambda: None
    """Called before each file and every thousand lines; what it raises ends the reading."""

    def pieces(self) -> Iterator[Piece]:
        """Read all documents once, in order.

        Raises:
            DataError: a file or line cannot be read; the message names it.
        """
        for file in self.files:
            self.check()
            if file.suffix in JSONL_SUFFIXES:
                for number, text in enumerate(_jsonl_texts(file, self.text_key), 1):
                    if number % 1000 == 0:
                        self.check()
                    yield from _cut(text)
            else:
                yield from self._text_file(file)

    def _text_file(self, file: Path) -> Iterator[Piece]:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            if self.invalid_text == "skip":
                return
            rule = "it must be UTF-8; convert it, leave it out by data.pattern, or set data.invalid_text to skip"
            raise DataError(f"{file}: byte {error.start} is not UTF-8 text; {rule}") from error
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error.strerror}") from error
        yield from _cut(text)


def find_files(patterns: Sequence[str], name_pattern: str, key: str) -> tuple[Path, ...]:
    """The files that ``patterns`` (files, folders, globs) stand for, sorted, each once.

    Hidden files and folders below a named folder are left out.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = [file for file in sorted(path.rglob(name_pattern)) if file.is_file() and not _hidden(file, path)]
        else:
            files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            why = (
                f"holds no file named {name_pattern} (data.pattern)"
                if path.is_dir()
                else "is no file, folder or glob with files"
            )
            raise DataError(f"{key}: {pattern} {why}")
        found.update(dict.fromkeys(files))
    return tuple(found)


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _cut(text: str) -> Iterator[Piece]:
    """Cut a document into pieces of about a megabyte, after a line end where there is one; empty documents give nothing."""
    start = 0
    while len(text) - start > _PIECE_BYTES:
        end = text.rfind("\n", start, start + _PIECE_BYTES) + 1
        if end <= start:
            end = start + _PIECE_BYTES
        yield Piece(text[start:end], ends_document=False)
        start = end
    if start < len(text):
        yield Piece(text[start:], ends_document=True)


def _jsonl_texts(file: Path, key: str) -> Iterator[str]:
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _jsonl_text(line, key, f"{file}, line {number}")
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def _jsonl_text(line: bytes, key: str, place: str) -> str:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: byte {error.start} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{place}, column {error.colno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{place}: the JSON is nested too deeply") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: must be an object with the key {key!r}; it is {type(record).__name__}")
    if key not in record:
        raise DataError(f"{place}: has no key {key!r} (data.text_key); its keys are {', '.join(sorted(record)) or 'none'}")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {key!r} must be text; it is {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {key!r} holds half a surrogate pair, which is not a character") from error
    return text
