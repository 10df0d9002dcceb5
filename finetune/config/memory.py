"""Where the state of training lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How the model's state is spread over the ranks."""

    stage: Literal[0, 1, 2, 3] = 3
    """0 repeats all state (``pretrain`` alone), 1 spreads the optimizer's state, 2 also gradients, 3 also parameters."""

    bucket_elements: int = 50_000_000
    """Gradient elements reduced, and parameter elements gathered, in one piece."""

    def __post_init__(self) -> None:
        require(self.bucket_elements >= 1, "zero.bucket_elements", self.bucket_elements, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadConfig:
    """What lies in the host's memory instead of the device's."""

    optimizer: Literal["none", "cpu"] = "none"
    """Where the fp32 weights and the moments lie and are updated."""

    parameters: Literal["none", "cpu"] = "none"
    """Where parameters wait for their turn; needs ZeRO stage 3."""
