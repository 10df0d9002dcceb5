"""When a call that its client ended was ended by its deadline.

A client whose deadline passes sends the same word as one that cancels, and before the deadline passes here. Two things put it
off here: gRPC's clients round the time left up when they send it, and here it counts from the moment the call is read, which is
later by the way and by whatever kept this process. The first is known exactly; for the second there is an allowance.
"""

from __future__ import annotations

import math
from typing import Final

LEAST_SECONDS: Final = 0.002
"""A call with less time left gets no work done: gRPC rounds a deadline that has passed up to a millisecond that is left, and
no answer is as quick."""

_WAY_SECONDS: Final = 0.25
_WAY_SHARE: Final = 0.5
"""Time that a call may have been under way, and what share of its whole time at most."""


def rounding_seconds(allowed_seconds: float) -> float:
    """What a timeout may have been rounded up by when it was sent.

    gRPC core sends milliseconds below a second and three digits above: steps of 10 ms from one second on, of 100 ms from ten.
    Other implementations send more digits.
    """
    digits = math.floor(math.log10(max(allowed_seconds, 1e-3)))
    return max(1e-3, 10.0 ** (digits - 2))


def is_expired(remaining_seconds: float | None, allowed_seconds: float | None) -> bool:
    """Whether a call that its client ended had reached its deadline there.

    Args:
        remaining_seconds: time left here when the end came; ``None`` for a call without a deadline.
        allowed_seconds: the same when the call began.
    """
    if remaining_seconds is None or allowed_seconds is None:
        return False
    early = rounding_seconds(allowed_seconds) + min(_WAY_SECONDS, allowed_seconds * _WAY_SHARE)
    return remaining_seconds <= max(LEAST_SECONDS, early)
