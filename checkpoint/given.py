"""What a user may say of a checkpoint that its files leave open."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Said beside a checkpoint's path. ``None`` leaves it to the files."""

    config: str | None = None
    """The model's ``config.json``, or a folder that has one, for layouts that store none or elsewhere."""
    tokenizer: str | None = None
    """A folder with the tokenizer's files, or one such file, where they do not lie with the checkpoint."""
    prefix: str | None = None
    """What the names of the model's tensors begin with in files that hold several things, such as ``app.model.``."""


NOTHING_GIVEN = Given()
