"""Every optimizer there is, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from finetune.optimizers.adafactor import ADAFACTOR
from finetune.optimizers.adamw import ADAMW
from finetune.optimizers.kind import OptimizerKind
from finetune.optimizers.lion import LION
from finetune.optimizers.muon import MUON
from finetune.optimizers.zenflow import ZENFLOW

KINDS: Final[Mapping[str, OptimizerKind]] = {kind.name: kind for kind in (ADAMW, LION, MUON, ADAFACTOR, ZENFLOW)}
"""By ``TuneConfig.algorithm``."""
