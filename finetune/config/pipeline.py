"""The pipeline of ``tessera-finetune pretrain``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from finetune.config.checks import require

_METHODS = ("parameters", "uniform", "profile")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Pipeline parallelism; used by ``pretrain`` alone."""

    stages: int = 1
    """Ranks that each hold a part of the layers; the other ranks repeat them on different samples."""

    partition: str = "profile"
    """How layers are shared out: ``profile`` balances measured times, ``parameters`` their sizes, ``uniform`` their number,
    ``type:REGEX`` the number of those whose class matches, such as ``type:Block|Layer``."""

    checkpoint_activations: bool = False
    """Whether blocks keep only their inputs for the backward pass and compute the rest again: less memory, a third more work."""

    def __post_init__(self) -> None:
        require(self.stages >= 1, "pipeline.stages", self.stages, "be at least 1")
        named, _, pattern = self.partition.partition(":")
        require(
            self.partition in _METHODS or (named == "type" and bool(pattern)),
            "pipeline.partition",
            self.partition,
            f"be one of {', '.join(_METHODS)} or type:REGEX",
        )
        try:
            re.compile(pattern)
        except re.error as error:
            require(False, "pipeline.partition", self.partition, f"hold a regular expression after the colon ({error})")
