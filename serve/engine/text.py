"""The seam beside the engine: something that turns the ids of one sequence into text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serve.types import Generation


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one token added to the text."""

    text: str
    """Whole characters that are certain: none of them can still become part of a stop string."""
    matched_stop: str | None = None
    """The stop string this token completed. ``text`` then ends before it, or after it with ``include_stop``."""


class TextStream(Protocol):
    """The text of one sequence, made token by token. It knows the request's stop strings and looks for none of them
    before ``min_new_tokens`` tokens were pushed."""

    def push(self, token_id: int) -> TextDelta:
        """Add one token; not called again after a stop string was matched."""
        ...

    def finish(self) -> str:
        """The text that was held back, when the sequence ends otherwise than by a stop string. Called once, last."""
        ...


TextFactory = Callable[[Generation, int], TextStream]
"""(request, sequence index) -> the stream of that sequence."""
