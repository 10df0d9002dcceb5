"""What a user may say of a checkpoint that its files leave open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

QkvLayout = Literal["blocks", "per-head"]
"""On each rank all queries, all keys, all values, as GPT-NeoX does since November 2024; or each query head with its share of
the keys and values, as it did before. The two have one shape, and nothing in a checkpoint tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What is said of a checkpoint beside its path: a field that is ``None`` is left to the files."""

    config: str | None = None
    """The model's ``config.json``, or a folder that has one, for layouts that store none or elsewhere."""
    tokenizer: str | None = None
    """A folder with the tokenizer's files, or one such file, where they do not lie with the checkpoint."""
    master_weights: bool = False
    """From a folder of ZeRO-0, 1 or 2, the optimizer's fp32 master weights in place of the module in the type of training.
    A layout of which no masters are read is then refused, unless its weights are in fp32."""
    layer_map: str | None = None
    """For a pipeline's layer files, a YAML or JSON file that says which names of the model each layer's tensors have."""
    neox_qkv_layout: QkvLayout = "blocks"
    """How GPT-NeoX packed queries, keys and values of heads that share keys."""
    prefix: str | None = None
    """What the names of the model's tensors begin with in files that hold several things, such as ``app.model.``."""
    base: str | None = None
    """The folder of the model that an adapter belongs to, where its ``adapter_config.json`` does not name it."""
    adapter_config: str | None = None
    """The ``adapter_config.json`` of an adapter that was saved in the model, or a folder that has it, where it is elsewhere."""
    adapter: str | None = None
    """The folder of an adapter to be added to the model."""
    any_base: bool = False
    """Join an adapter with its base even if its manifest remembers that it was trained beside another one."""


NOTHING_GIVEN = Given()

_PATHS = ("config", "tokenizer", "layer_map", "adapter_config")
_PLAIN: Mapping[str, type] = {"prefix": str, "master_weights": bool, "neox_qkv_layout": str}


def recorded_of(given: Given) -> dict[str, Any]:
    """What was said of a model's own files, for ``with_recorded``: fields that are set, by name, with absolute paths."""
    said = {name: getattr(given, name) for name in (*_PATHS, *_PLAIN) if getattr(given, name) != getattr(NOTHING_GIVEN, name)}
    return {name: str(Path(os.path.expanduser(value)).absolute()) if name in _PATHS else value for name, value in said.items()}


def with_recorded(given: Given, recorded: Mapping[str, Any]) -> Given:
    """``given`` with what was recorded of the same model, where it says nothing else.

    Args:
        recorded: as ``recorded_of`` made it; a path that is gone is left out, and what breaks a rule as well, so that the model
            is opened as if nothing had been said, and told from the one that was recorded.
    """
    taken: dict[str, Any] = {
        name: value
        for name, value in recorded.items()
        if isinstance(value, _PLAIN.get(name, str))
        and _holds(name, value)
        and getattr(given, name) == getattr(NOTHING_GIVEN, name)
    }
    return replace(given, **taken)


def _holds(name: str, value: Any) -> bool:
    if name == "neox_qkv_layout":
        return value in get_args(QkvLayout)
    return name in _PLAIN or (name in _PATHS and os.path.exists(value))
