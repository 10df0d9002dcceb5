"""Experts that a model holds stacked in one tensor: how a checkpoint stores them, and how ranks share each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from serve.model.families import HALVES, PAIRS, Family
from serve.model.heads import Piece, near_even
from serve.model.shards import ShardOf

# Shapes.  E experts   O rows of a stack, over all of an expert's tensors   I columns


@dataclass(frozen=True, slots=True)
class Stack:
    """A parameter [E, O, I] that is stored as several tensors for each expert."""

    names: tuple[tuple[str, ...], ...]
    """The tensors of each expert, whose rows lie one after the other."""
    shape: tuple[int, ...]

    def stored(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Each tensor's name and shape."""
        for expert in self.names:
            for name in expert:
                yield name, (self.shape[1] // len(expert), self.shape[2])

    def parts(self, expert: int, shard: ShardOf | None) -> Iterator[tuple[str, tuple[slice, ...] | None, slice]]:
        """Each tensor of one expert: its name, a rank's part of it, and in which rows of the rank's [O, I] that lies."""
        names = self.names[expert]
        begin = 0
        for number, name in enumerate(names):
            index = None if shard is None else self._index(shard, number, len(names))
            rows = self.shape[1] // len(names) if index is None or len(index) > 1 else index[0].stop - index[0].start
            yield name, index, slice(begin, begin + rows)
            begin += rows

    def _index(self, shard: ShardOf, number: int, parts: int) -> tuple[slice, ...]:
        if shard.dim == 2:
            [piece] = shard.pieces
            return slice(None), slice(piece.begin, piece.end)
        piece, offset = shard.pieces[number], number * self.shape[1] // parts
        return (slice(piece.begin - offset, piece.end - offset),)


def stacks_of(family: Family, parameters: Mapping[str, nn.Parameter]) -> dict[str, Stack]:
    """The stacks among a model's parameters that checkpoints store by expert."""
    found = {}
    for path, parameter in parameters.items():
        module, _, name = path.rpartition(".")
        if family.experts and module.endswith(family.experts) and name in family.expert_tensors:
            place = stored_name(family, module)
            names = tuple(
                tuple(f"{place}.{expert}.{tensor}.weight" for tensor in family.expert_tensors[name])
                for expert in range(parameter.shape[0])
            )
            found[path] = Stack(names, tuple(parameter.shape))
    return found


def stored_name(family: Family, path: str) -> str:
    """What a checkpoint calls a parameter of the model."""
    ours, theirs = family.stored_as
    return path.replace(ours, theirs, 1) if ours else path


def cut_experts(model: nn.Module, family: Family, size: int, rank: int) -> dict[str, ShardOf]:
    """A rank's share of every expert: some of its inner features, so that the ranks' products are summed after it."""
    shards = {}
    for path, parameter in model.named_parameters():
        module, _, name = path.rpartition(".")
        if family.experts and module.endswith(family.experts) and name in family.expert_cuts:
            dim, layout = family.expert_cuts[name]
            shape = tuple(parameter.shape)
            shards[path] = ShardOf(full_shape=shape, dim=dim, pieces=_pieces(layout, shape[dim], size, rank))
    return shards


def _pieces(layout: str, whole: int, size: int, rank: int) -> tuple[Piece, ...]:
    if layout == HALVES:
        own = near_even(whole // 2, size, rank)
        return own, Piece(own.begin + whole // 2, own.end + whole // 2)
    if layout == PAIRS:
        own = near_even(whole // 2, size, rank)
        return (Piece(own.begin * 2, own.end * 2),)
    return (near_even(whole, size, rank),)


def stacked_experts(model: nn.Module, family: Family) -> list[nn.Module]:
    """The experts of every layer that keeps them stacked; those that were packed one by one have no parameters any more."""
    return [module for module in expert_modules(model, family) if next(module.parameters(), None) is not None]


def expert_modules(model: nn.Module, family: Family) -> list[nn.Module]:
    """The experts of every layer that has some."""
    return [module for path, module in model.named_modules() if family.experts and path.endswith("." + family.experts)]
