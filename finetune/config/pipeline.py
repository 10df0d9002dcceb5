"""How the layers of a model are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Pipeline parallelism; used by ``pretrain`` alone."""

    stages: int = 1
    """Ranks that each hold a part of the layers; the other ranks repeat them on different samples."""

    def __post_init__(self) -> None:
        require(self.stages >= 1, "pipeline.stages", self.stages, "be at least 1")
