"""When a call that its client ended was ended by its deadline.

A client whose deadline passes sends the same word as one that cancels, and before the deadline passes here: the time left is
rounded up on the wire, to three digits, and counts from the moment the call arrives.
"""

from __future__ import annotations

from typing import Final

LEAST_SECONDS: Final = 0.002
"""A call with less time left gets no work done: gRPC rounds a deadline that has passed up to a millisecond that is left, and
no answer is as quick."""

_ROUNDED: Final = 0.01
"""Share of its time that rounding may add to a call."""

_WAY_SECONDS: Final = 0.1
_WAY_SHARE: Final = 0.25
"""Time that a call may have been under way, and what share of its whole time at most."""


def is_expired(remaining_seconds: float | None, allowed_seconds: float | None) -> bool:
    """Whether a call that its client ended had reached its deadline there.

    Args:
        remaining_seconds: time left here when the end came; ``None`` for a call without a deadline.
        allowed_seconds: the same when the call began.
    """
    if remaining_seconds is None or allowed_seconds is None:
        return False
    early = allowed_seconds * _ROUNDED + min(_WAY_SECONDS, allowed_seconds * _WAY_SHARE)
    return remaining_seconds <= max(LEAST_SECONDS, early)
