"""What ``rank_pattern`` and ``alpha_pattern`` say of a module, as the release of peft that trained the adapter understood them.

Until 0.13 one key was sought for both, among those of the two tables; 0.14 seeks each in its own; since 0.15 a key is a whole
alternative and may be the whole name. A description has every setting that its release knew, by which the release is told.
Source: peft/tuners/lora/model.py and peft/utils/other.py, 0.6 to 0.21.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from typing import Any, Final

from checkpoint.errors import CheckpointError

_TIMES: Final = r"(?:[*+?]|\{\d{1,2}(?:,\d{0,2})?\})"
_PATTERN = re.compile(rf"(?:(?:\\[.dw]|\[\^?[\w-]+\]|[\w.-]){_TIMES}?|\((?:\?[:!=])?|\)\??|[|^$])+")
"""Regular expressions that are tried: no repeated group, whose time would be without bound."""
_REPEATED = re.compile(rf"(?<!\(){_TIMES}")
_REPEATS_AT_MOST, _LONGEST_KEY, _LONGEST_NAME = 3, 400, 128
"""What bounds the time that a name takes."""

_SETTINGS: Final = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
_OF_ALL_RELEASES: Final = "layers_to_transform"
"""A setting that every release with patterns knew; a description that somebody wrote by hand may lack it."""
_SINCE_14: Final = "exclude_modules"
_SINCE_15: Final = "trainable_token_indices"


_NAME = re.compile(r"[\w.-]+")
_compiled = lru_cache(maxsize=4096)(re.compile)


def is_pattern(text: str) -> bool:
    """Whether a key of one of the tables is a name, or a regular expression that is tried."""
    is_short = len(text) <= _LONGEST_KEY and len(_REPEATED.findall(text)) <= _REPEATS_AT_MOST
    return is_short and _PATTERN.fullmatch(text) is not None


def alpha_of(config: Mapping[str, Any], module: str, rank: int, file: str) -> Any:
    """Alpha of a module whose factors have this rank, by its name in the model.

    The first key that fits a name counted in training; peft saves the keys sorted, so where several fit, any may have been the
    first, as far as the rank that it gives is that of the factors.

    Args:
        config: the adapter's description, whose keys ``is_pattern`` has passed; ``file`` is what a message calls it.

    Raises:
        CheckpointError: a key is no regular expression; none gives this rank; or several fit, with different alphas.
    """
    tables: list[Mapping[str, Any]] = [config.get(name) or {} for name in _SETTINGS]
    defaults = [config.get(key) for key in _SETTINGS.values()]
    if _OF_ALL_RELEASES not in config or _SINCE_15 in config:
        keys = list(product(*(_fitting(table, module, r"(.*\.)?({})$", file) for table in tables)))
    elif _SINCE_14 in config:
        keys = list(product(*(_fitting(table, module, r".*\.{}$", file) for table in tables)))
    else:  # one key for both, of the first table that has one
        first, second = (_fitting(table, module, r".*\.{}$", file) for table in tables)
        keys = [(key, key) for key in (second if first == [module] else first)]
    found = [[table.get(key, default) for table, key, default in zip(tables, pair, defaults, strict=True)] for pair in keys]
    alphas = [alpha for said, alpha in found if said == rank]
    if not alphas:
        raise CheckpointError(file, f"gives {module!r} the rank {found[0][0]!r}; its factors have {rank}")
    other = next((alpha for alpha in alphas if alpha != alphas[0]), None)
    if other is not None:
        rule = f"gives {module!r} the lora_alpha {alphas[0]!r} or {other!r}: several keys of its patterns fit it"
        raise CheckpointError(file, f"{rule}, and which came first in training was not saved; leave the others out")
    return alphas[0]


def _fitting(keys: Iterable[str], module: str, form: str, file: str) -> list[str]:
    """The keys that the module's name matches in this form; of those that are in an order of their own the first.

    Where there is none it is the name itself, which may be a key.
    """
    keys, fitting = list(keys), []
    if len(module) > _LONGEST_NAME and any(_REPEATED.search(key) for key in keys):
        raise CheckpointError(
            file, f"has patterns, which are tried with names of up to {_LONGEST_NAME} characters, not {module!r}"
        )
    for key in keys:
        if _NAME.fullmatch(key) and not module.endswith(key.rpartition(".")[2]):
            continue  # a table may have a key for each of hundreds of modules
        try:
            if _compiled(form.replace("{}", key)).match(module):
                fitting.append(key)
        except re.error as error:
            raise CheckpointError(file, f"rank_pattern or alpha_pattern has {key!r}, which is no pattern: {error}") from error
    return (fitting if keys == sorted(keys) else fitting[:1]) or [module]
