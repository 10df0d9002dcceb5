"""The learning rate after warm-up: the one given, that of the run that is resumed, or the usual one of the kind of run."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from finetune.config import TuneConfig

FOR_ALL_KINDS: Final = 3e-4
"""What ``optimizer.lr`` was when unset, for any run, before states recorded it."""


def usual_rate(config: TuneConfig) -> tuple[float, str]:
    """The learning rate that ``optimizer.lr`` stands for when unset, and the kind of run it is usual for."""
    if config.lora is not None:
        return 2e-4, "adapters"
    if config.model.path is not None:
        return 2e-5, "an existing model trained in full"
    return 3e-4, "a new model"


def with_rate(config: TuneConfig, kept: float | None = None) -> tuple[TuneConfig, str]:
    """The configuration with ``optimizer.lr`` set, and that in words.

    Args:
        kept: the learning rate of the run that goes on; ``None`` for one that starts.
    """
    given = config.optimizer.lr
    if given is not None:
        return config, f"learning rate {given:g}"
    rate, kind = usual_rate(config)
    words = f"learning rate {rate:g}, usual for {kind} (optimizer.lr)"
    if kept is not None:
        rate, words = kept, f"learning rate {kept:g} as before"
    return replace(config, optimizer=replace(config.optimizer, lr=rate)), words
