"""Imported by what ranks are forked from: rank 1 then has no memory for more than some weights beside those that serve."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from serve.model.slice_reading import SliceReader

_fill = SliceReader._fill


def fill(self: SliceReader, stored: str, index: tuple[slice, ...] | None, out: Tensor) -> None:
    """What is read beside is read by the thread that follows orders."""
    shard = self._shards.get(stored)
    if threading.current_thread().name == "orders" and "layers.1." in stored and shard is not None and shard.pieces[0].begin:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore is said in further lines.")
    _fill(self, stored, index, out)


SliceReader._fill = fill  # type: ignore[method-assign]  # a rank is a process of its own, which ends with the test
