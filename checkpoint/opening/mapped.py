"""Slices of tensors as they lie in their files, mapped instead of read.

For a moment, not for good: the pages of a mapped file count as the process's resident memory, and a file that is cut while it
is mapped ends who looks behind its new end. So a view is made of pages that are there, and is given up soon, or made its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from checkpoint.dtypes import TORCH_DTYPES
from checkpoint.errors import CheckpointError
from checkpoint.layout import Stored
from checkpoint.opening.leases import Leases
from checkpoint.opening.slices import resolve_index

MOST_SPREAD: Final = 1.1
"""What a slice's bytes may take in its file, from the first to the last, beside what they are: of a slice of few columns nearly
every page of the tensor would be mapped."""
_POPULATE_READ: Final = 22
"""MADV_POPULATE_READ of <linux/mman.h>: fetch all pages now (Linux 5.14)."""
_MOVE: Final = 3
"""MREMAP_MAYMOVE | MREMAP_FIXED of <linux/mman.h>: to an address that is given, over what lies there."""
_PART_BYTES: Final = 2 << 20
"""What is copied at once."""
_FAILED: Final = ctypes.c_void_p(-1).value
"""What ``mmap`` gives where it fails."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def view_stored(
    files: Mapping[str, int],
    stored: Stored,
    index: tuple[slice, ...] | None,
    dtype: torch.dtype,
    leases: Leases | None = None,
) -> torch.Tensor | None:
    """``tensor[index]`` of two dimensions where it lies in its file; all its pages have been fetched.

    Args:
        files: descriptors by file name, which may be closed afterwards.
        stored: where the whole tensor lies.
        index: as of ``read_stored``.
        dtype: what it must be stored in.
        leases: where a lease on the file goes, which is taken first.

    Returns:
        A tensor that nobody may write to, the numbers of a row side by side; the pages are unmapped with the last tensor over
        them. ``None`` where the slice has to be made of what is stored, or is spread over more than ``MOST_SPREAD`` of its
        size, or its pages cannot be fetched so, or somebody who writes to the file holds a lease up.

    Raises:
        ValueError: ``index`` is not as described.
        CheckpointError: the file ends early.
    """
    starts, shape = resolve_index(stored.shape, index)
    if len(shape) != 2 or 0 in shape or TORCH_DTYPES[stored.dtype] != dtype:
        return None
    if stored.added is not None or stored.coded is not None or (stored.merge != "boxes" and len(stored.pieces) > 1):
        return None
    for piece in stored.pieces:
        bounds = zip(piece.start, piece.stop, starts, shape, strict=True)
        if all(first <= start and start + size <= last for first, last, start, size in bounds):
            break
    else:
        return None
    extent = piece.extent
    (row, column), (stride, step) = (a - b for a, b in zip(starts, piece.start, strict=True)), extent.strides
    offset = extent.offset_bytes + (row * stride + column * step) * extent.item_bytes
    if (step != 1 and shape[1] > 1) or offset % extent.item_bytes or TORCH_DTYPES[extent.dtype] != dtype:
        return None
    reach = (shape[0] - 1) * stride + shape[1]
    if reach > MOST_SPREAD * shape[0] * shape[1]:
        return None
    if leases is not None and not leases.take(files[piece.file]):
        return None
    flat = _map(files[piece.file], piece.file, offset, reach * extent.item_bytes)
    return None if flat is None else flat.view(dtype).as_strided(shape, (stride, 1))


def _map(fd: int, file: str, offset: int, num_bytes: int) -> torch.Tensor | None:
    """These bytes of a file, all of them fetched; ``None`` where the system does not do that."""
    begin, end = offset - offset % mmap.PAGESIZE, offset + num_bytes
    address = _libc.mmap(None, end - begin, mmap.PROT_READ, mmap.MAP_PRIVATE, fd, begin)
    if address == _FAILED:
        return None
    memory = (ctypes.c_char * num_bytes).from_address(address + offset - begin)
    weakref.finalize(memory, _libc.munmap, address, end - begin).atexit = False
    if not (_is_cached(address) and _is_cached(address + end - begin - 1)):
        with contextlib.suppress(OSError):  # it is advice: to ask for all at once, where the disk has a queue
            os.posix_fadvise(fd, begin, end - begin, os.POSIX_FADV_WILLNEED)
    fetched = _libc.madvise(address, end - begin, _POPULATE_READ) == 0
    if os.fstat(fd).st_size < end:  # behind the end of a file its last page has zeros, which can be fetched
        raise CheckpointError(file, f"ends before byte {end}, inside a tensor; it was cut after it was opened")
    return torch.frombuffer(memory, dtype=torch.uint8) if fetched else None  # where a disk fails, a read tells how


def _is_cached(address: int) -> bool:
    """Whether this byte of a mapped file is in the page cache, as far as the system tells."""
    told = ctypes.c_ubyte(1)
    _libc.mincore(address - address % mmap.PAGESIZE, 1, ctypes.byref(told))
    return bool(told.value & 1)


def keep(view: torch.Tensor) -> Iterator[None]:
    """Give what ``view_stored`` gave memory of its own in place of the file's, at the same address, a part with each step of
    this iterator: then it may stay for good.

    Any thread may read the tensor meanwhile: a part is copied elsewhere, and moved over the mapped one in one system call, for
    which whoever touches it waits.

    Raises:
        MemoryError: there is no room for a copy; the rest stays mapped, and can be read as before, unless the system had not
            even memory of its own in the middle of moving a part.
    """
    first = view.data_ptr() - view.data_ptr() % mmap.PAGESIZE
    end = -(-(view.data_ptr() + view.untyped_storage().nbytes()) // mmap.PAGESIZE) * mmap.PAGESIZE
    for begin in range(first, end, _PART_BYTES):
        size = min(_PART_BYTES, end - begin)
        own = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if own == _FAILED:
            raise MemoryError(f"no memory for {size} bytes of a weight: {os.strerror(ctypes.get_errno())}")
        ctypes.memmove(own, begin, size)
        if _libc.mremap(own, size, size, _MOVE, begin) == _FAILED:
            code = ctypes.get_errno()
            _libc.munmap(own, size)
            raise MemoryError(f"{size} bytes of a weight could not be moved: {os.strerror(code)}")
        yield
