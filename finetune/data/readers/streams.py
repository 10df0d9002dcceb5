"""Files as bytes, decompressed by their suffix, read as a stream."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, cast

COMPRESSED = (".gz", ".zst")
_COMPRESSED_BYTES = 1 << 16


class Damaged(Exception):
    """The compressed bytes end early or are not what the suffix says."""


def inner_suffix(file: Path) -> str:
    """``.jsonl`` of ``a.jsonl``, ``a.jsonl.gz`` and ``a.jsonl.zst``, in lower case."""
    return Path(file.stem).suffix.lower() if is_compressed(file) else file.suffix.lower()


def is_compressed(file: Path) -> bool:
    return file.suffix.lower() in COMPRESSED


def open_bytes(file: Path) -> IO[bytes]:
    """Open ``file`` for reading, decompressed. Read it through ``read_or_damaged``."""
    if file.suffix.lower() == ".gz":
        return cast("IO[bytes]", gzip.open(file, "rb"))
    if file.suffix.lower() == ".zst":
        return cast("IO[bytes]", io.BufferedReader(_Zstandard(file), 1 << 16))
    return file.open("rb")


class _Zstandard(io.RawIOBase):
    """The frames of a .zst file one after another. The library's own stream ends silently where a file is cut off."""

    def __init__(self, file: Path) -> None:
        import zstandard

        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error: type[Exception] = zstandard.ZstdError
        self._file = file.open("rb")
        self._frame: Any = None
        self._compressed, self._ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._more():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _more(self) -> bool:
        """Decompress a bit more; false at the end of the file."""
        compressed = self._compressed or self._file.read(_COMPRESSED_BYTES)
        self._compressed = b""
        if not compressed:
            if self._frame is not None:
                raise Damaged("it ends in the middle")
            return False
        self._frame = self._frame or self._new_frame()
        try:
            self._ready = self._frame.decompress(compressed)
        except self._error as error:
            raise Damaged(str(error)) from error
        if self._frame.eof:
            self._compressed, self._frame = self._frame.unused_data, None
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


def chunks_of(stream: IO[bytes], size: int) -> bytes:
    """The next ``size`` bytes, fewer at the end.

    Raises:
        Damaged: the compressed data is broken.
    """
    return _guarded(lambda: stream.read(size))


def line_of(stream: IO[bytes], longest: int = -1) -> bytes:
    """The next line with its end, or its first ``longest`` bytes; empty at the end.

    Raises:
        Damaged: the compressed data is broken.
    """
    return _guarded(lambda: stream.readline(longest))


def _guarded(read: Callable[[], bytes]) -> bytes:
    try:
        return read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Damaged(str(error)) from error
