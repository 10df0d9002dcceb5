"""Keeps a step that is skipped from changing anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

import torch


class _Updater(Protocol):
    step: Callable[..., object]


def guard_update(optimizer: torch.optim.Optimizer, is_skipped: Callable[[], bool]) -> None:
    """Make the update itself refuse a skipped step: DeepSpeed's clean-up around it runs as after any other step."""
    updater = cast(_Updater, optimizer)
    update = updater.step

    def guarded(*args: object, **kwargs: object) -> object:
        return None if is_skipped() else update(*args, **kwargs)

    updater.step = guarded
