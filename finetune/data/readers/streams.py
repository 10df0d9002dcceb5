"""Files as bytes, decompressed by their suffix, read as a stream."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, cast

COMPRESSED = (".gz", ".zst")


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
        import zstandard

        stream = zstandard.ZstdDecompressor().stream_reader(file.open("rb"), read_across_frames=True, closefd=True)
        return cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", stream), 1 << 16))
    return file.open("rb")


def chunks_of(stream: IO[bytes], size: int) -> bytes:
    """The next ``size`` bytes, fewer at the end.

    Raises:
        Damaged: the compressed data is broken.
    """
    return _guarded(lambda: stream.read(size))


def line_of(stream: IO[bytes]) -> bytes:
    """The next line with its end; empty at the end.

    Raises:
        Damaged: the compressed data is broken.
    """
    return _guarded(stream.readline)


def _guarded(read: object) -> bytes:
    try:
        return cast("bytes", read())  # type: ignore[operator]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise Damaged(str(error)) from error
    except OSError:
        raise
    except Exception as error:
        if type(error).__name__ == "ZstdError":  # named so as not to import it for plain files
            raise Damaged(str(error)) from error
        raise
