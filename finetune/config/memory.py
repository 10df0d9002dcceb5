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
    """What lies in the host's memory, or on a disk, instead of the device's memory."""

    optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where the fp32 weights and the moments lie; they are updated on the CPU. ``nvme`` needs ZeRO stage 3."""

    parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where parameters wait for their turn; needs ZeRO stage 3."""

    path: str | None = None
    """Folder on a fast local disk for what is offloaded to ``nvme``."""

    ratio: float = 1.0
    """Twin-Flow: share of the optimizer's state that lies on the CPU, the rest on the device; ZeRO stage 3, optimizer cpu."""

    method: Literal["plain", "superoffload", "zenflow"] = "plain"
    """``superoffload``: the CPU's update overlaps the GPU's work (GH200 and the like); CUDA, ZeRO stage 3, optimizer cpu.
    ``zenflow`` is refused: see docs/adr/0010-no-zenflow.md."""

    def __post_init__(self) -> None:
        on_disk = [name for name in ("optimizer", "parameters") if getattr(self, name) == "nvme"]
        if on_disk:
            require(
                self.path is not None,
                "offload.path",
                None,
                f"name a folder, since offload.{on_disk[0]} is nvme",
            )
        else:
            require(self.path is None, "offload.path", self.path, "be absent when nothing is offloaded to nvme")
        rule = (
            "be plain or superoffload: DeepSpeed's ZenFlow changes weights before a gradient that is not finite can be seen, "
            "and its state cannot be saved; offload.ratio also keeps part of the update on the device"
        )
        require(self.method != "zenflow", "offload.method", "zenflow", rule)
        require(0.0 <= self.ratio <= 1.0, "offload.ratio", self.ratio, "lie between 0 and 1")
        for name, used in (("ratio", self.ratio < 1.0), ("method", self.method != "plain")):
            rule = f"be left alone unless offload.optimizer is cpu (it is {self.optimizer})"
            require(not used or self.optimizer == "cpu", f"offload.{name}", getattr(self, name), rule)
        rule = "be 1 with superoffload, which decides by itself what lies where"
        require(self.method == "plain" or self.ratio == 1.0, "offload.ratio", self.ratio, rule)

    @property
    def on_disk(self) -> bool:
        """Whether anything is offloaded to NVMe."""
        return "nvme" in (self.optimizer, self.parameters)
