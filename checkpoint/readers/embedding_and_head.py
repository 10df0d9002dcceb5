"""Embedding and head of a model with an adapter: trained whole, resized, or no longer one.

peft adapts each of the two alone: where the base ties them, they are two tensors with the adapter, but for copies that are the
same. It saves both whole after ``resize_token_embeddings``, since the base's files have other rows.
Source: peft/utils/save_and_load.py, 0.21.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.errors import CheckpointError
from checkpoint.layout import Stored, contiguous_strides

_EMBEDDING = re.compile(r"(?:.*\.)?(?:embed_tokens|embed_in|wte|word_embeddings)\.weight")
_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.weight")
_OF_THE_HEAD = re.compile(r"(?:.*\.)?(?:lm_head|embed_out)\.(?:weight|bias)")
_HEAD_NAME = "lm_head.weight"

_COMPARED_BYTES = 8 << 20


def may_replace(name: str, stored: Stored, base: Stored) -> bool:
    """Whether an adapter's whole tensor may replace the base's: one of its shape or, of the vocabulary, with other rows."""
    if stored.shape == base.shape:
        return True
    rows = _EMBEDDING.fullmatch(name) or _OF_THE_HEAD.fullmatch(name)
    return rows is not None and len(stored.shape) == len(base.shape) > 0 and stored.shape[1:] == base.shape[1:]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Names of a base model's embedding and head."""

    embedding: str | None
    """``None`` where the base stores none by a name that is known."""
    head: str | None
    """The name that the head has, or would have; ``None`` where the embedding is unknown, and no head is stored."""
    tied: bool
    """Whether the two are one tensor, by what is stored or by the configuration."""

    @classmethod
    def of(cls, base: Mapping[str, Stored], config: Mapping[str, Any], named: Iterable[str]) -> Vocabulary:
        """The names in the base whose tensors lie at ``base``.

        Args:
            config: the base's ``config.json``. One that ties embedding and head, or does not say, may store one of them.
            named: what the adapter names; of a base that stores a head alone, the embedding's name is there or unknown.
        """
        embedding, head = _only(base, _EMBEDDING), _only(base, _HEAD)
        if embedding is not None and head is not None:
            return cls(embedding, head, config.get("tie_word_embeddings") is True or base[embedding] == base[head])
        if config.get("tie_word_embeddings") is False:
            return cls(embedding, head, tied=False)
        if embedding is None:
            return cls(_only(named, _EMBEDDING) if head is not None else None, head, tied=True)
        return cls(embedding, _HEAD_NAME, tied=True)

    def apart(self, base: Mapping[str, Stored]) -> dict[str, Stored]:
        """The base's tensors, with embedding and head each by its own name where the base stores one for both."""
        if self.embedding is None or self.head is None:
            return dict(base)
        one = base[self.embedding if self.embedding in base else self.head]
        return {self.embedding: one, self.head: one, **base}

    def check_bias(
        self, base: Mapping[str, Stored], adapter: Mapping[str, Any], whole: Collection[str], description: str
    ) -> None:
        """Refuse ``ensure_weight_tying`` of a head with a bias that was trained whole: peft then computes without the bias.

        Args:
            adapter: the adapter's description, which is the file ``description``.
            whole: names of tensors that the adapter holds whole.
        """
        biased = any(name.endswith(".bias") and _OF_THE_HEAD.fullmatch(name) for name in base)
        if adapter.get("ensure_weight_tying") and biased and _only(whole, _HEAD) is not None:
            rule = "ensure_weight_tying is true, under which peft trained a head without the bias that the base model's has"
            raise CheckpointError(description, f"{rule}; such an adapter is not read")

    def holders(self, name: str) -> tuple[str, ...]:
        """Names of all tensors that the base's own ``name`` is: two for a tied embedding or head."""
        both = (self.embedding, self.head)
        return tuple(other for other in both if other is not None) if self.tied and name in both else (name,)

    def settled(
        self,
        places: dict[str, Stored],
        base: Mapping[str, Stored],
        changed: Collection[str],
        files: Mapping[str, int],
        table: str,
    ) -> dict[str, Any]:
        """What of the base's configuration is another with the adapter: ``vocab_size``, ``tie_word_embeddings``, or nothing.

        Args:
            places: tensors of the base with the adapter, as ``apart`` names them; loses a head that still is the embedding.
            base: tensors of the base alone.
            changed: names of those that the adapter changed.
            files: descriptors of all files by name, to compare embedding and head where the adapter holds both.
            table: the adapter's file, for messages.

        Raises:
            CheckpointError: embedding and head have different numbers of rows, the embedding's name is not known, or the base
                ties the two, and stores two that differ.
        """
        mine = [name for name in changed if _EMBEDDING.fullmatch(name) or _OF_THE_HEAD.fullmatch(name)]
        if self.embedding is None or self.head is None:
            if mine and self.tied:
                rule = f"changes {mine[0]!r}, and the base model stores no embedding by a name that is known"
                raise CheckpointError(table, f"{rule}; store both in the base, with tie_word_embeddings false")
            return {}
        if (
            self.tied
            and mine
            and {self.embedding, self.head} <= base.keys()
            and not same_bytes(base[self.embedding], base[self.head], files)
        ):
            rule = f"ties {self.embedding!r} and {self.head!r}; both are stored, and they differ (tie_word_embeddings?)"
            raise CheckpointError("config.json", rule)
        rows = places[self.embedding].shape[0]
        for name in (self.head, *mine):
            if mine and places[name].shape[0] != rows:
                have = f"{name!r} has {places[name].shape[0]} rows with it, and {self.embedding!r} {rows}"
                raise CheckpointError(table, f"{have}: an adapter for another vocabulary must hold both, as peft saves them")
        stored = base[self.embedding if self.embedding in base else self.head]
        told: dict[str, Any] = {} if rows == stored.shape[0] else {"vocab_size": rows}
        if self.tied and mine and not same_bytes(places[self.embedding], places[self.head], files):
            return told | {"tie_word_embeddings": False}
        for name in (self.embedding, self.head):
            if name not in base:
                del places[name]
        return told


def one_for_both(module: str, stored: Iterable[str]) -> bool:
    """Whether a module is the head, and an embedding is stored that may be it, too."""
    return _HEAD.fullmatch(f"{module}.weight") is not None and _only(stored, _EMBEDDING) is not None


def _only(names: Iterable[str], pattern: re.Pattern[str]) -> str | None:
    return next((name for name in names if pattern.fullmatch(name)), None)


def same_bytes(one: Stored, other: Stored, files: Mapping[str, int]) -> bool:
    """Whether two tensors are one, or lie whole and in order in their files and are the same bytes there."""
    if one == other:
        return True
    (first, *more), (second, *others) = one.pieces, other.pieces
    if more or others or (one.dtype, one.shape) != (other.dtype, other.shape) or one.added or other.added:
        return False
    if any(piece.extent.strides != contiguous_strides(piece.extent.shape) for piece in (first, second)):
        return False
    left = first.extent.num_elements * first.extent.item_bytes
    at, there = first.extent.offset_bytes, second.extent.offset_bytes
    while left:
        size = min(left, _COMPARED_BYTES)
        if os.pread(files[first.file], size, at) != os.pread(files[second.file], size, there):
            return False
        at, there, left = at + size, there + size, left - size
    return True
