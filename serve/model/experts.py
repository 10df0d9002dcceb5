"""Experts that a model holds stacked in one tensor: how a checkpoint stores them, and how ranks share each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from serve.errors import ConfigError
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
        """Each tensor of one of a rank's experts: its name, the rank's part of it, and in which rows of the rank's [O, I] that
        lies."""
        if shard is not None and shard.dim == 0:
            expert, shard = expert + shard.pieces[0].begin, None
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


def cut_experts(model: nn.Module, family: Family, size: int, rank: int, *, whole: bool) -> dict[str, ShardOf]:
    """A rank's share of the experts, whose products are summed over the ranks after them.

    Args:
        whole: some of the experts; else of every expert some of its inner features.
    """
    shards = {}
    for path, parameter in model.named_parameters():
        module, _, name = path.rpartition(".")
        if not family.experts or not module.endswith(family.experts):
            continue
        shape = tuple(parameter.shape)
        if whole:
            shards[path] = ShardOf(full_shape=shape, dim=0, pieces=(own_experts(shape[0], size, rank),))
        elif name in family.expert_cuts:
            dim, layout = family.expert_cuts[name]
            shards[path] = ShardOf(full_shape=shape, dim=dim, pieces=_pieces(layout, shape[dim], size, rank))
    return shards


def deals_out_experts(wanted: str, family: Family, model: nn.Module, size: int) -> bool:
    """Whether each rank gets some of the experts, not a part of each; ``wanted`` is ``model.experts``.

    Raises:
        ConfigError: the model has none, or fewer than there are ranks.
    """
    if wanted != "whole":
        return False
    counts = [cast(int, module.num_experts) for module in expert_modules(model, family)]
    if not counts or min(counts) < size:
        raise ConfigError(
            f"model.experts is whole and model.tensor_parallel_size {size}; a layer of this {family.name} has "
            f"{min(counts, default=0)} experts"
        )
    return size > 1


def own_experts(count: int, size: int, rank: int) -> Piece:
    """Which of so many experts a rank has, where they are dealt out whole."""
    return near_even(count, size, rank)


def only_own(forward: Callable[..., Tensor], own: Piece, *, skips: bool) -> Callable[..., Tensor]:
    """The forward of a layer's experts where the module has some of them: of tokens [T] routed to K of all, what its own add.

    Args:
        skips: it takes a number that is one more than the last for none, and so needs to know no number of rows; else it is
            given the rows of its own experts alone. No other is computed: what overflows would not be nothing times zero.
    """

    def by_number(hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        elsewhere_TK = (experts_TK < own.begin) | (experts_TK >= own.end)
        weights_TK = weights_TK.masked_fill(elsewhere_TK, 0.0)
        return forward(hidden_TH, (experts_TK - own.begin).masked_fill(elsewhere_TK, own.width), weights_TK)

    def by_rows(hidden_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        token_S, choice_S = torch.where((experts_TK >= own.begin) & (experts_TK < own.end))
        chosen_S1 = (experts_TK[token_S, choice_S] - own.begin)[:, None]
        given_SH = forward(hidden_TH[token_S], chosen_S1, weights_TK[token_S, choice_S][:, None])
        return torch.zeros_like(hidden_TH).index_add_(0, token_S, given_SH)

    return by_number if skips else by_rows


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
