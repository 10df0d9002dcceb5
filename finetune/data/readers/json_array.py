"""A ``.json`` file that holds one list of records, as Alpaca and ShareGPT data is often published; read one at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO

from finetune.data.readers.items import Fault, Item, Part, Record
from finetune.data.readers.streams import Damaged, chunks_of, open_bytes

_CHUNK_BYTES = 1 << 20
_LONGEST_ENTRY = 1 << 28
_SPACE = " \t\r\n"
_RULE = "the file must hold one list of objects; or make it JSONL, one object a line"


class JsonArrayReader:
    """Reads a ``.json`` file that holds one list of objects; a position is a record's number, from 0."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        return [(part, part.file.stat().st_size)]

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        number = 0
        try:
            with open_bytes(part.file) as stream:
                for number, value in enumerate(_values(stream)):
                    if isinstance(value, dict):
                        yield number, Record(value)
                    else:
                        yield number, Fault(f"must be an object; it is {type(value).__name__}")
        except Damaged as error:
            yield number, Fault(f"the compressed data is damaged ({error}); make the file again")
        except UnicodeDecodeError:
            yield number, Fault("the file is not UTF-8 from here on; write it as UTF-8")
        except (ValueError, RecursionError) as error:
            yield number, Fault(f"not valid JSON here or after it: {error}; {_RULE}")
        except OSError as error:
            yield number, Fault(f"cannot be read: {error.strerror or error}; check that it exists and may be read")

    def place(self, part: Part, position: int) -> str:
        return f"{part.file}, record {position + 1}"


def _values(stream: IO[bytes]) -> Iterator[object]:
    """The list's entries. Only the entry under way, and a chunk, are in memory."""
    decoder, parser = codecs.getincrementaldecoder("utf-8-sig")(), json.JSONDecoder()
    text, start, ended = "", 0, False

    def more() -> bool:
        nonlocal text, start, ended
        chunk = chunks_of(stream, max(_CHUNK_BYTES, len(text) - start))  # doubling: a long entry is scanned a few times only
        ended = not chunk
        text, start = text[start:] + decoder.decode(chunk, final=ended), 0
        return not ended

    def skip_space() -> str:
        nonlocal start
        while True:
            while start < len(text) and text[start] in _SPACE:
                start += 1
            if start < len(text) or ended:
                return text[start : start + 1]
            more()

    if skip_space() != "[":
        raise ValueError("it does not begin with [")
    start += 1
    if skip_space() == "]":
        return
    while True:
        while True:
            skip_space()
            try:
                value, end = parser.raw_decode(text, start)
            except json.JSONDecodeError:
                if len(text) - start > _LONGEST_ENTRY or not more():
                    raise
                continue
            if end < len(text) or ended:  # a number could go on in the next chunk
                break
            more()
        start = end
        yield value
        separator = skip_space()
        if separator == "]":
            return
        if separator != ",":
            raise ValueError("entries must be separated by commas and the list closed by ]")
        start += 1
