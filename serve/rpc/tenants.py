"""What each tenant takes, held to the limits of its tokens."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from serve.errors import InvalidRequest, QueueFull, TenantLimited, Unavailable
from serve.rpc.identity import Caller

_MINUTE_SECONDS = 60.0
_MIN_RETRY_SECONDS = 1.0

REFUSALS: Final = (QueueFull, Unavailable)
"""Errors by which the server turns a request away for want of room or service; the request itself may be in order."""


class Bucket:
    """Refills steadily and holds a minute's worth. May be overdrawn: who took too much waits for longer."""

    def __init__(self, now_seconds: float) -> None:
        self._used = 0.0
        """What was taken and is not yet refilled."""
        self._at_seconds = now_seconds

    def wait_seconds(self, count: int, per_minute: int, now_seconds: float) -> float:
        """How long until ``count`` may be taken; 0 if now. More than a minute's worth may be taken from a full bucket."""
        self._used = max(0.0, self._used - (now_seconds - self._at_seconds) * per_minute / _MINUTE_SECONDS)
        self._at_seconds = now_seconds
        return max(0.0, self._used - max(0, per_minute - count)) * _MINUTE_SECONDS / per_minute

    def take(self, count: int) -> None:
        self._used += count

    def give_back(self, count: int) -> None:
        """Undo a ``take``; what was refilled since then is full already."""
        self._used = max(0.0, self._used - count)


class _Tenant:
    def __init__(self, now_seconds: float) -> None:
        self.requests = Bucket(now_seconds)
        self.tokens = Bucket(now_seconds)
        self.num_inside = 0
        """Requests that run, wait for that, or are still to be made tokens; counted where ``max_running`` is given."""
        self.num_running = 0
        self.waiting: deque[asyncio.Future[None]] = deque()
        """The turns that are waited for."""


class Told(Protocol):
    """What is told of tenants, by name."""

    def refused(self, tenant: str, limit: str) -> None:
        """A request was refused by this limit."""
        ...

    def held(self, tenant: str, requests: int) -> None:
        """So many requests wait for others of the tenant to end."""
        ...


class Tenants:
    """Lets a tenant's request in, makes it wait for another of the same tenant, or refuses it. Belongs to the event loop.

    Tenants without limits cost nothing. Limits are those of the caller of each request, so that a changed file counts at once.
    """

    def __init__(self, clock: Callable[[], float], told: Told, *, most_queued: int) -> None:
        """
        Args:
            clock: monotonic seconds.
            told: of every refusal and of what waits here.
            most_queued: requests of a tenant that may wait, where its tokens say how many run and not how many wait.
        """
        self._clock = clock
        self.told = told
        self._most_queued = most_queued
        self._tenants: dict[str, _Tenant] = {}

    def enter(self, caller: Caller, priority: int) -> Ticket:
        """Let a request in before any work is done on it. It counts among the requests of its minute from now on.

        Raises:
            InvalidRequest: its priority is larger than the tenant's may be.
            TenantLimited: a limit is met.
        """
        limits, tenant = caller.limits, self._of(caller)
        if priority > limits.max_priority:
            rule = f"{priority} is more than {limits.max_priority}, the most {caller.name} may ask for"
            raise InvalidRequest.of("priority", f"{rule}; max_priority in the file of tokens can allow more")
        self.require_rate(caller, tenant, "requests_per_minute", 1)
        self.require_rate(caller, tenant, "tokens_per_minute", 1)
        if limits.max_running is not None:
            most_queued = self._most_queued if limits.max_queued is None else limits.max_queued
            if tenant.num_inside >= limits.max_running + most_queued:
                num_waiting = tenant.num_inside - limits.max_running
                self._refuse(caller, "queued", f"{num_waiting} requests of {caller.name} wait, which is its limit", 0.0)
            tenant.num_inside += 1
        tenant.requests.take(limits.requests_per_minute is not None)
        return Ticket(self, caller, tenant)

    def generated(self, caller: Caller, count: int) -> None:
        """Count tokens that were generated."""
        if caller.limits.tokens_per_minute is not None:
            self._of(caller).tokens.take(count)

    def require_rate(self, caller: Caller, tenant: _Tenant, name: str, count: int) -> None:
        """
        Raises:
            TenantLimited: so much may not be taken now.
        """
        rate = getattr(caller.limits, name)
        if rate is None:
            return
        bucket = tenant.requests if name == "requests_per_minute" else tenant.tokens
        if (wait := bucket.wait_seconds(count, rate, self._clock())) > 0:
            self._refuse(caller, name, f"{caller.name} may take {rate} {name.replace('_', ' ')}", wait)

    def _of(self, caller: Caller) -> _Tenant:
        found = self._tenants.get(caller.name)
        if found is None:
            found = self._tenants[caller.name] = _Tenant(self._clock())
        return found

    def _refuse(self, caller: Caller, limit: str, message: str, wait_seconds: float) -> None:
        self.told.refused(caller.name, limit)
        raise TenantLimited(message, reason=limit, retry_after_seconds=max(_MIN_RETRY_SECONDS, wait_seconds))


class Ticket:
    """A request that its tenant's limits have let in, until it ends."""

    def __init__(self, tenants: Tenants, caller: Caller, tenant: _Tenant) -> None:
        """``Tenants.enter`` makes it."""
        self._tenants = tenants
        self._caller = caller
        self._tenant = tenant
        self._max_running = caller.limits.max_running
        self._prompt_tokens = 0
        """Taken of the tenant's tokens a minute."""
        self._runs = False

    async def begin(self, prompt_tokens: int) -> None:
        """Count the prompt, and wait until the request may go to the engine.

        Raises:
            TenantLimited: the prompt is more than may be taken now.
        """
        self._tenants.require_rate(self._caller, self._tenant, "tokens_per_minute", prompt_tokens)
        if self._caller.limits.tokens_per_minute is not None:
            self._tenant.tokens.take(prompt_tokens)
            self._prompt_tokens = prompt_tokens
        if self._max_running is None:
            return
        if self._tenant.num_running >= self._max_running or self._tenant.waiting:
            await self._turn(asyncio.get_running_loop().create_future())
        else:
            self._tenant.num_running += 1
        self._runs = True

    def end(self, *, refused: bool = False) -> None:
        """The request has ended; called once.

        Args:
            refused: whether the server has turned it away before anything was computed: then it has cost nothing.
        """
        tenant = self._tenant
        if refused:
            tenant.requests.give_back(self._caller.limits.requests_per_minute is not None)
            tenant.tokens.give_back(self._prompt_tokens)
        if self._max_running is not None:
            tenant.num_inside -= 1
            tenant.num_running -= self._runs
            self._wake()

    async def _turn(self, own: asyncio.Future[None]) -> None:
        """Wait for one that runs to end; it hands over its place."""
        waiting = self._tenant.waiting
        waiting.append(own)
        self._tenants.told.held(self._caller.name, len(waiting))
        try:
            await own
        except asyncio.CancelledError:
            if own in waiting:
                waiting.remove(own)
            elif not own.cancelled():
                self._runs = True  # it was this one's turn at the moment its call ended
            raise
        finally:
            self._tenants.told.held(self._caller.name, len(waiting))

    def _wake(self) -> None:
        tenant = self._tenant
        while tenant.waiting and self._max_running is not None and tenant.num_running < self._max_running:
            own = tenant.waiting.popleft()
            if own.cancelled():
                continue
            tenant.num_running += 1
            own.set_result(None)
