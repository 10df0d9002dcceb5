"""Which requests are alive, which of them wait for their first step, and whose deadline is next."""

from __future__ import annotations

from serve.engine.lazy_heap import LazyHeap
from serve.engine.queued import Queued
from serve.engine.sequence import LiveRequest
from serve.types import RequestId


class Registry:
    """The live requests by id.

    Always true (see ``check``): a request with a deadline is in the heap of deadlines; in the queue are the requests without
    ``started_seconds``.
    """

    def __init__(self, queue: Queued) -> None:
        self.queue = queue
        """Those that wait for their first step. For others to read."""
        self._requests: dict[RequestId, LiveRequest] = {}
        self._deadlines: LazyHeap[RequestId] = LazyHeap()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._requests

    @property
    def ids(self) -> tuple[RequestId, ...]:
        """Ids of all live requests, in order of arrival."""
        return tuple(self._requests)

    @property
    def requests(self) -> tuple[LiveRequest, ...]:
        """All live requests, in order of arrival."""
        return tuple(self._requests.values())

    @property
    def next_deadline_seconds(self) -> float | None:
        """The earliest deadline of all live requests."""
        key = self._deadlines.first_key()
        return key[0] if key is not None else None

    def get(self, request_id: RequestId) -> LiveRequest | None:
        return self._requests.get(request_id)

    def add(self, request: LiveRequest) -> None:
        """A new request, queued."""
        generation = request.generation
        self._requests[generation.request_id] = request
        self.queue.add(request)
        if generation.deadline_seconds is not None:
            self._deadlines.push(generation.request_id, (generation.deadline_seconds,))

    def start(self, request: LiveRequest, now: float) -> None:
        """A step of a request begins: with the first one it is queued no longer."""
        if request.started_seconds is None:
            self.queue.remove(request)
            request.started_seconds = now

    def remove(self, request: LiveRequest) -> None:
        """The request has ended."""
        del self._requests[request.generation.request_id]
        self._deadlines.discard(request.generation.request_id)
        if request.started_seconds is None:
            self.queue.remove(request)

    def overdue(self, now: float) -> LiveRequest | None:
        """The request whose deadline passed first, if any has."""
        deadline = self.next_deadline_seconds
        if deadline is None or deadline > now:
            return None
        request_id = self._deadlines.first()
        assert request_id is not None, "a deadline without a request"
        return self._requests[request_id]

    def started_and_pinned(self) -> tuple[LiveRequest, ...]:
        """The requests that began and whose tokens must all be made by the same weights. Looks at each request."""
        return tuple(r for r in self._requests.values() if r.is_pinned and r.started_seconds is not None)

    def check(self) -> None:
        """Assert what must always hold. Cost grows with the requests: for tests."""
        self._deadlines.check()
        self.queue.check([request for request in self._requests.values() if request.started_seconds is None])
        for request_id, request in self._requests.items():
            has_deadline = request.generation.deadline_seconds is not None
            assert (request_id in self._deadlines) == has_deadline, f"the deadline of {request_id} is not kept"
            assert request.sequences, f"request {request_id} lives without sequences"
