"""Finds the tensors of one file that ``torch.save`` wrote: a zip archive of ``data.pkl`` and an entry for each storage."""

from __future__ import annotations

import os
import zipfile

from checkpoint.errors import CheckpointError
from checkpoint.layout import DTYPE_BYTES, Extent
from checkpoint.pickles import MAX_PICKLE_BYTES, StoredTensor, read_table

_LOCAL_HEADER_BYTES = 30


def index_torch_zip(fd: int, file: str) -> dict[str, Extent]:
    """Read the archive's directory and table and prove that every tensor lies inside an entry of its own size.

    Raises:
        CheckpointError: no such archive, a compressed or encrypted entry, a table with anything but tensors, and the like.
    """
    entries = _entries(fd, file)
    tables = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(tables) != 1:
        raise CheckpointError(file, f"must hold one data.pkl; it holds {len(tables)}")
    prefix = tables[0].removesuffix("data.pkl")
    order = entries.get(prefix + "byteorder")
    if order is not None and _content(fd, file, order, limit=16) != b"little":
        raise CheckpointError(file, "was written on a big-endian machine; only little-endian files are read")
    table = read_table(_content(fd, file, entries[tables[0]], limit=MAX_PICKLE_BYTES), file)
    if not table:
        raise CheckpointError(file, "holds no tensor")
    starts: dict[str, int] = {}
    found: dict[str, Extent] = {}
    for name, tensor in table.items():
        key = f"{prefix}data/{tensor.storage_key}"
        if key not in starts:
            starts[key] = _storage_start(fd, file, entries, key)
        found[name] = _extent(file, name, tensor, starts[key], entries[key].file_size)
    return found


def _entries(fd: int, file: str) -> dict[str, zipfile.ZipInfo]:
    """The archive's entries by name; all must be stored as they are, since their bytes are read in place."""
    try:
        with os.fdopen(os.dup(fd), "rb") as copy, zipfile.ZipFile(copy) as archive:
            infos = archive.infolist()
    except Exception as error:  # zipfile raises nearly anything on a broken directory
        rule = f"is not a zip archive as torch.save writes it since 1.6, or is cut short ({error}); load and save it again"
        raise CheckpointError(file, rule) from error
    entries: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        if info.filename in entries:
            raise CheckpointError(file, f"holds the entry {info.filename!r} twice")
        if info.flag_bits & 1:
            raise CheckpointError(file, f"entry {info.filename!r} is encrypted")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise CheckpointError(file, f"entry {info.filename!r} is compressed; torch.save stores its entries as they are")
        if info.header_offset < 0:
            raise CheckpointError(file, f"entry {info.filename!r} begins before the file")
        entries[info.filename] = info
    return entries


def _data_start(fd: int, file: str, info: zipfile.ZipInfo) -> int:
    """Offset of an entry's first byte, by its own local header, whose padding the archive's directory does not know."""
    header = os.pread(fd, _LOCAL_HEADER_BYTES, info.header_offset)
    if len(header) != _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
        raise CheckpointError(file, f"entry {info.filename!r} has no header where the directory says")
    name_bytes = int.from_bytes(header[26:28], "little")
    extra_bytes = int.from_bytes(header[28:30], "little")
    name = os.pread(fd, name_bytes, info.header_offset + _LOCAL_HEADER_BYTES)
    if name != info.orig_filename.encode("utf-8"):
        raise CheckpointError(file, f"entry {info.filename!r} has another name in its header")
    start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if start + info.file_size > os.fstat(fd).st_size:
        raise CheckpointError(file, f"is cut short: entry {info.filename!r} ends after the file")
    return start


def _content(fd: int, file: str, info: zipfile.ZipInfo, *, limit: int) -> bytes:
    """The bytes of a small entry."""
    if info.file_size > limit:
        raise CheckpointError(file, f"entry {info.filename!r} has {info.file_size} bytes; at most {limit} are read")
    return os.pread(fd, info.file_size, _data_start(fd, file, info))


def _storage_start(fd: int, file: str, entries: dict[str, zipfile.ZipInfo], key: str) -> int:
    if key not in entries:
        raise CheckpointError(file, f"the table refers to the entry {key!r}, which is missing")
    return _data_start(fd, file, entries[key])


def _extent(file: str, name: str, tensor: StoredTensor, start: int, entry_bytes: int) -> Extent:
    item_bytes = DTYPE_BYTES[tensor.dtype]
    if tensor.storage_items * item_bytes != entry_bytes:
        rule = f"tensor {name!r} has a storage of {tensor.storage_items * item_bytes} bytes; its entry has {entry_bytes}"
        raise CheckpointError(file, rule)
    return Extent(tensor.dtype, tensor.shape, tensor.strides, start + tensor.first_item * item_bytes)
