"""Imports what cuts a model for several ranks on CPUs, by being imported.

DeepSpeed's module for it imports, when it is used, one for mixtures of experts, and that one Triton, where it is installed:
for kernels of GPUs that DeepSpeed does without where there is no Triton. Here it finds none; whoever imports Triton later does.

This is for processes that become ranks on CPUs and nothing else.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

_FOR_GPUS: Final = "triton"


def _import() -> None:
    importlib.import_module("deepspeed.module_inject.auto_tp")
    is_there = _FOR_GPUS in sys.modules
    if not is_there:
        sys.modules[_FOR_GPUS] = None  # type: ignore[assignment]  # what Python itself puts there for "not to be found"
    try:
        importlib.import_module("deepspeed.module_inject.auto_ep_layer")
    finally:
        if not is_there:
            del sys.modules[_FOR_GPUS]


_import()
