"""What a rank holds of each parameter: over all ranks every element once, and a matrix in pieces of whole or part rows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import chain
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from finetune.distributed import Grid, Peers
from finetune.optimizers.fragments import Fragment, Fragments, all_of, fragments_of, pieces_of, ranges_of
from finetune.optimizers.state import groups_of, matrices_of, state_of, whole_state_of
from tests.support.models import build


@dataclass(frozen=True)
class Cut:
    """Parameters as ZeRO leaves them on each of some ranks, and each rank's flat tensor of the numbers 0, 1, 2 and so on."""

    parameters: list[nn.Parameter]
    names: dict[nn.Parameter, str]
    flats: list[torch.Tensor]
    fragments: list[Fragments]


def values_of(shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
    """Every element of all parameters has a number of its own."""
    first, found = 0, []
    for shape in shapes:
        found.append(torch.arange(first, first + prod(shape)).reshape(shape))
        first += prod(shape)
    return found


def in_equal_parts(shapes: list[tuple[int, ...]], ranks: int) -> Cut:
    """As ZeRO-3: each parameter in as many parts as there are ranks, the last ones padded with -1."""
    values = values_of(shapes)
    flats: list[torch.Tensor] = []
    fragments: list[Fragments] = []
    parameters: list[Any] = [nn.Parameter(torch.zeros(0)) for _ in shapes]
    names = {parameter: str(number) for number, parameter in enumerate(parameters)}
    for parameter, whole in zip(parameters, values, strict=True):
        size = -(-whole.numel() // ranks)
        parameter.ds_numel, parameter.ds_shape = whole.numel(), torch.Size(whole.shape)
        parameter.partition_numel = lambda size=size: size
    for rank in range(ranks):
        parts = []
        for whole in values:
            size = -(-whole.numel() // ranks)
            part = whole.flatten()[rank * size : (rank + 1) * size]
            parts.append(torch.cat([part, torch.full((size - len(part),), -1)]))
        flats.append(torch.cat(parts))
        zero: Any = SimpleNamespace(fp16_groups=[parameters])
        fragments += fragments_of(zero, names, stage=3, rank=rank)
    return Cut(parameters, names, flats, fragments)


def in_one_range(shapes: list[tuple[int, ...]], ranks: int) -> Cut:
    """As ZeRO-1 and 2: all parameters end to end, cut into one range a rank."""
    values = values_of(shapes)
    total = sum(value.numel() for value in values)
    size = -(-total // ranks)
    everything = torch.arange(ranks * size)
    flats, fragments = [], []
    parameters: list[Any] = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    names = {parameter: str(number) for number, parameter in enumerate(parameters)}
    for rank in range(ranks):
        begin, end = rank * size, (rank + 1) * size
        flats.append(everything[begin:end])
        for parameter, whole in zip(parameters, values, strict=True):
            first = int(whole.flatten()[0])
            start, stop = max(begin, first), min(end, first + whole.numel())
            here = SimpleNamespace(start=start - first, numel=stop - start)
            there = SimpleNamespace(start=start - begin, numel=stop - start)
            linked = SimpleNamespace(lp_fragment_address=here, hp_fragment_address=there)
            parameter._hp_mapping = linked if start < stop else None
        zero: Any = SimpleNamespace(bit16_groups=[parameters])
        fragments += fragments_of(zero, names, stage=1 + rank % 2, rank=rank)
    return Cut(parameters, names, flats, fragments)


def shapes_drawn(draw: random.Random) -> list[tuple[int, ...]]:
    return [tuple(draw.randint(1, 7) for _ in range(draw.choice([1, 2, 2, 3]))) for _ in range(draw.randint(1, 6))]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("cut", [in_equal_parts, in_one_range], ids=["equal parts", "one range"])
def test_the_fragments_of_all_ranks_are_every_parameter_once(cut: Any, seed: int) -> None:
    draw = random.Random(seed)
    shapes, ranks = shapes_drawn(draw), draw.choice([1, 2, 3, 5])
    made: Cut = cut(shapes, ranks)
    for number, whole in enumerate(values_of(shapes)):
        found = [
            fragment.of(flat).tolist()
            for fragments, flat in zip(made.fragments, made.flats, strict=True)
            for fragment in fragments
            if fragment.name == str(number)
        ]
        assert len(found) == ranks, "every rank knows of every parameter, also of those it holds nothing of"
        assert list(chain.from_iterable(found)) == whole.flatten().tolist(), "in the order of the ranks, without padding"
    assert all(fragment.shape == shapes[int(fragment.name)] for fragments in made.fragments for fragment in fragments)


@pytest.mark.parametrize("seed", range(20))
def test_a_part_of_a_matrix_is_whole_rows_between_parts_of_rows(seed: int) -> None:
    draw = random.Random(seed)
    rows, columns = draw.randint(1, 6), draw.randint(1, 6)
    start = draw.randint(0, rows * columns)
    count = draw.randint(0, rows * columns - start)
    matrix = torch.arange(rows * columns).reshape(rows, columns)
    offset = draw.randint(0, 4)
    flat = torch.cat([torch.full((offset,), -1), matrix.flatten()[start : start + count]])
    pieces = pieces_of(Fragment(name="w", shape=(rows, columns), start=start, count=count, offset=offset))
    assert len(pieces) <= 3
    assert [token for piece in pieces for token in piece.of(flat).flatten().tolist()] == list(range(start, start + count))
    by_row = torch.arange(rows) * 10
    for piece in pieces:
        part = piece.of(flat)
        assert part.shape == (piece.rows, piece.columns)
        assert piece.columns == columns or piece.rows == 1
        assert (part // columns == piece.of_rows(by_row)[:, None] // 10).all(), "each row has its own number"
        part.add_(0)
        assert part.data_ptr() == flat.narrow(0, piece.offset, 1).data_ptr(), "a view, so that an update reaches the weights"


def test_a_parameter_that_is_whole_everywhere_is_one_fragment() -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    (fragment,) = all_of(weight, "w")
    assert torch.equal(fragment.of(weight.data), weight.data.flatten())
    assert ranges_of([], {}) == []


# -- what each optimizer keeps


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return build("gpt_neox", num_hidden_layers=1, hidden_size=16, intermediate_size=24, max_position_embeddings=16)


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "muon", "adafactor", "zenflow"])
def test_every_trained_parameter_is_in_one_group_and_has_its_state(model: nn.Module, optimizer: str) -> None:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = groups_of(model, optimizer, 0.1)
    grouped = [names[id(parameter)] for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted(names.values())
    matrices = matrices_of(model, optimizer)
    for group in groups:
        kinds = {names[id(parameter)] in matrices for parameter in group["params"]}
        assert len(kinds) == 1, "a flat tensor holds either matrices alone or none"
        assert {parameter.ndim >= 2 for parameter in group["params"]} == {group["weight_decay"] > 0}
    assert set(state_of(model, optimizer)) == set(names.values())
    whole = whole_state_of(model, optimizer)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert {name for name, _ in whole.values()} <= matrices
    assert all(length in shapes[name] for name, length in whole.values())
    tables = {"gpt_neox.embed_in.weight", "embed_out.weight"}
    assert bool(matrices & tables) is (optimizer in ("adafactor", "zenflow"))
    only = sorted(names.values())[:3]
    some = groups_of(model, optimizer, 0.1, only=only)
    assert sorted(names[id(parameter)] for group in some for parameter in group["params"]) == only


def test_ranks_stand_stage_by_stage_and_one_alone_speaks_with_nobody() -> None:
    places = [(grid.stage, grid.data_rank) for grid in (Grid(rank, 3) for rank in range(6))]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [Grid(0, 3).rank_of(stage, data) for stage, data in places] == list(range(6))
    alone, tensor, received = Peers.alone(), torch.ones(2), torch.zeros(2)
    alone.add_up(tensor)
    assert alone.collect(tensor) == [tensor]
    alone.exchange(received, tensor, [2], [2])
    assert torch.equal(received, torch.ones(2))
