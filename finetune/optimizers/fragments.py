"""Which part of which parameter lies where in ZeRO's flat tensors: read once from the objects DeepSpeed has made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """What this rank holds of one parameter: a range of its elements in row-major order, and its place in a flat tensor.

    The fragments of all peers, in their order, are the whole parameter, each element once.
    """

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
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
        """Of a vector with a number for each row of the matrix, those of these rows, as a view."""
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


def fragments_of(zero: Any, names: Mapping[nn.Parameter, str], *, stage: int, rank: int) -> list[Fragments]:
    """The fragments of each of this rank's flat fp32 tensors, in DeepSpeed's order.

    Args:
        zero: DeepSpeed's ZeRO optimizer.
        names: of all trained parameters.
    """
    if stage == 3:
        return [_in_equal_parts(group, names, rank) for group in zero.fp16_groups]
    return ranges_of(zero.bit16_groups, names)


def ranges_of(groups: Sequence[Sequence[nn.Parameter]], names: Mapping[nn.Parameter, str]) -> list[Fragments]:
    """The same where each rank has one range of all parameters of a group: ZeRO-1 and 2, and DeepSpeed's bf16 optimizer."""
    return [[_in_one_range(parameter, names[parameter]) for parameter in group] for group in groups]


def all_of(parameter: nn.Parameter, name: str) -> Fragments:
    """A parameter that is whole on every rank, as a tensor of its own."""
    return [Fragment(name=name, shape=tuple(parameter.shape), start=0, count=parameter.numel(), offset=0)]


def _in_equal_parts(group: Sequence[Any], names: Mapping[nn.Parameter, str], rank: int) -> Fragments:
    """ZeRO-3 cuts each parameter into equal parts, one a rank; the last ones may end in padding, which is no fragment's."""
    found: list[Fragment] = []
    offset = 0
    for parameter in group:
        size, whole = parameter.partition_numel(), parameter.ds_numel
        start = min(rank * size, whole)
        shape = tuple(parameter.ds_shape)
        count = min(size, whole - start)
        found.append(Fragment(name=names[parameter], shape=shape, start=start, count=count, offset=offset))
        offset += size
    return found


def _in_one_range(parameter: Any, name: str) -> Fragment:
    """ZeRO-1 and 2 cut all parameters of a group, laid end to end, into one range a rank."""
    shape = tuple(parameter.shape)
    linked = parameter._hp_mapping
    if linked is None:
        return Fragment(name=name, shape=shape, start=0, count=0, offset=0)
    here, there = linked.lp_fragment_address, linked.hp_fragment_address
    return Fragment(name=name, shape=shape, start=here.start, count=here.numel, offset=there.start)
