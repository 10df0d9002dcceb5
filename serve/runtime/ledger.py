"""Turns the events of requests into request metrics: each accepted request is counted once, however it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from serve.metrics import Metrics
from serve.series import Course
from serve.types import Event, Generation, PromptReady, RequestFailed, RequestId, SequenceFinished, TokensOut

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tally:
    """What has been seen of one request."""

    arrival_seconds: float
    prompt_tokens: int
    tenant: str
    trace_id: str = ""
    """The trace that the request is a part of, for exemplars; empty where it is not traced."""
    first_token_seconds: float | None = None
    """Since its arrival."""
    num_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens counted so far, by sequence index."""
    last_token_seconds: dict[int, float] = field(default_factory=dict)
    """Time of the newest token, by sequence index."""

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens.values())


class Ledger:
    """Owns the tallies of the requests that are alive in the engine. Called by the engine thread alone."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._tallies: dict[RequestId, _Tally] = {}

    def accepted(self, generation: Generation, trace_id: str = "") -> None:
        """The engine took the request, which may be a part of a trace."""
        tenant, prompt_tokens = generation.tenant, len(generation.prompt_ids)
        self._tallies[generation.request_id] = _Tally(generation.arrival_seconds, prompt_tokens, tenant, trace_id)
        self._metrics.tenants.accepted(tenant)

    def saw(self, event: Event) -> None:
        """Count ``event``. Called before the event can reach the client, so that no client is ahead of the counters."""
        tally = self._tallies.get(event.request_id)
        if tally is None:
            return
        if isinstance(event, TokensOut):
            self._count_tokens(tally, event)
        elif isinstance(event, PromptReady):
            self._metrics.prompt_computed(event.prompt_tokens)
            self._metrics.tenants.computed(tally.tenant, event.prompt_tokens)
        elif isinstance(event, SequenceFinished):
            self._end_sequence(tally, event)
        else:
            assert isinstance(event, RequestFailed)
            self._measure(tally)
            self._metrics.failed(event, total_seconds=max(0.0, self._clock() - tally.arrival_seconds))
            named = {"request_id": event.request_id}
            _log.debug("request %s ended after %d tokens: %s", event.request_id, tally.total_tokens, event.error, extra=named)
            del self._tallies[event.request_id]

    def _count_tokens(self, tally: _Tally, event: TokensOut) -> None:
        now = self._clock()
        count = len(event.token_ids)
        tally.num_tokens[event.index] = tally.num_tokens.get(event.index, 0) + count
        if count:
            self._generated(tally, count)
        if tally.first_token_seconds is None:
            tally.first_token_seconds = max(0.0, now - tally.arrival_seconds)
            self._metrics.first_token(tally.first_token_seconds, tally.trace_id)
        last = tally.last_token_seconds.get(event.index)
        if last is not None:
            self._metrics.next_token(now - last)
        tally.last_token_seconds[event.index] = now

    def _generated(self, tally: _Tally, count: int) -> None:
        self._metrics.tokens_generated(count)
        self._metrics.tenants.generated(tally.tenant, count)

    def _end_sequence(self, tally: _Tally, event: SequenceFinished) -> None:
        # A stop id or EOS is generated but not delivered: usage knows of it, the deltas do not.
        unseen = event.usage.completion_tokens - tally.num_tokens.get(event.index, 0)
        if unseen > 0:
            self._generated(tally, unseen)
            tally.num_tokens[event.index] = event.usage.completion_tokens
        if event.usage.completion_tokens and tally.first_token_seconds is None:
            tally.first_token_seconds = event.timings.first_token_seconds
            self._metrics.first_token(tally.first_token_seconds, tally.trace_id)
        if event.request_done:
            self._measure(tally)
            self._metrics.finished(event.reason, _course_of(tally, event))
            _log.debug(
                "request %s ended by %s: prompt=%d cached=%d completion=%d queue=%.3f s first_token=%.3f s total=%.3f s",
                event.request_id, event.reason.value, event.usage.prompt_tokens, event.usage.cached_tokens,
                tally.total_tokens, event.timings.queue_seconds, event.timings.first_token_seconds, event.timings.total_seconds,
            )  # fmt: skip
            del self._tallies[event.request_id]

    def _measure(self, tally: _Tally) -> None:
        self._metrics.lengths.measured(prompt_tokens=tally.prompt_tokens, generation_tokens=tally.total_tokens)


def _course_of(tally: _Tally, event: SequenceFinished) -> Course:
    return Course(
        queue_seconds=event.timings.queue_seconds,
        first_token_seconds=tally.first_token_seconds,
        total_seconds=event.timings.total_seconds,
        longest_tokens=max(tally.num_tokens.values(), default=0),
        trace_id=tally.trace_id,
    )
