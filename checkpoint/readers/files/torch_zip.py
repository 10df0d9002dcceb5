"""Finds the tensors of what ``torch.save`` wrote: a zip archive of ``data.pkl`` and an entry for each storage."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from checkpoint.disk.folder import Folder, refuse_pointer
from checkpoint.errors import CheckpointError
from checkpoint.layout import DTYPE_BYTES, Extent
from checkpoint.readers.files.pickles import (
    MAX_PICKLE_BYTES,
    Allowed,
    StoredTensor,
    check_tensor,
    read_table,
    read_tree,
)
from checkpoint.readers.files.stand_ins import Refused

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LOCAL_HEADER_BYTES = 30
_MAX_DIRECTORY_BYTES = 8 << 20
"""The list of an archive's entries is read up to this size; each takes about 70 bytes."""
NUMBERS = {"F64": "<d", "F32": "<f", "I64": "<q", "I32": "<i"}
"""Types that counts are kept in, and how ``struct`` reads them."""
_DESCRIBED = b"PK\x07\x08"
_DESCRIPTION_BYTES = (16, 24)
"""What may lie between an entry and the next: its sizes and check sum once more, with 4 bytes for each size or with 8."""


def index_torch_zip(fd: int, file: str) -> dict[str, Extent]:
    """Read the archive's directory and table and prove that every tensor lies inside an entry of its own size.

    Raises:
        CheckpointError: no such archive, a compressed or encrypted entry, a table with anything but tensors, and the like.
    """
    archive = Archive(fd, file)
    table = read_table(archive.table, file)
    if not table:
        raise CheckpointError(file, "holds no tensor")
    return {name: archive.extent(name, tensor) for name, tensor in table.items()}


def table_names(folder: Folder, file: str, word: bytes) -> bool | None:
    """Whether an archive's table has ``word`` in it, as names of tensors and classes stand there; ``None`` for no archive."""
    try:
        fd = folder.open(file)
        try:
            return word in Archive(fd, file).table
        finally:
            os.close(fd)
    except CheckpointError:
        return None


class Archive:
    """One archive that ``torch.save`` wrote: a whole file, or a stretch of one. Nothing of its tensors is read."""

    table: bytes
    """The pickle that says what the archive holds; see ``tree``."""

    def __init__(self, fd: int, file: str, begin: int = 0, length: int | None = None) -> None:
        """
        Args:
            fd: open for reading; neither closed nor moved.
            file: the name for messages.
            begin, length: the stretch of the file that is the archive, in bytes; all from ``begin`` on without a length.

        Raises:
            CheckpointError: this is no such archive, an entry is compressed, encrypted, twice there or outside, and the like.
        """
        self._fd, self._file, self._begin = fd, file, begin
        size = os.fstat(fd).st_size
        self._end = size if length is None else begin + length
        if not 0 <= begin <= self._end <= size:
            raise CheckpointError(file, f"is cut short: an archive is to lie at bytes {begin} to {self._end} of {size}")
        self._entries, directory = _entries(_Stretch(fd, begin, self._end - begin), file)
        tables = [name for name in self._entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(tables) != 1:
            raise CheckpointError(file, f"must hold one data.pkl; it holds {len(tables)}")
        offsets = sorted(info.header_offset for info in self._entries.values())
        self._next = dict(zip(offsets, [*offsets[1:], directory], strict=True))
        self._prefix = tables[0].removesuffix("data.pkl")
        order = self._entries.get(self._prefix + "byteorder")
        if order is not None and self._content(order, limit=16) != b"little":
            raise CheckpointError(file, "was written on a big-endian machine; only little-endian files are read")
        self.table = self._content(self._entries[tables[0]], limit=MAX_PICKLE_BYTES)
        self._starts: dict[str, int] = {}

    def tree(self, allowed: Allowed) -> Any:
        """What was saved, with ``StoredTensor`` for tensors and ``Bag`` for objects; see ``pickles.read_tree``.

        Raises:
            CheckpointError: the pickle names what is not allowed.
        """
        return read_tree(self.table, self._file, allowed)

    def extent(self, name: str, tensor: StoredTensor) -> Extent:
        """Where a tensor of this archive's table lies in the file, proved to be inside its storage's entry.

        Args:
            name: of the tensor, for messages.

        Raises:
            CheckpointError: it has no element, or does not lie inside an entry of its storage's size.
        """
        try:
            check_tensor(name, tensor)
        except Refused as error:
            raise CheckpointError(self._file, str(error)) from None
        key = f"{self._prefix}data/{tensor.storage_key}"
        entry = self._entries.get(key)
        if entry is None:
            raise CheckpointError(self._file, f"the table refers to the entry {key!r}, which is missing")
        if key not in self._starts:
            self._starts[key] = self._data_start(entry)
        item_bytes = DTYPE_BYTES[tensor.dtype]
        if tensor.storage_items * item_bytes != entry.file_size:
            needed = tensor.storage_items * item_bytes
            raise CheckpointError(
                self._file, f"tensor {name!r} has a storage of {needed} bytes; its entry has {entry.file_size}"
            )
        return Extent(tensor.dtype, tensor.shape, tensor.strides, self._starts[key] + tensor.first_item * item_bytes)

    def number(self, name: str, tensor: StoredTensor) -> float:
        """The value of a tensor of one element, of this archive's table.

        Raises:
            CheckpointError: as ``extent``, or it is of a type that counts are not kept in.
        """
        extent = self.extent(name, tensor)
        form = NUMBERS.get(extent.dtype)
        if form is None or extent.num_elements != 1:
            raise CheckpointError(self._file, f"has {name!r} of {extent.dtype} {list(extent.shape)}, which is no count")
        return float(struct.unpack(form, os.pread(self._fd, extent.item_bytes, extent.offset_bytes))[0])

    def _data_start(self, info: zipfile.ZipInfo) -> int:
        """Offset in the file of an entry's first byte, by its own local header, whose padding the directory does not know."""
        place = self._begin + info.header_offset
        header = os.pread(self._fd, _LOCAL_HEADER_BYTES, place)
        if len(header) != _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
            raise CheckpointError(self._file, f"entry {info.filename!r} has no header where the directory says")
        name_bytes = int.from_bytes(header[26:28], "little")
        extra_bytes = int.from_bytes(header[28:30], "little")
        name = os.pread(self._fd, name_bytes, place + _LOCAL_HEADER_BYTES)
        if name != info.orig_filename.encode("utf-8"):
            raise CheckpointError(self._file, f"entry {info.filename!r} has another name in its header")
        start = place + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        end, following = start + info.file_size, self._begin + self._next[info.header_offset]
        if end > self._end:
            raise CheckpointError(self._file, f"is cut short: entry {info.filename!r} ends after the file")
        between = following - end
        if between and not (between in _DESCRIPTION_BYTES and os.pread(self._fd, 4, end) == _DESCRIBED):
            raise CheckpointError(
                self._file, f"entry {info.filename!r} ends at byte {end}; what follows it begins at {following}"
            )
        return start

    def _content(self, info: zipfile.ZipInfo, *, limit: int) -> bytes:
        """The bytes of a small entry."""
        if info.file_size > limit:
            rule = f"entry {info.filename!r} has {info.file_size} bytes; at most {limit} are read"
            raise CheckpointError(self._file, rule)
        content = os.pread(self._fd, info.file_size, self._data_start(info))
        if info.CRC and zlib.crc32(content) != info.CRC:  # torch writes 0 where it was told to spend no time on check sums
            raise CheckpointError(self._file, f"entry {info.filename!r} was changed: its check sum does not hold")
        return content


class _Stretch(io.RawIOBase):
    """A stretch of a file as a file of its own; the descriptor's position is not touched."""

    def __init__(self, fd: int, begin: int, length: int) -> None:
        self._fd, self._begin, self._length, self._place = fd, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if self._place < 0:
            raise ValueError("before the beginning")
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        wanted = view[: max(0, min(len(view), self._length - self._place))]
        got = os.preadv(self._fd, [wanted], self._begin + self._place) if len(wanted) else 0
        self._place += got
        return got


class _Bounded(io.BufferedReader):
    """Refuses to read much at once, as a directory of any size that it claims would be."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"its directory has {size} bytes; at most {_MAX_DIRECTORY_BYTES} are read")
        return super().read(size)


def _entries(stretch: _Stretch, file: str) -> tuple[dict[str, zipfile.ZipInfo], int]:
    """The archive's entries by name, and where its directory begins, which ends them; all must be stored as they are, since
    their bytes are read in place."""
    try:
        with zipfile.ZipFile(_Bounded(stretch)) as archive:
            infos, directory = archive.infolist(), archive.start_dir
    except Exception as error:  # zipfile raises nearly anything on a broken directory
        stretch.seek(0)
        refuse_pointer(file, stretch.read(64))
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
    if len({info.header_offset for info in infos}) != len(infos):
        raise CheckpointError(file, "holds two entries at one place")
    return entries, directory
