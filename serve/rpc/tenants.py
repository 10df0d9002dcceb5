"""What each tenant takes, held to the limits of its tokens."""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable

from serve.errors import InvalidRequest, TenantLimited
from serve.rpc.identity import Caller

_MINUTE_SECONDS = 60.0
_MIN_RETRY_SECONDS = 1.0


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


class _Tenant:
    def __init__(self, now_seconds: float) -> None:
        self.requests = Bucket(now_seconds)
        self.tokens = Bucket(now_seconds)
        self.num_running = 0
        self.waiting: deque[asyncio.Future[None]] = deque()


class Tenants:
    """Lets a tenant's request in, makes it wait for another of the same tenant, or refuses it. Belongs to the event loop.

    Tenants without limits cost nothing. Limits are those of the caller of each request, so that a changed file counts at once.
    """

    def __init__(self, clock: Callable[[], float], refused: Callable[[str, str], None]) -> None:
        """
        Args:
            clock: monotonic seconds.
            refused: told (tenant, limit) of every refusal.
        """
        self._clock = clock
        self._refused = refused
        self._tenants: dict[str, _Tenant] = {}

    async def admit(self, caller: Caller, *, prompt_tokens: int, priority: int) -> Callable[[], None]:
        """Wait until the request may begin.

        Args:
            prompt_tokens: counted when it is let in; what is generated is counted by ``generated``.

        Returns:
            To be called once, when the request has ended.

        Raises:
            InvalidRequest: its priority is larger than the tenant's may be.
            TenantLimited: a limit is met.
        """
        limits = caller.limits
        if limits.max_priority is not None and priority > limits.max_priority:
            rule = f"{priority} is more than {limits.max_priority}, the most {caller.name} may ask for"
            raise InvalidRequest.of("priority", rule)
        tenant = self._of(caller)
        self._take_rates(caller, tenant, prompt_tokens)
        if limits.max_running is None:
            return lambda: None
        if tenant.num_running >= limits.max_running or tenant.waiting:
            if limits.max_queued is not None and len(tenant.waiting) >= limits.max_queued:
                self._refuse(caller, "queued", f"{len(tenant.waiting)} requests of {caller.name} wait, which is its limit", 1.0)
            await self._turn(tenant)
        else:
            tenant.num_running += 1
        return functools.partial(self._end, tenant, limits.max_running)

    def generated(self, caller: Caller, count: int) -> None:
        """Count tokens that were generated."""
        if caller.limits.tokens_per_minute is not None:
            self._of(caller).tokens.take(count)

    def _of(self, caller: Caller) -> _Tenant:
        found = self._tenants.get(caller.name)
        if found is None:
            found = self._tenants[caller.name] = _Tenant(self._clock())
        return found

    def _take_rates(self, caller: Caller, tenant: _Tenant, prompt_tokens: int) -> None:
        limits, now = caller.limits, self._clock()
        for name, bucket, count, rate in (
            ("requests_per_minute", tenant.requests, 1, limits.requests_per_minute),
            ("tokens_per_minute", tenant.tokens, prompt_tokens, limits.tokens_per_minute),
        ):
            if rate is not None and (wait := bucket.wait_seconds(count, rate, now)) > 0:
                self._refuse(caller, name, f"{caller.name} may take {rate} {name.replace('_', ' ')}", wait)
        tenant.requests.take(1 if limits.requests_per_minute is not None else 0)
        tenant.tokens.take(prompt_tokens if limits.tokens_per_minute is not None else 0)

    def _refuse(self, caller: Caller, limit: str, message: str, wait_seconds: float) -> None:
        self._refused(caller.name, limit)
        raise TenantLimited(message, reason=limit, retry_after_seconds=max(_MIN_RETRY_SECONDS, wait_seconds))

    async def _turn(self, tenant: _Tenant) -> None:
        """Wait for one that runs to end; it hands over its place."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        tenant.waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                tenant.num_running -= 1  # it was this one's turn at the moment its call ended
                self._wake(tenant, tenant.num_running + 1)
            else:
                tenant.waiting.remove(turn)
            raise

    def _end(self, tenant: _Tenant, max_running: int) -> None:
        tenant.num_running -= 1
        self._wake(tenant, max_running)

    def _wake(self, tenant: _Tenant, max_running: int) -> None:
        while tenant.waiting and tenant.num_running < max_running:
            turn = tenant.waiting.popleft()
            if not turn.done():
                tenant.num_running += 1
                turn.set_result(None)
