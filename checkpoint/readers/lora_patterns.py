"""What ``rank_pattern`` and ``alpha_pattern`` say of a module, as the release of peft that trained the adapter understood them.

Until 0.13 one key was sought for both, among those of the two tables; 0.14 seeks each in its own; since 0.15 a key is a whole
alternative and may be the whole name. A description has every setting that its release knew, by which the release is told.
Source: peft/tuners/lora/model.py and peft/utils/other.py, 0.6 to 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from checkpoint.errors import CheckpointError

_PATTERN = re.compile(r"(?:\\\.|\\d\+?|\[[\w-]+\]\+?|\.\*|\(\?:|[\w.|()^$-])+")
"""Regular expressions that are tried: no repeated group, whose time would be without bound."""

_SETTINGS: Final = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
_OF_ALL_RELEASES: Final = "layers_to_transform"
"""A setting that every release with patterns knew; a description that somebody wrote by hand may lack it."""
_SINCE_14: Final = "exclude_modules"
_SINCE_15: Final = "trainable_token_indices"


def is_pattern(text: str) -> bool:
    """Whether a key of one of the tables is a name, or a regular expression that is tried."""
    return len(text) <= 200 and text.count("*") + text.count("+") <= 4 and _PATTERN.fullmatch(text) is not None


def of_module(config: Mapping[str, Any], module: str, file: str) -> tuple[Any, Any]:
    """Rank and alpha of a module, by its name in the model.

    Args:
        config: the adapter's description, whose keys ``is_pattern`` has passed; ``file`` is what a message calls it.

    Raises:
        CheckpointError: a key is no regular expression.
    """
    tables: list[Mapping[str, Any]] = [config.get(name) or {} for name in _SETTINGS]
    defaults = [config.get(key) for key in _SETTINGS.values()]
    if _OF_ALL_RELEASES not in config or _SINCE_15 in config:
        keys = [_first(table, module, r"(.*\.)?({})$", file) for table in tables]
    elif _SINCE_14 in config:
        keys = [_first(table, module, r".*\.{}$", file) for table in tables]
    else:
        keys = [_first([*tables[0], *tables[1]], module, r".*\.{}$", file)] * 2
    rank, alpha = (table.get(key, default) for table, key, default in zip(tables, keys, defaults, strict=True))
    return rank, alpha


def _first(keys: Iterable[str], module: str, form: str, file: str) -> str:
    """The first key that the module's name matches in this form; else the name itself, which may be a key."""
    for key in keys:
        try:
            if re.match(form.replace("{}", key), module):
                return key
        except re.error as error:
            raise CheckpointError(file, f"rank_pattern or alpha_pattern has {key!r}, which is no pattern: {error}") from error
    return module
