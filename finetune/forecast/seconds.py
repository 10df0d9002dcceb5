"""Seconds of a step from a model's counted work, and what was measured of the machine and of the run's engine, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise

from finetune.config import TuneConfig
from finetune.forecast.facts import ModelFacts
from finetune.forecast.layout import Layout
from finetune.forecast.pace import Pace
from finetune.forecast.speeds import Measured, Speeds
from finetune.forecast.trials import Trial
from finetune.optimizers.kinds import KINDS


def is_measurable(config: TuneConfig, device: str) -> bool:
    """Whether seconds of a step are foreseen at all: not of GPUs, of disks, of an optimizer beside the steps."""
    return device == "cpu" and not config.offload.on_disk and config.algorithm != "zenflow"


def rate_at(products: Mapping[int, float], size: int) -> float:
    """Operations a second of a product of ``size``, between the measured sizes by their logarithms."""
    sizes = sorted(products)
    if size <= sizes[0]:
        return products[sizes[0]]
    for low, high in pairwise(sizes):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(products[low]) + share * math.log(products[high]))
    return products[sizes[-1]]


def seconds_of_attention(operations: Mapping[int, Mapping[int, float]], rates: Mapping[int, Mapping[int, float]]) -> float:
    """Seconds of attention, by size of a head and number of keys.

    What a pair of a query and a key takes grows with the size of a head, from more than nothing: the exponential is taken of it
    too. What a query takes besides, such as to bring its keys into order, is spread over its pairs.
    """
    each = {size: {1 / keys: size / rate for keys, rate in by_keys.items()} for size, by_keys in rates.items()}
    total = 0.0
    for size, by_keys in operations.items():
        for keys, count in by_keys.items():
            by_size = {float(measured): _on_lines(points, 1 / keys) for measured, points in each.items()}
            total += count / size * _on_lines(by_size, size)
    return total


def _on_lines(points: Mapping[float, float], at: float) -> float:
    """A value between measured ones, or beyond them, on the lines that join neighbours; at least a quarter of the least."""
    places = sorted(points)
    if len(places) == 1:
        return points[places[0]]
    low, high = next((pair for pair in pairwise(places) if at <= pair[1]), (places[-2], places[-1]))
    value = points[low] + (points[high] - points[low]) * (at - low) / (high - low)
    return max(value, min(points.values()) / 4)


def computing_of(facts: ModelFacts, layout: Layout, speeds: Speeds) -> dict[str, float]:
    """Seconds of what one rank computes in a step, each operation by itself, by kind."""
    work = facts.work
    # In a pipeline a stage has its part of the model, and waits while the others fill and drain.
    passes = (layout.accumulation + layout.pipeline - 1) / layout.pipeline
    parts = {
        "products": passes * sum(count / rate_at(speeds.products, size) for size, count in work.products.items()),
        "attention": passes * seconds_of_attention(work.attention, speeds.attention),
        "plain operations": passes * work.plain_bytes / speeds.plain_bytes,
        "activation functions and norms": passes * work.costly_bytes / speeds.costly_bytes,
        "random numbers": passes * work.drawn / speeds.drawn,
        "calls": passes * work.calls * speeds.call_seconds,
    }
    if (each := KINDS[layout.algorithm].products) and facts.factors:
        side = 2 * facts.matrices / facts.factors  # of a square matrix
        products = each * facts.matrices / layout.pipeline * side
        parts["whole matrices"] = products / rate_at(speeds.products, round(side))
    return parts


def parts_of(facts: ModelFacts, layout: Layout, measured: Measured) -> dict[str, float]:
    """Seconds of one step of one rank by what they are spent on."""
    prices, speeds = measured.prices, measured.speeds
    parts = {name: prices.computing * seconds for name, seconds in computing_of(facts, layout, speeds).items()}
    tensors, elements = facts.work.tensors / layout.pipeline, facts.trained / layout.pipeline
    micro = layout.accumulation
    parts["gradients"] = micro * (prices.micro_tensor * tensors + prices.micro_element * elements)
    parts["update"] = prices.step_tensor * tensors + prices.step_element * elements
    if layout.stage == 3 and speeds.gather_bytes is not None:
        parts["frozen weights"] = 2 * micro * facts.frozen * layout.weight_bytes / speeds.gather_bytes
    return parts


def trial_of(facts: ModelFacts, layout: Layout, speeds: Speeds, seconds: float) -> Trial:
    """A small run whose steps took ``seconds``."""
    return Trial(
        computed=sum(computing_of(facts, layout, speeds).values()),
        accumulation=layout.accumulation,
        tensors=facts.work.tensors / layout.pipeline,
        elements=facts.trained / layout.pipeline,
        seconds=seconds,
    )


def pace_of(config: TuneConfig, facts: ModelFacts, layout: Layout, measured: Measured) -> Pace:
    """The pace that what was measured lets expect."""
    seconds = sum(parts_of(facts, layout, measured).values())
    tokens = config.step_samples * config.data.seq_len
    return Pace(step_seconds=seconds, tokens_per_second=tokens / seconds, source="expected from this machine's measured speeds")
