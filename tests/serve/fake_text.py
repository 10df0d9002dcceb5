"""Text streams that can be checked by hand: token t is the letter number t modulo 26."""

from __future__ import annotations

from serve.engine.text import TextDelta
from serve.types import Generation


def letters(token_ids: list[int] | tuple[int, ...]) -> str:
    """The text of these tokens."""
    return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)


class LetterStream:
    """Holds back what may become a stop string; see ``serve.engine.text.TextStream``."""

    def __init__(self, generation: Generation) -> None:
        self._stops = generation.stopping.stop_strings
        self._include = generation.stopping.include_stop
        self._min_tokens = generation.stopping.min_new_tokens
        self._num_tokens = 0
        self._held = ""

    def push(self, token_id: int) -> TextDelta:
        self._num_tokens += 1
        self._held += letters((token_id,))
        if self._num_tokens < self._min_tokens:
            return TextDelta(self._take(len(self._held)))
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                return TextDelta(self._held[: start + len(stop) * self._include], stop)
        longest = max((len(stop) for stop in self._stops), default=1)
        for length in range(min(longest - 1, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return TextDelta(self._take(len(self._held) - length))
        return TextDelta(self._take(len(self._held)))

    def finish(self) -> str:
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        return text


def open_letters(generation: Generation, index: int) -> LetterStream:
    """A ``TextFactory``."""
    return LetterStream(generation)
