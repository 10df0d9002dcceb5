"""When a call that its client ended was ended by its deadline.

A client whose deadline passes sends the same word as one that cancels, and before the deadline passes here. Two things put it
off here: gRPC's clients round the time left up when they send it, and here it counts from the moment the call is read, which is
later by the way and by whatever kept this process. The first is known exactly; for the second there is an allowance.
"""

from __future__ import annotations

import math
from typing import Final

from serve.errors import DeadlineExpired
from serve.runtime.stream import Stream

LEAST_SECONDS: Final = 0.002
"""A call with less time left gets no work done: gRPC rounds a deadline that has passed up to a millisecond that is left, and
no answer is as quick."""

_WAY_SECONDS: Final = (0.05, 0.25)
_WAY_SHARE: Final = 0.5
"""Time that a call may have been under way: a share of its whole time, from the first to the second. However short its time, a
process that waits for a processor may be the first late, and then what is left of the whole is known to be less than it was."""


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
    least, most = _WAY_SECONDS
    early = rounding_seconds(allowed_seconds) + min(most, max(least, allowed_seconds * _WAY_SHARE))
    return remaining_seconds <= early


def leave(stream: Stream, now_seconds: float) -> None:
    """Nobody reads the stream any more: whatever it still does ends, by its deadline if that is why its reader has gone.

    gRPC's own timer may end a call at the deadline before the engine does: that is no cancel.
    """
    deadline, arrival = stream.generation.deadline_seconds, stream.generation.arrival_seconds
    if deadline is not None and is_expired(deadline - now_seconds, deadline - arrival):
        stream.cut(DeadlineExpired("the request's deadline passed"))
    stream.close()
