"""Writes the tensors of a checkpoint into shards, one after the other, holding none of them in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from checkpoint.disk.durable import COPY_BYTES, Disk
from checkpoint.disk.manifest import FileEntry, TensorEntry, hash_file
from checkpoint.dtypes import DTYPE_NAMES
from checkpoint.errors import CheckpointError
from checkpoint.layout import DTYPE_BYTES
from checkpoint.readers.files.safetensors import SHARDING

HEADER_BYTES = 64 << 10
"""Room kept for a shard's header, which is known only when its last tensor is written; the format fills it with spaces.
A shard whose header is full ends there (about 500 tensors)."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class ShardWriter:
    """Owns the shards of one checkpoint while they are written in its temporary folder.

    Always true: every tensor added is in exactly one shard; all shards but the open one are flushed and hashed.
    """

    def __init__(
        self, folder: Path, disk: Disk, *, max_shard_bytes: int, stem: str = "model", header_bytes: int = HEADER_BYTES
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._max_shard_bytes = max_shard_bytes
        self._stem = stem
        self._header_bytes = header_bytes
        self._fd: int | None = None
        self._header: dict[str, Any] = {}
        self._header_used = 0
        self._data_bytes = 0
        self._starts: dict[str, Any] = {}
        self._done: list[tuple[Path, FileEntry]] = []
        self._tensors: dict[str, tuple[int, str, tuple[int, ...]]] = {}

    def add(self, name: str, tensor: torch.Tensor, start: tuple[int, ...] | None = None) -> None:
        """Append one tensor, opening the next shard where this one is full; copied from its device piece by piece.

        Args:
            start: where it begins in the whole tensor, of files that hold parts of tensors; their headers say so.
        """
        num_bytes = tensor.numel() * tensor.element_size()
        end = self._data_bytes + num_bytes
        dtype = DTYPE_NAMES[tensor.dtype]
        entry = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [self._data_bytes, end]}
        # Twenty digits in place of shorter offsets: an upper bound that does not depend on where the tensor comes to lie.
        entry_bytes = len(json.dumps({name: entry})) + 40
        beginning = {} if start is None else {name: {"saved_offsets": list(start)}}
        entry_bytes += len(json.dumps(json.dumps(beginning)))
        if entry_bytes > self._header_bytes // 2:
            raise CheckpointError(
                name[:80], f"this tensor's name takes {entry_bytes} bytes; the header has room for {self._header_bytes // 2}"
            )
        if self._fd is not None and (end > self._max_shard_bytes or self._header_used + entry_bytes > self._header_bytes):
            self._finish_shard()
            entry["data_offsets"] = [0, num_bytes]
        fd, path = self._open_shard()
        self._header_used += entry_bytes
        self._header[name] = entry
        self._starts |= beginning
        self._tensors[name] = (len(self._done), dtype, tuple(tensor.shape))
        for piece in _pieces(tensor.detach()):
            with piece.view(torch.uint8).numpy().data as view:
                self._disk.write(fd, path, view, self._header_bytes + self._data_bytes)
            self._data_bytes += piece.numel() * piece.element_size()

    def finish(self) -> tuple[dict[str, FileEntry], dict[str, TensorEntry]]:
        """End the last shard, give all their final names and write the index if there are several.

        Returns:
            what was written: files by name, tensors by name.
        """
        if self._fd is not None:
            self._finish_shard()
        total = len(self._done)
        stem = self._stem
        names = [f"{stem}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
        if total == 1:
            names = [f"{stem}.safetensors"]
        files: dict[str, FileEntry] = {}
        for (path, entry), name in zip(self._done, names, strict=True):
            self._disk.rename(path, self._folder / name)
            files[name] = entry
        tensors = {name: TensorEntry(dtype, shape, names[at]) for name, (at, dtype, shape) in self._tensors.items()}
        if total > 1:
            index = f"{stem}.safetensors.index.json"
            files[index] = self._disk.write_file(self._folder / index, _index(tensors))
        return files, tensors

    def close(self) -> None:
        """Give up the open shard."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _path(self) -> Path:
        return self._folder / f"{self._stem}-{len(self._done):05d}.part"

    def _open_shard(self) -> tuple[int, Path]:
        """The shard that is being written, a new one if there is none."""
        path = self._path()
        if self._fd is None:
            self._fd = self._disk.create(path)
            self._header = {"__metadata__": {"format": "pt"}}
            self._header_used = len(json.dumps(self._header)) + 100
            self._data_bytes = 0
        return self._fd, path

    def _finish_shard(self) -> None:
        """Write the header into the room kept for it, flush, and hash what the file now holds."""
        fd, path = self._open_shard()
        if self._starts:
            self._header["__metadata__"] |= {SHARDING: json.dumps(self._starts), "DCP_VERSION": "1.0"}
            self._starts = {}
        header = json.dumps(self._header, separators=(",", ":")).encode()
        assert len(header) <= self._header_bytes - 8, "a header entry took more than its bound"
        head = (self._header_bytes - 8).to_bytes(8, "little") + header.ljust(self._header_bytes - 8)
        self._disk.write(fd, path, memoryview(head), 0)
        self._disk.flush(fd, path)
        self._done.append((path, FileEntry(os.fstat(fd).st_size, hash_file(fd, path.name))))
        self.close()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor's elements in row-major order, as flat CPU tensors of at most ``COPY_BYTES``, or of one element."""
    if tensor.is_contiguous():
        for piece in torch.split(_flat(tensor), max(1, COPY_BYTES // tensor.element_size())):
            yield piece.cpu()
        return
    rows = max(1, COPY_BYTES * tensor.shape[0] // (tensor.numel() * tensor.element_size()))
    for block in torch.split(tensor, rows):
        if rows > 1 or block.numel() * block.element_size() <= COPY_BYTES:
            yield _flat(block.contiguous()).cpu()
        else:
            yield from _pieces(block[0])


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension of stride 1; ``view(-1)`` would keep any stride where there is but one element."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _index(tensors: dict[str, TensorEntry]) -> bytes:
    """The index as transformers reads it."""
    total = 0
    for entry in tensors.values():
        size = DTYPE_BYTES[entry.dtype]
        for count in entry.shape:
            size *= count
        total += size
    content = {"metadata": {"total_size": total}, "weight_map": {name: entry.file for name, entry in tensors.items()}}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
