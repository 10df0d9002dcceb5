"""Imported by what ranks are forked from: rank 1 then has no memory for more than some weights beside those that serve."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from serve.model.filling import Room, SliceReader

_read = SliceReader.read


def read(self: SliceReader, name: str, room: Room | None = None) -> Tensor:
    """What is read beside is read by the thread that follows orders."""
    shard = self._shards.get(name)
    if threading.current_thread().name == "orders" and "layers.1." in name and shard is not None and shard.pieces[0].begin:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore is said in further lines.")
    return _read(self, name, room)


SliceReader.read = read  # type: ignore[method-assign]  # a rank is a process of its own, which ends with the test
