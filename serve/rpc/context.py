"""One call as gRPC gives it to a handler, as far as handlers use it: gRPC's own class carries no types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from google.protobuf.message import Message
from grpc import StatusCode


class Context(Protocol):
    """What a handler asks of its call: the part of ``grpc.aio.ServicerContext`` that is used here."""

    async def write(self, message: Message) -> None:
        """Send one answer of a stream."""
        ...

    async def abort(self, code: StatusCode, details: str, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """End the call; gRPC raises through the handler."""
        ...

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Send this beside the call's status."""
        ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """What the client sent beside the request."""
        ...

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        """Have it called once the call is over, however it ends."""
        ...

    def time_remaining(self) -> float | None:
        """Seconds until the deadline; ``None`` without one."""
        ...

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        ...

    def done(self) -> bool:
        """Whether the call is over."""
        ...
