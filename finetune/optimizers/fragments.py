"""Which part of which parameter lies where in ZeRO's flat tensors: read once from the objects DeepSpeed has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What this rank holds of one parameter: a range of its elements in row-major order, and its place in a flat tensor.

    The fragments of all peers, in their order, are the whole parameter, each element once.
    """

    name: str
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    start: int
    """First element held, of the flattened parameter."""
    count: int
    """Elements held; 0 where other ranks hold all of it."""
    offset: int
    """Place of the first one in the flat tensor."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """This fragment's elements, as a view."""
        return flat.view(-1).narrow(0, self.offset, self.count)


Fragments = Sequence[Fragment]
"""All parameters of one flat tensor in order: the same ones on every rank, of other sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring elements of a matrix that fill whole rows, or a part of one row."""

    first: int
    """Row of the matrix in which they begin."""
    rows: int
    columns: int
    offset: int
    """Place of the first one in the flat tensor."""

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """These elements, (rows, columns), as a view."""
        return flat.view(-1).narrow(0, self.offset, self.rows * self.columns).view(self.rows, self.columns)

    def of_rows(self, by_row: torch.Tensor) -> torch.Tensor:
        """The numbers of this piece's rows, as a view of ``by_row``, which has one for each row of the matrix."""
        return by_row.narrow(0, self.first, self.rows)


def pieces_of(fragment: Fragment) -> list[Piece]:
    """A fragment of a matrix as at most three pieces: the end of a row, whole rows, the beginning of a row."""
    columns = fragment.shape[1]
    place, end = fragment.start, fragment.start + fragment.count
    found: list[Piece] = []
    while place < end:
        row, column = divmod(place, columns)
        rows = (end - place) // columns if column == 0 else 0
        taken = rows * columns or min(end - place, columns - column)
        offset = fragment.offset + place - fragment.start
        found.append(Piece(first=row, rows=max(1, rows), columns=columns if rows else taken, offset=offset))
        place += taken
    return found


class _Groups(Protocol):
    """What is read of DeepSpeed's ZeRO optimizer, of which each stage has its own: the parameters of each flat tensor."""

    fp16_groups: Sequence[Sequence[nn.Parameter]]
    """Parameters of each flat tensor under ZeRO-3."""
    bit16_groups: Sequence[Sequence[nn.Parameter]]
    """Parameters of each flat tensor under ZeRO-1 and 2."""


class Partitioned(Protocol):
    """What ZeRO-3 adds to a parameter."""

    ds_numel: int
    ds_shape: Sequence[int]
    """Shape of the whole parameter; ``ds_tensor`` is this rank's part."""
    ds_tensor: torch.Tensor
    """This rank's part, flat."""

    def partition_numel(self) -> int:
        """Elements of each rank's part, padding counted."""
        ...


class _Range(Protocol):
    start: int
    numel: int


class _Link(Protocol):
    """Where this rank's fp32 part of a parameter is."""

    lp_fragment_address: _Range
    """In the flattened parameter."""
    hp_fragment_address: _Range
    """In the flat tensor."""


class _Linked(Protocol):
    """What ZeRO-1, ZeRO-2 and the bf16 optimizer add to a parameter."""

    _hp_mapping: _Link | None


def fragments_of(zero: _Groups, names: Mapping[nn.Parameter, str], *, stage: int, rank: int) -> list[Fragments]:
    """The fragments of each of this rank's flat fp32 tensors, in DeepSpeed's order.

    Args:
        zero: DeepSpeed's ZeRO optimizer of that stage.
        names: of all trained parameters.
    """
    if stage == 3:
        return [_in_equal_parts(group, names, rank) for group in zero.fp16_groups]
    return ranges_of(zero.bit16_groups, names)


def ranges_of(groups: Sequence[Sequence[nn.Parameter]], names: Mapping[nn.Parameter, str]) -> list[Fragments]:
    """The fragments of flat tensors of which each rank has one range: ZeRO-1 and 2, and DeepSpeed's bf16 optimizer."""
    return [[_in_one_range(parameter, names[parameter]) for parameter in group] for group in groups]


def all_of(parameter: nn.Parameter, name: str) -> Fragments:
    """A parameter that is whole on every rank, as a tensor of its own."""
    return [Fragment(name=name, shape=tuple(parameter.shape), start=0, count=parameter.numel(), offset=0)]


def _in_equal_parts(group: Sequence[nn.Parameter], names: Mapping[nn.Parameter, str], rank: int) -> Fragments:
    """ZeRO-3 cuts each parameter into equal parts, one a rank; the last ones may end in padding, which is no fragment's."""
    found: list[Fragment] = []
    offset = 0
    for parameter in group:
        cut = cast(Partitioned, parameter)
        size, whole = cut.partition_numel(), cut.ds_numel
        start = min(rank * size, whole)
        shape = tuple(cut.ds_shape)
        count = min(size, whole - start)
        found.append(Fragment(name=names[parameter], shape=shape, start=start, count=count, offset=offset))
        offset += size
    return found


def _in_one_range(parameter: nn.Parameter, name: str) -> Fragment:
    """ZeRO-1 and 2 cut all parameters of a group, laid end to end, into one range a rank."""
    shape = tuple(parameter.shape)
    linked = cast(_Linked, parameter)._hp_mapping
    if linked is None:
        return Fragment(name=name, shape=shape, start=0, count=0, offset=0)
    here, there = linked.lp_fragment_address, linked.hp_fragment_address
    return Fragment(name=name, shape=shape, start=here.start, count=here.numel, offset=there.start)
