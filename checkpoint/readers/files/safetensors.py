"""Finds the tensors of one ``.safetensors`` file.

Layout: 8 bytes little-endian header length; a JSON header ``{name: {dtype, shape, data_offsets}}``, padded with spaces; data.
``data_offsets`` are half-open, count from the end of the header, and must cover the rest of the file without hole or overlap.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from checkpoint.disk.folder import parse_object, refuse_pointer
from checkpoint.errors import CheckpointError, shown
from checkpoint.layout import DTYPE_BYTES, MAX_DIMENSIONS, Extent, contiguous_strides, zero_size_rule

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

SHARDING = "DCP_SHARDING_INFO"
"""In ``__metadata__``: the JSON of where each of the file's tensors begins in the whole one, by torch's writer of parts."""


def index_safetensors(fd: int, file: str, *, listed: bool = False) -> dict[str, Extent]:
    """Read the header and prove that it describes the file, byte for byte.

    Args:
        listed: an index of whole tensors lists the file; then it may say that each of its tensors is a part that begins where
            the whole one does, as torch's writer says of whole ones.

    Raises:
        CheckpointError: whatever does not hold, with the tensor's name where there is one.
    """
    found, metadata = index_parts(fd, file)
    if SHARDING in metadata and not (listed and _begins_whole(file, metadata[SHARDING], found)):
        rule = f"holds parts of tensors, by {SHARDING} of its header; as whole tensors they would be wrong"
        raise CheckpointError(file, f"{rule}: keep the name torch gave it, shard-00001-model-00001-of-00001.safetensors")
    for name, extent in found.items():
        if 0 in extent.shape:
            raise CheckpointError(file, zero_size_rule(name, extent.shape))
    if not found:
        raise CheckpointError(file, "holds no tensor")
    return found


def _begins_whole(file: str, told: Any, held: Collection[str]) -> bool:
    """Whether each tensor of a file begins where the whole one does."""
    offsets = parse_object(file, told.encode()) if isinstance(told, str) else {}
    begun = [entry.get("saved_offsets") for entry in offsets.values() if isinstance(entry, dict)]
    return offsets.keys() == set(held) and all(
        isinstance(at, list) and all(type(n) is int and n == 0 for n in at) for at in begun
    )


def index_parts(fd: int, file: str) -> tuple[dict[str, Extent], dict[str, Any]]:
    """Read the header of a file that may hold parts of tensors, or none, and prove that it describes the file, byte for byte.

    Returns:
        where each tensor lies, by its name; and the header's ``__metadata__``, empty where it has none.

    Raises:
        CheckpointError: whatever does not hold, with the tensor's name where there is one.
    """
    size = os.fstat(fd).st_size
    header, data_start = _read_header(fd, file, size)
    metadata = header.pop("__metadata__", None)
    found: dict[str, Extent] = {}
    ranges: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        extent, begin, end = _entry(file, name, entry, data_start)
        found[name] = extent
        ranges.append((begin, end, name))
    _check_cover(file, sorted(ranges), size - data_start)
    return found, metadata if isinstance(metadata, dict) else {}


def _read_header(fd: int, file: str, size: int) -> tuple[dict[str, Any], int]:
    """The parsed header and the offset of the first data byte."""
    if size < 8:
        raise CheckpointError(file, f"has {size} bytes; a safetensors file has at least 8")
    begin = os.pread(fd, 64, 0)
    refuse_pointer(file, begin)
    length = int.from_bytes(begin[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(file, f"gives its header {length} bytes; at most {MAX_HEADER_BYTES} are allowed")
    if 8 + length > size:
        raise CheckpointError(file, f"is cut short: its header alone has {length} bytes, the file {size}")
    data = os.pread(fd, length, 8)
    if len(data) != length or not data.startswith(b"{"):
        raise CheckpointError(file, "has a header that is not a JSON object")
    return parse_object(file, data), 8 + length


def _entry(file: str, name: str, entry: Any, data_start: int) -> tuple[Extent, int, int]:
    """One tensor's place, and its byte range counted from the start of the data."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(file, f"tensor {name!r} must have dtype, shape and data_offsets, and nothing else")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        what = ", as quantised weights have" if str(dtype).startswith(("F8", "F4", "F6")) else ""
        raise CheckpointError(file, f"tensor {name!r} has dtype {dtype!r}{what}; supported are {', '.join(DTYPE_BYTES)}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _counts(shape, MAX_DIMENSIONS):
        rule = f"tensor {name!r} has shape {shown(shape)}; it must be a list of counts, at most {MAX_DIMENSIONS}"
        raise CheckpointError(file, rule)
    if not _counts(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        rule = f"tensor {name!r} has data_offsets {shown(offsets)}; they must be a begin and an end after it"
        raise CheckpointError(file, rule)
    begin, end = offsets
    num_bytes = DTYPE_BYTES[dtype]
    for count in shape:
        num_bytes *= count
    if num_bytes != end - begin:
        rule = f"tensor {name!r} of dtype {dtype} and shape {shape} is {num_bytes} bytes, its offsets give {end - begin}"
        raise CheckpointError(file, rule)
    return Extent(dtype, tuple(shape), contiguous_strides(tuple(shape)), data_start + begin), begin, end


def _counts(value: Any, most: int) -> bool:
    """Whether this is a list of at most ``most`` integers from 0 up (JSON's ``true`` is no integer here)."""
    return isinstance(value, list) and len(value) <= most and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(file: str, ranges: list[tuple[int, int, str]], data_bytes: int) -> None:
    """The tensors' ranges, in order, must touch and end with the file."""
    reached = 0
    for begin, end, name in ranges:
        if begin < reached:
            raise CheckpointError(file, f"tensor {name!r} begins at data byte {begin}, inside the tensor before it")
        if begin > reached:
            raise CheckpointError(file, f"data bytes {reached} to {begin}, before tensor {name!r}, belong to no tensor")
        reached = end
    if reached > data_bytes:
        raise CheckpointError(file, f"is cut short: its tensors take {reached} data bytes, the file has {data_bytes}")
    if reached < data_bytes:
        raise CheckpointError(file, f"has {data_bytes - reached} bytes after its last tensor")
