"""Stages are cut as well as they can be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.engines.pipeline.partition import balanced, head_pieces, imbalance, of_type, quickest, uniform
from finetune.errors import ConfigError


def stage_costs(costs: list[float], bounds: tuple[int, ...]) -> list[float]:
    return [sum(costs[start:stop]) for start, stop in itertools.pairwise(bounds)]


def best_by_trying_all(costs: list[float], stages: int) -> tuple[float, float]:
    """Slowest stage and sum of squares of the best of all cuts."""
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    totals = (stage_costs(costs, (0, *cut, len(costs))) for cut in cuts)
    return min((max(total), sum(cost * cost for cost in total)) for total in totals)


@settings(deadline=None)
@given(st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9), st.data())
def test_the_slowest_stage_costs_least_and_stages_are_most_alike(costs: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    bounds = balanced(costs, stages)
    assert bounds[0] == 0
    assert bounds[-1] == len(costs)
    assert all(start < stop for start, stop in itertools.pairwise(bounds))
    totals = stage_costs(costs, bounds)
    assert (max(totals), sum(cost * cost for cost in totals)) == best_by_trying_all(costs, stages)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=8))
def test_measured_times_are_cut_as_well(costs: list[float]) -> None:
    assert max(stage_costs(costs, balanced(costs, 2))) == pytest.approx(best_by_trying_all(costs, 2)[0])


def test_uniform_gives_the_first_stages_one_more() -> None:
    assert uniform(14, 4) == (0, 4, 8, 11, 14)


def test_a_type_is_spread_evenly() -> None:
    assert of_type(["Embedding", *["GPT2Block"] * 4, "LayerNorm", "Linear"], "block", 2) == (0, 3, 7)


def test_a_type_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"type:Decoder.*GPT2Block, Linear"):
        of_type(["GPT2Block", "Linear"], "Decoder", 2)


@pytest.mark.parametrize(
    ("costs", "stages", "pieces"),
    [
        ([0.1, *[1.0] * 12, 4.0], 2, 1),  # whole layers do
        ([0.1, *[1.0] * 12, 40.0], 2, 8),  # whole, it would be 1.5 times the mean
        ([0.1, *[1.0] * 12, 40.0], 1, 1),
        ([1.0], 1, 1),
    ],
)
def test_the_head_is_cut_only_where_that_helps(costs: list[float], stages: int, pieces: int) -> None:
    assert head_pieces(costs, stages) == pieces


BODY = [0.1, *[1.0] * 4]


@pytest.mark.parametrize(
    ("found", "pieces"),
    [
        # With a whole head the slowest stage takes 1.42 times the mean, with quarters 1.06; sixteenths cost twice their share.
        ({1: [*BODY, 10.0], 4: [*BODY, *[2.5] * 4], 16: [*BODY, *[1.25] * 16]}, 4),
        ({1: [*BODY, 20.0], 4: [*BODY, *[7.0] * 4], 16: [*BODY, *[1.25] * 16]}, 16),  # quarters are slow here
        ({1: [*BODY, 6.0]}, 1),
        ({1: [*BODY, 20.0], 2: [*BODY, 10.5, 10.5]}, 2),  # nothing is alike enough: what is most alike
        ({}, 1),
    ],
)
def test_of_measured_pieces_that_are_alike_enough_the_quickest_are_chosen(found: dict[int, list[float]], pieces: int) -> None:
    assert quickest(found, 2) == pieces


@settings(deadline=None)
@given(st.integers(2, 6), st.floats(0.1, 60.0))
def test_a_head_in_pieces_makes_stages_alike_whatever_the_vocabulary(stages: int, head: float) -> None:
    costs = [0.1, *[1.0] * 24, head]
    pieces = head_pieces(costs, stages)
    cut = [*costs[:-1], *[head / pieces] * pieces]
    whole = imbalance(costs, balanced(costs, stages))
    assert imbalance(cut, balanced(cut, stages)) <= whole + 1e-9
