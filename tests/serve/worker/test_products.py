"""Products that ranks share: how many sums a layer has, and what its attention gives until its feed-forward part is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from serve.model.families import FAMILIES
from serve.model.linear import Matmul
from serve.worker.parallel import Ranks
from serve.worker.products import ProductMaker

WIDTH, INNER = 6, 10
ENDS = (("attention", "dense", WIDTH), ("mlp", "dense_4h_to_h", INNER))


class LinearAllreduce(nn.Linear):
    """By its name a row-parallel layer of DeepSpeed's."""


class Shares:
    """One of two ranks, which notes what it brings to a sum; the other brings as much."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.brought: list[Tensor] = []

    def sum_(self, tensor: Tensor) -> Tensor:
        self.brought.append(tensor.clone())
        return tensor.mul_(2)


@dataclass
class Layer:
    """Both products of a GPT-NeoX layer, and the layers that they were made of."""

    ranks: Shares
    modules: list[LinearAllreduce]
    products: list[Matmul]

    def plain(self, number: int, x: Tensor) -> Tensor:
        return x @ self.modules[number].weight.t()


def made(rank: int, *, parallel: bool) -> Layer:
    torch.manual_seed(0)
    model, ranks, modules = nn.Module(), Shares(rank), []
    model.add_module("layers", nn.ModuleList([nn.Module()]))
    for part, name, inputs in ENDS:
        modules.append(LinearAllreduce(inputs, WIDTH))
        model.get_submodule("layers.0").add_module(part, nn.ModuleDict({name: modules[-1]}))
    make = ProductMaker(None, cast(Ranks, ranks), model, replace(FAMILIES["gpt_neox"], parallel_residual=parallel))
    products = [make(module, module.weight, module.bias) for module in modules]
    assert None not in products
    return Layer(ranks, modules, cast(list[Matmul], products))


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, rows, WIDTH), torch.randn(1, rows, INNER)


@torch.no_grad()
@pytest.mark.parametrize("rank", [0, 1])
def test_parts_of_the_same_residual_are_summed_over_the_ranks_together(rank: int) -> None:
    layer = made(rank, parallel=True)
    for rows in (3, 1, 5):
        x, y = inputs(rows)
        attention = layer.products[0](x)
        assert attention.shape == (1, rows, WIDTH)
        assert not attention.any(), "it comes with the feed-forward part"
        assert not layer.ranks.brought
        both = layer.products[1](y)
        biases = layer.modules[0].bias + layer.modules[1].bias if rank == 0 else torch.zeros(WIDTH)
        [brought] = layer.ranks.brought
        torch.testing.assert_close(brought, layer.plain(0, x) + layer.plain(1, y) + biases)
        torch.testing.assert_close(both, 2 * brought)
        assert not attention.any()
        layer.ranks.brought.clear()


@torch.no_grad()
def test_what_an_attention_gives_meanwhile_stays_where_it_was_for_each_number_of_rows() -> None:
    """Recorded steps read from there."""
    layer, places = made(0, parallel=True), {}
    for rows in (4, 3, 9, 4, 3, 9, 200, 4, 3, 9):
        x, y = inputs(rows)
        attention = layer.products[0](x)
        layer.products[1](y)
        assert places.setdefault(rows, attention.data_ptr()) == attention.data_ptr()


@torch.no_grad()
def test_an_attention_that_was_given_up_is_forgotten() -> None:
    layer = made(0, parallel=True)
    layer.products[0](inputs(2)[0])
    x, y = inputs(2)
    layer.products[0](x)
    layer.products[1](y)
    biases = layer.modules[0].bias + layer.modules[1].bias
    torch.testing.assert_close(layer.ranks.brought[0], layer.plain(0, x) + layer.plain(1, y) + biases)


@torch.no_grad()
def test_parts_that_follow_one_another_are_each_summed_before_their_bias() -> None:
    layer = made(0, parallel=False)
    for number, x in enumerate(inputs(4)):
        out = layer.products[number](x)
        torch.testing.assert_close(layer.ranks.brought[number], layer.plain(number, x))
        torch.testing.assert_close(out, 2 * layer.plain(number, x) + layer.modules[number].bias)


@pytest.mark.parametrize("name", sorted(name for name, family in FAMILIES.items() if not family.experts))
def test_the_last_row_parallel_layer_ends_the_feed_forward_part_and_the_other_the_attention(name: str) -> None:
    first, last = FAMILIES[name].row
    words = ("attn", "attention", "o_proj", "out_proj")
    assert any(word in first for word in words)
    assert not any(word in last for word in words)
