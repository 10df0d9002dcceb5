"""Training few parameters instead of all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraConfig:
    """Low-rank adapters beside frozen weights, through peft. Naming the section (``lora: {}``) switches it on."""

    rank: int = 16
    """Rank of each adapter."""

    alpha: float = 32.0
    """The adapter's output is multiplied by alpha / rank (``rslora``: alpha / sqrt(rank))."""

    dropout: float = 0.0
    """Dropout of the adapter's input."""

    method: Literal["lora", "rslora", "dora"] = "lora"
    """``lora``; ``rslora`` scales by the root of the rank, for large ranks; ``dora`` also learns each output's magnitude."""

    targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, by their ends, for example ``query_key_value``; empty: all but the output
    layer."""

    def __post_init__(self) -> None:
        require(self.rank >= 1, "lora.rank", self.rank, "be at least 1")
        require(math.isfinite(self.alpha) and self.alpha > 0, "lora.alpha", self.alpha, "be greater than 0")
        require(0.0 <= self.dropout < 1.0, "lora.dropout", self.dropout, "lie between 0 and 1, 1 excluded")
