"""Tells systemd, or who else speaks its protocol of ``NOTIFY_SOCKET``, how the server is; nobody, where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, MutableMapping
from typing import Final

from serve.runtime.state import State

_PERIOD_SECONDS: Final = 10.0
"""How often at least the manager hears of a server that loads or drains."""
_MORE_SECONDS: Final = 30.0
"""How long it is asked to go on waiting, each time."""

_log = logging.getLogger(__name__)


class ServiceManager:
    """Where a service tells its state: datagrams of lines such as ``READY=1`` (sd_notify(3))."""

    def __init__(self, address: str = "", watchdog_seconds: float | None = None) -> None:
        """Know the manager.

        Args:
            address: of its socket, a path or an abstract name after ``@``; empty where there is none.
            watchdog_seconds: the longest it may hear nothing before it takes the server for frozen.
        """
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._waits = True
        self._untold: tuple[str, ...] = ()

    @classmethod
    def named_in(cls, environment: MutableMapping[str, str]) -> ServiceManager:
        """The manager that started this process. Its variables are taken out, so that no child speaks for it."""
        address, pid, microseconds = (environment.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"))
        is_watched = microseconds.isdigit() and int(microseconds) > 0 and pid in ("", str(os.getpid()))
        return cls(address if address[:1] in ("/", "@") else "", int(microseconds) / 1e6 if is_watched else None)

    def state_changed(self, state: State) -> None:
        """Tell what the server does now; within the next period, where the manager's socket takes nothing at the moment."""
        self._waits = state in (State.LOADING, State.DRAINING)
        match state:
            case State.SERVING:
                self._untold = ("READY=1", "STATUS=serving")
            case State.DRAINING:
                self._untold = ("STOPPING=1", "STATUS=draining", self._more_time())
            case _:
                self._untold = (f"STATUS={state.value}",)
        self._tell()

    @contextlib.asynccontextmanager
    async def kept_informed(self) -> AsyncIterator[None]:
        """Within, the manager hears that the event loop goes round, and is asked for time while the server loads or drains."""
        telling = asyncio.create_task(self._keep_informed()) if self._address else None
        try:
            yield
        finally:
            if telling is not None:
                telling.cancel()
                await asyncio.gather(telling, return_exceptions=True)

    async def _keep_informed(self) -> None:
        period = min(_PERIOD_SECONDS, (self._watchdog_seconds or _PERIOD_SECONDS) / 2)
        while True:
            lines = ["WATCHDOG=1"] if self._watchdog_seconds is not None else []
            lines += [self._more_time()] if self._waits else []
            self._tell(*lines)
            await asyncio.sleep(period)

    @staticmethod
    def _more_time() -> str:
        return f"EXTEND_TIMEOUT_USEC={int(_MORE_SECONDS * 1e6)}"

    def _tell(self, *more: str) -> None:
        """Tell what the manager has not been told of the state, and ``more``."""
        lines = (*self._untold, *more)
        if not self._address or not lines:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
                told.setblocking(False)
                told.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            _log.debug("the service manager was not told %s: %s", lines, error)
        else:
            self._untold = ()
