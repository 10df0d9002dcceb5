"""The pipeline of ``tessera-finetune pretrain``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from finetune.config.checks import require
from finetune.config.model import ModelConfig

SPLITTABLE = ("gpt_neox", "gpt2", "llama")
"""Model types whose layers ``finetune.engines.pipeline.layers`` knows."""

_METHODS = ("parameters", "uniform", "profile")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Pipeline parallelism; used by ``pretrain`` alone."""

    stages: int = 1
    """Ranks that each hold a part of the layers; the other ranks repeat them on different samples."""

    partition: str = "profile"
    """How layers are shared out: ``profile`` balances measured times, ``parameters`` their sizes, ``uniform`` their number,
    ``type:REGEX`` the number of those whose class matches, such as ``type:Block|Layer``."""

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


def check_splittable(model: ModelConfig) -> None:
    """Refuse a model that has no stages, before anything of it is loaded.

    Raises:
        ConfigError: names the model types that have.
    """
    rule = f"be one of {', '.join(SPLITTABLE)} for pretrain; `tessera-finetune tune` trains every other"
    if model.new is not None:
        found = model.new["model_type"]
        require(found in SPLITTABLE, "model.new.model_type", found, rule)
        return
    assert model.path is not None, "ModelConfig holds exactly one of the two"
    from checkpoint import CheckpointError, Given
    from checkpoint.opening.prove import model_config  # slow, and seldom needed

    try:
        values, place = model_config(Path(model.path).expanduser(), Given(config=model.config))
    except CheckpointError:
        return  # said better when the checkpoint is opened
    key = "model.path" if model.config is None else "model.config"
    require(values["model_type"] in SPLITTABLE, f"{key}: {place}: model_type", values["model_type"], rule)
