"""Plain text: one file is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from finetune.data.readers.items import Fault, Item, Part, cut_stream
from finetune.data.readers.streams import Damaged, chunks_of, open_bytes

_CHUNK_BYTES = 1 << 20
_NOT_UTF8 = "it must be UTF-8; convert it, leave it out by data.pattern, or set data.invalid_text to skip"


class _NotUtf8(Exception):
    def __init__(self, byte: int) -> None:
        super().__init__(byte)
        self.byte = byte


class TextReader:
    """Text files, read in chunks whatever their size."""

    def parts(self, part: Part, target_bytes: int) -> list[tuple[Part, int]]:
        return [(part, part.file.stat().st_size)]

    def read(self, part: Part, *, skip_invalid: bool) -> Iterator[Item]:
        try:
            if skip_invalid:
                for _ in _decoded(part):
                    pass
            for piece in cut_stream(_decoded(part)):
                yield 0, piece
        except _NotUtf8 as error:
            if not skip_invalid:
                yield 0, Fault(f"byte {error.byte} is not UTF-8 text; {_NOT_UTF8}")
        except Damaged as error:
            yield 0, Fault(f"the compressed data is damaged ({error}); make the file again")
        except OSError as error:
            yield 0, Fault(f"cannot be read: {error.strerror or error}; check that it exists and may be read")

    def place(self, part: Part, position: int) -> str:
        return str(part.file)


def _decoded(part: Part) -> Iterator[str]:
    """The file's characters, chunk by chunk, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    with open_bytes(part.file) as stream:
        while True:
            chunk = chunks_of(stream, _CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _NotUtf8(offset - pending + error.start) from None
            yield text.removeprefix("\ufeff") if offset == 0 else text
            if not chunk:
                return
            offset += len(chunk)
