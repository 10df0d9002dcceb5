"""What the two clients share: how to reach a server, how long to wait, and when a call may be tried again."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Final

from serve.client.errors import TesseraError

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
DEFAULT_TIMEOUT_SECONDS: Final = 600.0

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Finds out within 30 seconds that the server's machine has gone; servers allow a ping every 10.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVING: Final = 1
"""``grpc.health.v1.HealthCheckResponse.SERVING``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When a call that brought nothing yet may be tried again."""

    retries: int = 3
    """Further attempts after UNAVAILABLE: the server is loading, draining, restarting or not there."""
    when_full: bool = False
    """Whether RESOURCE_EXHAUSTED is retried too, after the time the server names."""

    def wait_seconds(self, error: TesseraError, attempt: int) -> float | None:
        """How long to wait after the failed attempt number ``attempt``, from 0; ``None``: do not try again."""
        if attempt >= self.retries:
            return None
        if error.code == "UNAVAILABLE":
            # Exponential with jitter, so that many clients do not come back at the same moment; never before the server's time.
            wait = min(2.0, 0.1 * 2.0**attempt) * random.uniform(0.5, 1.0)
            return wait + (error.retry_after_seconds or 0.0)
        if error.code == "RESOURCE_EXHAUSTED" and self.when_full and error.retry_after_seconds is not None:
            return error.retry_after_seconds
        return None


class Deadline:
    """The end of a call, all attempts together."""

    def __init__(self, timeout_seconds: float | None) -> None:
        """
        Args:
            timeout_seconds: ``None`` and infinity never end.
        """
        ends = timeout_seconds is not None and timeout_seconds != math.inf
        self._end = time.monotonic() + timeout_seconds if ends and timeout_seconds is not None else None

    @property
    def remaining_seconds(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def allows(self, wait_seconds: float) -> bool:
        """Whether there is time left after waiting."""
        remaining = self.remaining_seconds
        return remaining is None or wait_seconds < remaining


class Attempts:
    """Counts the attempts of one call and says how long to wait between them."""

    def __init__(self, policy: RetryPolicy, deadline: Deadline) -> None:
        self._policy = policy
        self._deadline = deadline
        self._count = 0

    def wait_or_raise(self, error: TesseraError) -> float:
        """Seconds to wait before the next attempt.

        Raises:
            TesseraError: the given one, when there is no further attempt.
        """
        wait = self._policy.wait_seconds(error, self._count)
        self._count += 1
        if wait is None or not self._deadline.allows(wait):
            raise error
        return wait


def not_serving_in_time() -> TesseraError:
    """What waiting for a server ends with when the time is over."""
    return TesseraError("DEADLINE_EXCEEDED", "the server is not serving yet")
