"""Which layers go to which pipeline stage: a pure choice from what each layer costs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from finetune.errors import ConfigError

Bounds = tuple[int, ...]
"""Stage s holds the layers [bounds[s], bounds[s + 1])."""


def balanced(costs: Sequence[float], stages: int) -> Bounds:
    """Cut the layers into consecutive stages, each of at least one layer, so that the slowest stage costs least.

    Among such cuts the one whose stages are most alike (smallest sum of squared costs). Exact, by dynamic programming:
    O(stages x layers²).

    Args:
        costs: of each layer, 0 or more, in order.
        stages: at most as many as there are layers.
    """
    assert 1 <= stages <= len(costs), f"{len(costs)} layers cannot fill {stages} stages"
    sums = [0.0, *accumulate(costs)]
    least = _cut(sums, stages, math.inf, max)
    slowest = max(sums[stop] - sums[start] for start, stop in pairwise(least))
    return _cut(sums, stages, slowest * (1 + 1e-12), lambda total, cost: total + cost * cost)


def _cut(sums: Sequence[float], stages: int, limit: float, add: object) -> Bounds:
    """The cut with the smallest fold of ``add`` over its stages' costs, none of which exceeds ``limit``."""
    layers = len(sums) - 1
    best: list[float] = [0.0] + [math.inf] * layers
    choices: list[list[int]] = []
    for stage in range(1, stages + 1):
        row, came_from = [math.inf] * (layers + 1), [0] * (layers + 1)
        for stop in range(stage, layers - (stages - stage) + 1):
            for start in range(stage - 1, stop):
                cost = sums[stop] - sums[start]
                if cost > limit or best[start] == math.inf:
                    continue
                total = add(best[start], cost)  # type: ignore[operator]
                if total < row[stop]:
                    row[stop], came_from[stop] = total, start
        best = row
        choices.append(came_from)
    bounds = [layers]
    for came_from in reversed(choices):
        bounds.append(came_from[bounds[-1]])
    return tuple(reversed(bounds))


def uniform(layers: int, stages: int) -> Bounds:
    """As many layers on every stage, the first ones one more where that does not divide."""
    each, left = divmod(layers, stages)
    return tuple(accumulate([each + (stage < left) for stage in range(stages)], initial=0))


def of_type(types: Sequence[str], pattern: str, stages: int) -> Bounds:
    """As many layers whose type contains ``pattern`` (a regular expression, any case) on every stage.

    Raises:
        ConfigError: no layer matches, or fewer than there are stages.
    """
    wanted = re.compile(pattern, re.IGNORECASE)
    matches = [float(wanted.search(name) is not None) for name in types]
    if sum(matches) < stages:
        known = ", ".join(dict.fromkeys(types))
        raise ConfigError(
            f"pipeline.partition is 'type:{pattern}'; it must match a layer for each of {stages} stages, "
            f"and matches {int(sum(matches))} of {known}"
        )
    return balanced(matches, stages)


def head_pieces(costs: Sequence[float], stages: int, *, most: int = 16, good: float = 1.05) -> int:
    """Equal pieces, each a layer, that the last layer should be cut into: the fewest with which stages are alike.

    Args:
        costs: of each layer, the last one whole.
        most: pieces at most.
        good: slowest stage over the mean that needs no further cut.
    """
    *others, last = costs
    found: dict[int, float] = {}
    pieces = 1
    while pieces <= most:
        cut = [*others, *[last / pieces] * pieces]
        if len(cut) >= stages:
            found[pieces] = imbalance(cut, balanced(cut, stages))
            if found[pieces] <= good:
                break
        pieces *= 2
    least = min(found.values(), default=1.0)
    return min((number for number, ratio in found.items() if ratio <= least * 1.02), default=1)


def imbalance(costs: Sequence[float], bounds: Bounds) -> float:
    """Cost of the slowest stage over the mean of all."""
    totals = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0
