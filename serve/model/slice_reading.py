"""Reads a rank's part of each parameter from a checkpoint, whole or by rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from checkpoint import Checkpoint, CheckpointError
from checkpoint.opening.leases import Leases
from serve.errors import ConfigError
from serve.model.experts import stored_name
from serve.model.load import Blueprint, is_stored
from serve.model.shards import ShardOf
from serve.model.weight_memory import WeightMemory


class Room(Protocol):
    """Makes a tensor [shape] of the model's type, on its device, that is to be written to."""

    def __call__(self, shape: tuple[int, ...]) -> Tensor: ...


class Staging:
    """Memory that one weight after another is read into, where only what is made of each is kept.

    Memory that was never touched costs as much as reading into it. What is larger than ``MOST_BYTES`` gets memory of its own,
    which is free again before the next is read.
    """

    MOST_BYTES: Final = 64 << 20

    def __init__(self, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype)

    def __call__(self, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if count * self._memory.itemsize > self.MOST_BYTES:
            return torch.empty(shape, dtype=self._memory.dtype)
        if count > self._memory.numel():
            self._memory = torch.empty(count, dtype=self._memory.dtype)
        return self._memory[:count].view(shape)


class SliceReader:
    """Reads this rank's part of each parameter, in the model's type, onto its device."""

    def __init__(
        self, checkpoint: Checkpoint, blueprint: Blueprint, shards: Mapping[str, ShardOf], device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._blueprint = blueprint
        self._shards = shards
        self._device = device
        self._memory = WeightMemory()
        self.on_cpu: Final = device.type == "cpu"

    def read(self, name: str, room: Room | None = None) -> Tensor:
        """The tensor as the model wants it; [out, in] for weights that are stored transposed.

        Args:
            room: where it is read to; a new tensor without it.
        """
        shard, shape = self._shards.get(name), self.shape(name)
        out = self.new(shape) if room is None else room(shape)
        if name in self._blueprint.stacks:
            for expert in range(shape[0]):
                self._fill_expert(name, expert, out[expert])
            return out
        dim, target = 0 if shard is None else shard.dim, out
        if name in self._blueprint.transposed:  # a dimension of the model's [out, in] is the other one of a stored [in, out]
            dim, target = 1 - dim, out.t()
        self._fill_pieces(self._stored(name), shard, dim, target)
        return out

    def read_expert(self, name: str, expert: int, room: Room | None = None) -> Tensor:
        """One expert's part of a stack, as it lies there: without the first of the stack's dimensions.

        Args:
            room: as in ``read``.
        """
        shape = self.shape(name)[1:]
        out = self.new(shape) if room is None else room(shape)
        self._fill_expert(name, expert, out)
        return out

    def _fill_expert(self, name: str, expert: int, out: Tensor) -> None:
        shard = self._shards.get(name)
        if (stack := self._blueprint.stacks.get(name)) is not None:
            for part, index, rows in stack.parts(expert, shard):
                self._fill(self._stored(part), index, out[rows])
            return
        if shard is not None and shard.dim == 0:  # whole experts
            expert, shard = expert + shard.pieces[0].begin, None
        dim, only = 0 if shard is None else shard.dim, slice(expert, expert + 1)
        self._fill_pieces(self._stored(name), shard, dim, out.unsqueeze(0), only)

    def _fill_pieces(self, stored: str, shard: ShardOf | None, dim: int, out: Tensor, first: slice | None = None) -> None:
        """Fill ``out`` with a shard's pieces of a stored tensor's dimension ``dim``; ``first``: of its first alone."""
        if shard is None:
            self._fill(stored, None if first is None else (first,), out)
            return
        before, begin = (first or slice(None), *[slice(None)] * dim)[:dim], 0
        for piece in shard.pieces:
            width = piece.end - piece.begin
            self._fill(stored, (*before, slice(piece.begin, piece.end)), out.narrow(dim, begin, width))
            begin += width

    def reads_rows(self, name: str) -> bool:
        """Whether rows of a parameter [O, I] can be read as cheaply as the whole: they lie as the model wants them."""
        is_as_wanted = name not in self._blueprint.stacks and name not in self._blueprint.transposed
        return is_as_wanted and not self._checkpoint.tensors[self._stored(name)].adapted and len(self.shape(name)) == 2

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of this rank's part of a parameter."""
        if (shard := self._shards.get(name)) is not None:
            return shard.shape
        if (stack := self._blueprint.stacks.get(name)) is not None:
            return stack.shape
        whole = self._checkpoint.tensors[self._stored(name)].shape
        return whole[::-1] if name in self._blueprint.transposed else whole

    def read_rows(self, name: str, begin: int, out: Tensor) -> None:
        """Fill ``out`` with the rows from ``begin`` of this rank's part of a parameter; see ``reads_rows``."""
        stored, shard, end = self._stored(name), self._shards.get(name), begin + out.shape[0]
        if shard is None:
            self._fill(stored, (slice(begin, end),), out)
            return
        place = 0
        for piece in shard.pieces:
            width = piece.end - piece.begin
            if shard.dim == 1:
                self._fill(stored, (slice(begin, end), slice(piece.begin, piece.end)), out[:, place : place + width])
            elif (first := max(begin, place)) < (last := min(end, place + width)):
                offset = piece.begin - place
                self._fill(stored, (slice(first + offset, last + offset),), out[first - begin : last - begin])
            place += width

    def view(self, name: str, leases: Leases) -> Tensor | None:
        """This rank's part of a parameter [O, I] where it lies in its file, with a lease on the file; ``None`` where it is to
        be read. See ``Checkpoint.view``. Of one that is stored transposed the columns lie side by side."""
        shard, is_transposed = self._shards.get(name), name in self._blueprint.transposed
        if not self.on_cpu or not (is_transposed or self.reads_rows(name)) or (shard is not None and len(shard.pieces) > 1):
            return None
        index: tuple[slice, ...] | None = None
        if shard is not None:
            dim = 1 - shard.dim if is_transposed else shard.dim
            index = (*[slice(None)] * dim, *(slice(piece.begin, piece.end) for piece in shard.pieces))
        try:
            view = self._checkpoint.view(self._stored(name), index, dtype=self._blueprint.dtype, leases=leases)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        return view.t() if is_transposed and view is not None else view

    def new(self, shape: tuple[int, ...]) -> Tensor:
        """A tensor that stays, whose values are not set."""
        dtype = self._blueprint.dtype
        return self._memory.empty(shape, dtype) if self.on_cpu else torch.empty(shape, dtype=dtype, device=self._device)

    def _stored(self, name: str) -> str:
        """The checkpoint's name of a parameter."""
        if not is_stored(self._checkpoint, name):
            name = stored_name(self._blueprint.family, name)
        try:
            return self._checkpoint.resolve(name, self._blueprint.aliases)  # a stage may have the alias alone
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def _fill(self, stored: str, index: tuple[slice, ...] | None, out: Tensor) -> None:
        try:
            self._checkpoint.read(stored, index, out=out)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
