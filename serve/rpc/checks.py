"""Collects what is wrong with a request, so that a client learns of all of it at once."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from typing import Final

from serve.config import AdmissionConfig
from serve.errors import InvalidRequest, Violation

REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
MAX_CACHE_SALT_BYTES: Final = 256
MAX_PRIORITY: Final = 1_000_000


def _single(value: float) -> float:
    """The number that a protobuf ``float`` field holds for this one."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


class Checks:
    """The broken rules of one request. Each check adds at most one violation."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    def refuse(self, field: str, rule: str) -> None:
        """Note that a field breaks a rule, which the message says after the field's name."""
        self._violations.append(Violation(field, rule))

    def settle(self) -> None:
        """
        Raises:
            InvalidRequest: at least one rule was broken.
        """
        if self._violations:
            raise InvalidRequest(self._violations)

    def within(self, field: str, value: float, low: float, high: float) -> bool:
        """The value is finite and in [low, high]. Fractions arrive in single precision, and so are the bounds compared."""
        is_bound = isinstance(value, float) and value in (_single(low), _single(high))
        good = math.isfinite(value) and (low <= value <= high or is_bound)
        if not good:
            self.refuse(field, f"is {_number(value)}; it must lie between {_number(low)} and {_number(high)}")
        return good

    def share(self, field: str, value: float) -> bool:
        """The value is finite and in (0, 1]."""
        good = math.isfinite(value) and 0.0 < value <= 1.0
        if not good:
            self.refuse(field, f"is {_number(value)}; it must be above 0 and at most 1")
        return good

    def count(self, field: str, values: Sequence[object], limit: int) -> bool:
        """There are at most ``limit`` values."""
        if len(values) > limit:
            self.refuse(field, f"has {len(values)} entries; the limit is {limit}")
        return len(values) <= limit

    def token_ids(self, field: str, ids: Sequence[int], vocab_size: int) -> None:
        """Every id is in [0, vocab_size); the first that is not is named."""
        if max(ids, default=0) < vocab_size:
            return
        place, token_id = next((place, token_id) for place, token_id in enumerate(ids) if token_id >= vocab_size)
        self.refuse(f"{field}[{place}]", f"is {token_id}; the vocabulary has {vocab_size} tokens")

    def logprobs(self, field: str, num_tokens: int, top: int, limits: AdmissionConfig) -> None:
        """One answer can hold a log probability of each given token and of the ``top`` likeliest at its place."""
        wanted, limit = num_tokens * (1 + top), limits.max_answer_logprobs
        if wanted > limit:
            self.refuse(field, f"asks for {wanted} log probabilities of {num_tokens} tokens; one answer has {limit} at most")

    def request_id(self, value: str) -> None:
        """Empty, or of the allowed characters and length."""
        if value and not REQUEST_ID.fullmatch(value):
            self.refuse("request_id", "must be 1 to 128 characters, each of A-Z a-z 0-9 . _ : -")

    def cache_salt(self, value: str) -> None:
        num_bytes = len(value.encode())
        if num_bytes > MAX_CACHE_SALT_BYTES:
            self.refuse("cache_salt", f"has {num_bytes} bytes; the limit is {MAX_CACHE_SALT_BYTES}")

    def text_bytes(self, field: str, text: str, limit: int) -> bool:
        """The text's UTF-8 is at most ``limit`` bytes."""
        # A character is at least one byte: a text that is too long in characters need not be encoded to know.
        num_bytes = len(text) if len(text) > limit else len(text.encode())
        if num_bytes > limit:
            self.refuse(field, f"has at least {num_bytes} bytes; the limit is {limit}")
        return num_bytes <= limit


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
