"""When a sequence ends by itself."""

from __future__ import annotations

from dataclasses import dataclass

from serve.types import FinishReason, StoppingParams


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a sequence ends."""

    reason: FinishReason
    matched: str | int | None = None
    """The stop string, or the stop or EOS id."""

    @property
    def is_by_id(self) -> bool:
        """Whether a token itself was the end, not what it did to the text or the count."""
        return self.reason in (FinishReason.EOS, FinishReason.STOP_ID)


LENGTH = Stop(FinishReason.LENGTH)


class StopRule:
    """The stopping rules of one request, as far as ids and counts decide. Stop strings are the text stream's."""

    __slots__ = ("_eos_ids", "_stop_ids", "end_ids", "include_stop", "max_new_tokens", "min_new_tokens")

    def __init__(self, stopping: StoppingParams, eos_ids: tuple[int, ...]) -> None:
        self._eos_ids = frozenset() if stopping.ignore_eos else frozenset(eos_ids)
        self._stop_ids = frozenset(stopping.stop_ids)
        self.end_ids = self._eos_ids | self._stop_ids
        """Ids that end a sequence: the ranks do not sample them before ``min_new_tokens``."""
        self.min_new_tokens = stopping.min_new_tokens
        self.max_new_tokens = stopping.max_new_tokens
        self.include_stop = stopping.include_stop

    def by_id(self, token_id: int, num_generated: int) -> Stop | None:
        """Whether this token, the ``num_generated``-th, is one that ends the sequence. An id that is both an EOS and a
        stop id counts as EOS."""
        if num_generated <= self.min_new_tokens:
            return None
        if token_id in self._eos_ids:
            return Stop(FinishReason.EOS, token_id)
        if token_id in self._stop_ids:
            return Stop(FinishReason.STOP_ID, token_id)
        return None
