"""Several servers of one model, used as one: calls are spread, and go elsewhere when a server fails."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Self, Unpack

from serve.client.aio import AsyncClient
from serve.client.calls import DEFAULT_TIMEOUT_SECONDS
from serve.client.connection import Connecting
from serve.client.errors import TesseraError
from serve.client.request import Options, Prompt
from serve.client.results import Generated

NO_SERVER: Final = "NO_SERVER"
"""Reason of the UNAVAILABLE that says that the pool has no server left, rather than that one request failed."""

_TRIED_ELSEWHERE: Final = ("INTERNAL", "UNKNOWN", "DATA_LOSS")
"""A server's defect or the request's: another server tells which."""
_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.1, 10.0
_PROBE_SECONDS: Final = 5.0
_RECONNECT: Final = (("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 5_000))
"""gRPC would stay away from a server that is back for up to two minutes."""


@dataclass(slots=True)
class _Server:
    """One server as the pool knows it."""

    client: AsyncClient
    in_flight: int = 0
    is_down: bool = False
    not_before: float = 0.0
    """Monotonic time until which its queue is full, as it said."""


@dataclass(slots=True)
class _Tries:
    """What one call has seen so far."""

    answered_before: int
    """How many calls of the pool had been answered when this one began."""
    unavailable: int = 0
    defects: int = 0
    failed_at: list[str] = field(default_factory=list)


class AsyncPool:
    """A connection to each of several servers. Belongs to the event loop it was made on.

    A call goes to the server with the fewest calls of this pool. One that does not answer, loads, drains or restarts is left
    alone until its health service says that it serves; its calls go to the others. A full queue is waited for, or gone round.
    What may be a server's defect (INTERNAL, UNKNOWN, DATA_LOSS) is tried once at another.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        retries: int = 3,
        patience: float = 600.0,
        on_change: Callable[[str, bool], None] = lambda address, is_up: None,
        **connecting: Unpack[Connecting],
    ) -> None:
        """Connect lazily: nothing is sent before the first call.

        Args:
            addresses: of servers that serve the same model.
            timeout: seconds of one attempt; ``None`` waits for ever.
            retries: further attempts of a call that ended UNAVAILABLE at servers that say they serve.
            patience: seconds to wait while no server serves at all.
            on_change: told when a server is found gone (False) and when it serves again (True).
            connecting: TLS, token, metadata; see ``Connecting``; the same for each server.

        Raises:
            ValueError: there is no address, one is empty or there twice, or a value of ``connecting`` breaks its rule.
        """
        if not addresses or not all(addresses) or len(set(addresses)) < len(addresses):
            raise ValueError(f"addresses is {list(addresses)}; it must hold at least one, none empty and none twice")
        connecting["options"] = (*_RECONNECT, *connecting.get("options", ()))
        self._servers = [_Server(AsyncClient(address, timeout=timeout, retries=0, **connecting)) for address in addresses]
        self._retries = retries
        self._patience = patience
        self._on_change = on_change
        self._changed = asyncio.Condition()
        self._looks: set[asyncio.Task[None]] = set()
        self._num_answered = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls in flight are cancelled."""
        for look in self._looks:
            look.cancel()
        await asyncio.gather(*self._looks, return_exceptions=True)
        await asyncio.gather(*(server.client.close() for server in self._servers))

    @property
    def down(self) -> tuple[str, ...]:
        """Addresses of the servers that are not used now."""
        return tuple(server.client.address for server in self._servers if server.is_down)

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Generated:
        """Generate at one of the servers, and return everything at the end.

        Args:
            prompt: text, token ids, or a conversation.
            timeout: seconds of one attempt.
            options: see ``Options``.

        Raises:
            TesseraError: the request was refused or failed, at two servers where another could have done better; or, with
                ``reason`` ``NO_SERVER``, none of them has served for ``patience`` seconds.
            TypeError: there is no such option, or the prompt is none.
        """
        tries = _Tries(self._num_answered)
        while True:
            server = await self._take(tries.failed_at)
            try:
                answer = await server.client.generate(prompt, timeout=timeout, **options)
            except TesseraError as error:
                await self._learn(server, error, tries)
            else:
                self._num_answered += 1
                return answer
            finally:
                server.in_flight -= 1

    async def _learn(self, server: _Server, error: TesseraError, tries: _Tries) -> None:
        """Note what a failure says of the server. Returns when the call is to be tried again.

        Raises:
            TesseraError: it is not.
        """
        if error.code == "UNAVAILABLE":
            tries.unavailable += 1
            self._leave(server)
            if tries.unavailable > self._retries:
                # Where others were answered meanwhile it is this request that no server survives.
                raise error if self._num_answered > tries.answered_before else _no_server(str(error)) from error
        elif error.code == "RESOURCE_EXHAUSTED" and error.retry_after_seconds is not None:
            server.not_before = time.monotonic() + error.retry_after_seconds * random.uniform(1.0, 1.25)
        elif error.code in _TRIED_ELSEWHERE and len(self._servers) > 1 and not tries.defects:
            tries.defects += 1
        elif error.code == "ALREADY_EXISTS" and tries.failed_at:
            # The server has not noticed yet that the attempt before has gone.
            server.not_before = time.monotonic() + random.uniform(0.1, 0.2)
        else:
            raise error
        tries.failed_at.append(server.client.address)

    async def _take(self, failed_at: Sequence[str]) -> _Server:
        """The server for a call, counted as its own; rather one at which it has not failed yet."""
        async with self._changed:
            while True:
                now = time.monotonic()
                if free := [server for server in self._servers if not server.is_down and server.not_before <= now]:
                    chosen = min(free, key=lambda server: (server.client.address in failed_at, server.in_flight))
                    chosen.in_flight += 1
                    return chosen
                waits = [server.not_before - now for server in self._servers if not server.is_down]
                try:
                    async with asyncio.timeout(min(waits) if waits else self._patience):
                        await self._changed.wait()
                except TimeoutError:
                    if not waits and all(server.is_down for server in self._servers):
                        raise _no_server(f"none has served for {self._patience:g} seconds") from None

    def _leave(self, server: _Server) -> None:
        """Use a server no more until it says that it serves."""
        if server.is_down:
            return
        server.is_down = True
        self._on_change(server.client.address, False)
        look = asyncio.create_task(self._look_for(server))
        self._looks.add(look)
        look.add_done_callback(self._looks.discard)

    async def _look_for(self, server: _Server) -> None:
        wait = _FIRST_LOOK_SECONDS
        while True:
            await asyncio.sleep(wait * random.uniform(0.75, 1.0))
            if await server.client.is_serving(timeout=_PROBE_SECONDS):
                break
            wait = min(2 * wait, _LONGEST_LOOK_SECONDS)
        async with self._changed:
            server.is_down = False
            self._on_change(server.client.address, True)
            self._changed.notify_all()


def _no_server(why: str) -> TesseraError:
    return TesseraError("UNAVAILABLE", f"no server is left: {why}", reason=NO_SERVER)
