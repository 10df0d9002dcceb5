"""Matches the names a model has with the names a checkpoint stores.

Old releases and bare base models name the same tensors differently; readers always ask with the model's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

_BASE_PREFIXES = ("transformer.", "gpt_neox.", "model.")
"""Attributes under which causal models keep their base model; saved alone, the base model's names lack them."""

_RENAMED = {"lm_head.": "embed_out."}
"""GPT-NeoX's head before transformers 5."""

_HARMLESS = (
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    ".rotary_emb.inv_freq",
    ".embed_positions",
)
"""Ends of names of causal masks and position tables that old releases saved; models compute them."""


def is_harmless_buffer(stored: str) -> bool:
    """Whether a stored tensor that no model asks for may be left alone."""
    return f".{stored}".endswith(_HARMLESS)


def find_stored(name: str, stored: Collection[str]) -> str | None:
    """The stored name of the model's tensor ``name``; ``None`` if it is not there under any name it has had."""
    for candidate in _candidates(name):
        if candidate in stored:
            return candidate
    return None


def find_tied(name: str, stored: Collection[str], tied: Mapping[str, str]) -> str | None:
    """The stored name of the model's tensor ``name``, else of one that it is tied to; ``None`` where none of them is stored.

    Args:
        tied: alias to owner; all aliases of one owner, and the owner, are one tensor.
    """
    for member in _family(name, tied):
        found = find_stored(member, stored)
        if found is not None:
            return found
    return None


def all_stored(name: str, stored: Collection[str], tied: Mapping[str, str]) -> list[str]:
    """Stored names of the tensor and of all that are tied to it."""
    found = (find_stored(member, stored) for member in _family(name, tied))
    return list(dict.fromkeys(item for item in found if item is not None))


def _candidates(name: str) -> Iterable[str]:
    yield name
    for new, old in _RENAMED.items():
        if name.startswith(new):
            yield old + name.removeprefix(new)
    for prefix in _BASE_PREFIXES:
        if name.startswith(prefix):
            yield name.removeprefix(prefix)


def _family(name: str, tied: Mapping[str, str]) -> list[str]:
    """``name`` first, then its owner, then the owner's other aliases."""
    owner = tied.get(name, name)
    aliases = [alias for alias, other in tied.items() if other == owner]
    return list(dict.fromkeys([name, owner, *aliases]))
