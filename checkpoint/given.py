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
    base: str | None = None
    """The folder of the model that an adapter belongs to, where its ``adapter_config.json`` does not name it."""
    adapter: str | None = None
    """The folder of an adapter to be added to the model."""


NOTHING_GIVEN = Given()
