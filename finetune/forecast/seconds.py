"""Seconds of a step from a model's counted work and a machine's measured speeds, part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from finetune.config import TuneConfig
from finetune.forecast.facts import ModelFacts
from finetune.forecast.layout import Layout
from finetune.forecast.measure import Speeds
from finetune.forecast.pace import Pace

_UPDATE_BYTES: Final = {"adamw": 28, "lion": 40, "muon": 28, "adafactor": 60}
"""Read and written for each element; AdamW in one pass, the others in several."""
_MUON_PRODUCTS: Final = 5 * 6
"""Operations of the five iterations for each element of a matrix, over its shorter side."""
_CALLS_A_TENSOR: Final = {False: 20, True: 60}
"""Calls for each weight in a backward pass besides those of the model; by whether weights are gathered (ZeRO-3)."""


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


def parts_of(facts: ModelFacts, layout: Layout, speeds: Speeds) -> dict[str, float]:
    """Seconds of one step of one rank by what they are spent on."""
    work, shares, micro = facts.work, layout.shares, layout.accumulation
    width = layout.weight_bytes
    gathered = layout.stage == 3
    # In a pipeline a stage has its part of the model, and waits while the others fill and drain.
    passes = (micro + layout.pipeline - 1) / layout.pipeline
    trained = facts.trained / layout.pipeline
    owned = trained / shares if layout.stage > 0 else trained
    collecting = micro if layout.stage >= 2 else 1
    parts = {
        "products": passes * sum(count / rate_at(speeds.products, size) for size, count in work.products.items()),
        "attention": passes * work.attention / speeds.attention,
        "plain operations": passes * work.plain_bytes / speeds.plain_bytes,
        "activation functions and norms": passes * work.costly_bytes / speeds.costly_bytes,
        "calls": speeds.call_seconds * (passes * work.calls + micro * work.tensors * _CALLS_A_TENSOR[gathered]),
        # Into a bucket, divided, added up; then the norm, the cut, and the weights that are written back.
        "gradients": (micro * 4 * trained * width + owned * (4 + 8 + 4 + width)) / speeds.plain_bytes,
        "optimizer": owned * _UPDATE_BYTES[layout.algorithm] / speeds.update_bytes,
    }
    if layout.algorithm == "muon" and facts.factors:
        side = 2 * facts.matrices / facts.factors  # of a square matrix
        products = _MUON_PRODUCTS * facts.matrices / layout.pipeline * side
        parts["optimizer"] += products / rate_at(speeds.products, round(side))
    if shares > 1 and speeds.reduce_bytes is not None and speeds.gather_bytes is not None:
        parts["reduction"] = collecting * trained * layout.sent_bytes / speeds.reduce_bytes
        if gathered:
            parts["gathering"] = 2 * micro * facts.total * width / speeds.gather_bytes
        elif layout.stage > 0:
            parts["gathering"] = trained * width / speeds.gather_bytes
    return parts


def pace_of(config: TuneConfig, facts: ModelFacts, layout: Layout, speeds: Speeds) -> Pace | None:
    """The pace that the speeds let expect; ``None`` for what they do not tell: GPUs, disks, an optimizer beside the steps."""
    if layout.device != "cpu" or "nvme" in (layout.optimizer, layout.parameters) or layout.algorithm not in _UPDATE_BYTES:
        return None
    seconds = sum(parts_of(facts, layout, speeds).values())
    tokens = config.step_samples * config.data.seq_len
    return Pace(step_seconds=seconds, tokens_per_second=tokens / seconds, source="expected from this machine's measured speeds")
