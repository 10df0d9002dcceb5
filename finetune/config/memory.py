"""Where the state of training lies."""

from __future__ import annotations

from dataclasses import dataclass, field
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
class ZenFlowConfig:
    """The two paces of ``offload.method: zenflow``."""

    share: float = 0.1
    """Share of each matrix's rows that are updated in every step: those with the largest gradients."""

    update_every: int = 4
    """Steps whose mean gradient makes one update of all other rows."""

    select_every: int = 64
    """Steps after which rows are chosen anew; a multiple of ``update_every``."""

    def __post_init__(self) -> None:
        require(0.0 < self.share <= 1.0, "offload.zenflow.share", self.share, "be above 0 and at most 1")
        rule = "be at least 2: an update in every step is offload.method plain"
        require(self.update_every >= 2, "offload.zenflow.update_every", self.update_every, rule)
        rule = f"be a multiple of offload.zenflow.update_every, which is {self.update_every}"
        good = self.select_every >= 1 and self.select_every % self.update_every == 0
        require(good, "offload.zenflow.select_every", self.select_every, rule)


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
    """``superoffload``: the CPU's update overlaps the GPU's work (GH200 and the like), where gradients are not clipped; CUDA,
    ZeRO stage 3, optimizer cpu, and no state to resume from.
    ``zenflow``: the rows of each matrix with the largest gradients are updated in every step, the others every few steps and
    beside the device's work; optimizer cpu, AdamW."""

    zenflow: ZenFlowConfig = field(default_factory=ZenFlowConfig)
    """How ``method: zenflow`` chooses rows, and how often it updates the others."""

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
        require(0.0 <= self.ratio <= 1.0, "offload.ratio", self.ratio, "lie between 0 and 1")
        for name, used in (("ratio", self.ratio < 1.0), ("method", self.method != "plain")):
            rule = f"be left alone unless offload.optimizer is cpu (it is {self.optimizer})"
            require(not used or self.optimizer == "cpu", f"offload.{name}", getattr(self, name), rule)
        rule = f"be 1 with {self.method}: Twin-Flow is for the plain method"
        require(self.method == "plain" or self.ratio == 1.0, "offload.ratio", self.ratio, rule)
        rule = f"be absent unless offload.method is zenflow (it is {self.method})"
        usual = self.zenflow == ZenFlowConfig()
        require(self.method == "zenflow" or usual, "offload.zenflow", self.zenflow, rule)

    @property
    def on_disk(self) -> bool:
        """Whether anything is offloaded to NVMe."""
        return "nvme" in (self.optimizer, self.parameters)
