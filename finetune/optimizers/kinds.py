"""Every optimizer there is, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, Protocol, cast

from finetune.config import ALGORITHMS
from finetune.optimizers import algorithms
from finetune.optimizers.kind import OptimizerKind


class _File(Protocol):
    """What each file of ``algorithms/`` has."""

    KIND: OptimizerKind


def _kind_of(name: str) -> OptimizerKind:
    return cast(_File, importlib.import_module(f"{algorithms.__name__}.{name}")).KIND


KINDS: Final[Mapping[str, OptimizerKind]] = {name: _kind_of(name) for name in ALGORITHMS}
"""By ``TuneConfig.algorithm``, which is the name of its file in ``algorithms/``."""
