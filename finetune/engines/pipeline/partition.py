"""Which layers go to which pipeline stage: a pure choice from what each layer costs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

from finetune.errors import ConfigError

Bounds = tuple[int, ...]
"""Stage s holds the layers [bounds[s], bounds[s + 1])."""
ALIKE = 1.05
"""Cost of the slowest stage over the mean that asks for no finer pieces."""
ALIKE_ENOUGH = 1.1
"""Cost of the slowest stage over the mean up to which, of several numbers of pieces, the quickest is taken."""


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


def _cut(sums: Sequence[float], stages: int, limit: float, add: Callable[[float, float], float]) -> Bounds:
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
                total = add(best[start], cost)
                if total < row[stop]:
                    row[stop], came_from[stop] = total, start
        best = row
        choices.append(came_from)
    bounds = [layers]
    for came_from in reversed(choices):
        bounds.append(came_from[bounds[-1]])
    return tuple(reversed(bounds))


def uniform(layers: int, stages: int) -> Bounds:
    """Cut into stages of equally many layers, the first ones of one more where that does not divide."""
    each, left = divmod(layers, stages)
    return tuple(accumulate([each + (stage < left) for stage in range(stages)], initial=0))


def of_type(types: Sequence[str], pattern: str, stages: int) -> Bounds:
    """Cut so that every stage has about as many of the layers whose type contains ``pattern`` (a regular expression, any case).

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


def head_pieces(costs: Sequence[float], stages: int, *, most: int = 16) -> int:
    """Equal pieces, each a layer, that the last layer should be cut into, as far as its cost alone can tell.

    Args:
        costs: of each layer, the last one whole.
        most: pieces at most.
    """
    *others, last = costs
    found: dict[int, list[float]] = {}
    pieces = 1
    while pieces <= most:
        found[pieces] = [*others, *[last / pieces] * pieces]
        if len(found[pieces]) >= stages and imbalance(found[pieces], balanced(found[pieces], stages)) <= ALIKE:
            break
        pieces *= 2
    ratios = _ratios(found, stages)
    least = min(ratios.values(), default=1.0)
    return min((pieces for pieces, ratio in ratios.items() if ratio <= max(ALIKE, least * 1.01)), default=1)


def quickest(found: Mapping[int, Sequence[float]], stages: int) -> int:
    """The number of pieces, of those measured, whose slowest stage takes least, as long as the stages are alike enough.

    Alikeness comes first: it is what a partition by profile promises. But many small pieces may be alike and take longer than
    fewer that are less alike, since each has costs of its own. Where none are alike enough, the most alike.
    """
    ratios = _ratios(found, stages)
    least = min(ratios.values(), default=1.0)
    slowest = {
        pieces: ratio * sum(found[pieces]) for pieces, ratio in ratios.items() if ratio <= max(ALIKE_ENOUGH, least * 1.01)
    }
    return min(slowest, key=lambda pieces: (slowest[pieces], pieces), default=1)


def _ratios(found: Mapping[int, Sequence[float]], stages: int) -> dict[int, float]:
    return {pieces: imbalance(costs, balanced(costs, stages)) for pieces, costs in found.items() if len(costs) >= stages}


def imbalance(costs: Sequence[float], bounds: Bounds) -> float:
    """Cost of the slowest stage over the mean of all."""
    totals = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0
