"""Requests that wait for their first step: how many, of whom, and who gives way where no more may wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal

from serve.engine.sequence import LiveRequest
from serve.types import Generation, RequestId

QueueLimit = Literal["requests", "tokens"]


class _Line:
    """What waits of one tenant, in order of arrival."""

    def __init__(self) -> None:
        self.requests: OrderedDict[RequestId, LiveRequest] = OrderedDict()
        self.tokens = 0


class Queued:
    """The queue as its limits see it; whose turn it is there is the scheduler's to say.

    Whoever is alone may fill it. Where several tenants wait, each may have its part: the limits divided by their number. In a
    full queue there is always one who has more than that, and whose newest requests make room for another's.

    Changed by the engine's thread alone. ``limit_met`` is for any thread: it reads single numbers, which may be a moment apart.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max_requests, self._max_tokens = max_requests, max_tokens
        # Arrivals, the oldest first: a plain dict would look long for its first entry where many have left.
        self._arrivals: OrderedDict[RequestId, float] = OrderedDict()
        self._lines: dict[str, _Line] = {}
        self.tokens = 0
        """Tokens of all prompts that wait."""

    @property
    def requests(self) -> int:
        """How many requests wait."""
        return len(self._arrivals)

    @property
    def requests_of(self) -> dict[str, int]:
        """How many of each tenant wait of whom any do."""
        return {tenant: len(line.requests) for tenant, line in self._lines.items()}

    @property
    def since_seconds(self) -> float | None:
        """When the one of those that waits longest arrived."""
        return next(iter(self._arrivals.values()), None)

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """Ids of the requests that wait, in order of arrival."""
        return tuple(self._arrivals)

    def add(self, request: LiveRequest) -> None:
        generation = request.generation
        line = self._lines.setdefault(generation.tenant, _Line())
        line.requests[generation.request_id] = request
        line.tokens += request.num_prompt_tokens
        self._arrivals[generation.request_id] = generation.arrival_seconds
        self.tokens += request.num_prompt_tokens

    def remove(self, request: LiveRequest) -> None:
        """Take out a request that waits no longer."""
        generation = request.generation
        line = self._lines[generation.tenant]
        del line.requests[generation.request_id], self._arrivals[generation.request_id]
        line.tokens -= request.num_prompt_tokens
        self.tokens -= request.num_prompt_tokens
        if not line.requests:
            del self._lines[generation.tenant]

    def limit_met(self, generation: Generation, coming: tuple[int, int] = (0, 0)) -> QueueLimit | None:
        """Which limit keeps a request out; ``None`` if it may wait, be it in place of another tenant's. Any thread.

        Args:
            coming: requests on their way here, and tokens of their prompts.
        """
        requests, tokens = self.requests + coming[0], self.tokens + coming[1]
        line, num_prompt = self._lines.get(generation.tenant), len(generation.prompt_ids)
        num_tenants = len(self._lines) + (line is None)
        own = (requests, tokens) if num_tenants == 1 else (0, 0) if line is None else (len(line.requests), line.tokens)
        if requests >= self._max_requests and own[0] >= self._max_requests // num_tenants:
            return "requests"
        # A larger prompt than all may have together is taken when nothing else waits.
        if requests and tokens + num_prompt > self._max_tokens and own[1] + num_prompt > self._max_tokens // num_tenants:
            return "tokens"
        return None

    def in_the_way_of(self, generation: Generation) -> list[LiveRequest] | None:
        """Which requests must leave so that one may wait that ``limit_met`` lets in: none, mostly.

        They are the newest of the tenant that has most, of no larger priority. ``None``: there are not enough of those.
        """
        too_many = self.requests + 1 - self._max_requests
        too_much = self.tokens + len(generation.prompt_ids) - self._max_tokens if self.requests else 0
        leaving: list[LiveRequest] = []
        if too_many <= 0 and too_much <= 0:
            return leaving
        having: Callable[[_Line], int] = (lambda line: line.tokens) if too_much > 0 else (lambda line: len(line.requests))
        for request in reversed(max(self._lines.values(), key=having).requests.values()):
            if request.generation.priority <= generation.priority:
                leaving.append(request)
                too_many, too_much = too_many - 1, too_much - request.num_prompt_tokens
                if too_many <= 0 and too_much <= 0:
                    return leaving
        return None

    def check(self, waiting: list[LiveRequest]) -> None:
        """Assert what must always hold, given the requests that wait in order of arrival. For tests."""
        assert [request.generation.request_id for request in waiting] == list(self._arrivals), "the queued requests are wrong"
        assert sum(request.num_prompt_tokens for request in waiting) == self.tokens, "the queued tokens are wrong"
        for tenant in {request.generation.tenant for request in waiting} | set(self._lines):
            own = [request for request in waiting if request.generation.tenant == tenant]
            line = self._lines[tenant]
            assert own == list(line.requests.values()), f"what waits of tenant {tenant!r} is wrong"
            assert sum(request.num_prompt_tokens for request in own) == line.tokens, f"the tokens of {tenant!r} are wrong"
