"""What one token adds to the text, for the kinds of decoder that allow to say it token by token."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any, Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Kind(Enum):
    """How a tokenizer's decoder makes text of tokens."""

    BYTE_LEVEL = "byte_level"
    """Each token is a string of bytes, written in GPT-2's alphabet of printable characters."""
    BYTE_FALLBACK = "byte_fallback"
    """Tokens are text with ``▁`` for a space, and ``<0xNN>`` for single bytes (SentencePiece)."""
    OTHER = "other"
    """Neighbouring tokens change each other's text, or the decoder is of a kind that is not known here."""


def decoder_kind(backend: Tokenizer) -> tuple[Kind, bool]:
    """The kind, and whether one space at the very start of a text is dropped."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    names = [step.get("type") for step in steps]
    if names == ["ByteLevel"]:
        return Kind.BYTE_LEVEL, False
    if names[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == {
        "type": "Replace",
        "pattern": {"String": "▁"},
        "content": " ",
    }:
        if names[3:] == []:
            return Kind.BYTE_FALLBACK, False
        if names[3:] == ["Strip"] and (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) == (" ", 1, 0):
            return Kind.BYTE_FALLBACK, True
    return Kind.OTHER, False


class Pieces:
    """Per token id, its bytes; worked out when an id is first met, and kept.

    Special tokens and ids the tokenizer does not know have none.
    """

    def __init__(self, backend: Tokenizer, kind: Kind, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._make = _byte_level_piece if kind is Kind.BYTE_LEVEL else _fallback_piece
        self._special_ids = special_ids
        self._known: dict[int, tuple[bytes, bool]] = {}

    def __getitem__(self, token_id: int) -> tuple[bytes, bool]:
        """The token's UTF-8 bytes, and whether it is a lone byte rather than text."""
        piece = self._known.get(token_id)
        if piece is None:
            token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
            piece = self._known[token_id] = (b"", False) if token is None else self._make(token)
        return piece


def _byte_level_piece(token: str) -> tuple[bytes, bool]:
    try:
        return bytes(_BYTE_OF[character] for character in token), False
    except KeyError:
        # Added tokens are plain text: one character outside the alphabet, such as a space, says so.
        return token.encode(), False


def _fallback_piece(token: str) -> tuple[bytes, bool]:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes([int(byte[1], 16)]), True
    return token.replace("▁", " ").encode(), False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()
