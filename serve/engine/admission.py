"""Whether one request more may wait, what it is refused with if not, and who leaves for it."""

from __future__ import annotations

from serve.engine.limits import EngineLimits
from serve.engine.queued import Queued, QueueLimit
from serve.engine.sequence import LiveRequest
from serve.engine.stats import StepTotals
from serve.errors import PutOut, QueueFull
from serve.types import Generation

_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0


class Admission:
    """The door of the queue. Any thread may ask for a ``refusal``, so that nobody waits for a step to end to be refused."""

    def __init__(self, queue: Queued, limits: EngineLimits, totals: StepTotals) -> None:
        """
        Args:
            totals: of the steps so far, which tell how soon there may be room.
        """
        self._queue = queue
        self._limits = limits
        self._totals = totals

    def refusal(self, generation: Generation, coming: tuple[int, int] = (0, 0)) -> QueueFull | None:
        """What a request is refused with that may not wait, given the requests that come before it and their prompt tokens."""
        limit = self._queue.limit_met(generation, coming)
        return None if limit is None else self._full(limit, generation, coming)

    def make_room(self, generation: Generation) -> tuple[list[LiveRequest], PutOut | None]:
        """Who must leave so that a request may wait, and what they end with.

        Raises:
            QueueFull: it may not.
        """
        if (refusal := self.refusal(generation)) is not None:
            raise refusal
        leaving = self._queue.in_the_way_of(generation)
        if leaving is None:  # those of others have larger priority
            raise self._full("requests", generation, (0, 0))
        if not leaving:
            return [], None
        seconds = self._retry_after_seconds()
        message = f"the queue is full, and another tenant has less than its part of it; try again in {seconds:.0f} s"
        return leaving, PutOut(message, reason="requests", retry_after_seconds=seconds)

    def _full(self, limit: QueueLimit, generation: Generation, coming: tuple[int, int]) -> QueueFull:
        seconds = self._retry_after_seconds()
        if limit == "requests":
            count = self._queue.requests + coming[0]
            message = f"{count} requests are waiting, which is the limit; try again in {seconds:.0f} s"
        else:
            message = (
                f"{self._queue.tokens + coming[1]} prompt tokens are waiting, and {len(generation.prompt_ids)} more would "
                f"exceed the limit of {self._limits.max_queued_tokens}; try again in {seconds:.0f} s"
            )
        return QueueFull(message, reason=limit, retry_after_seconds=seconds)

    def _retry_after_seconds(self) -> float:
        """The time that the prompts which wait take at the speed so far, within reason."""
        if not self._totals.tokens:
            return _MIN_RETRY_SECONDS
        expected = self._queue.tokens * self._totals.seconds / self._totals.tokens
        return min(_MAX_RETRY_SECONDS, max(_MIN_RETRY_SECONDS, expected))
