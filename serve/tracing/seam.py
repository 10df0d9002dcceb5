"""What calls and requests tell a tracer. Without one, as little as can be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

from serve.types import Event, Generation

Metadata = Sequence[tuple[str, str | bytes]]


class CallTrace(Protocol):
    """One call from its first message to its status. A context manager: what is done within belongs to it."""

    def ended(self, code: str) -> None:
        """Its gRPC status is known."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class RequestTrace(Protocol):
    """One request from its arrival until its stream was read to the end, or closed. Belongs to the event loop."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits; what exemplars of metrics name."""
        ...

    def saw(self, event: Event) -> None:
        """Something came from the engine."""
        ...

    def failed(self, error: Exception) -> None:
        """It ends with an error, whoever found that out."""
        ...

    def over(self) -> None:
        """Nobody reads it any more. Called once."""
        ...


class Tracing(Protocol):
    """Makes traces. Belongs to the event loop."""

    def call(self, method: str, metadata: Callable[[], Metadata | None]) -> CallTrace:
        """A call begins.

        Args:
            method: its full name, ``serve.v1.Inference/Generate``.
            metadata: the call's own, in which a caller's ``traceparent`` may be.
        """
        ...

    def request(self, generation: Generation) -> RequestTrace | None:
        """A request begins, within the call of this moment; ``None`` where that is not traced."""
        ...

    def close(self) -> None:
        """Send what has not been sent, for a few seconds at most. Blocks."""
        ...


class _NoCall:
    """A call that nobody traces."""

    def ended(self, code: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


_NO_CALL: Final = _NoCall()


class NoTracing:
    """Traces no call and no request."""

    def call(self, method: str, metadata: Callable[[], Metadata | None]) -> CallTrace:
        return _NO_CALL

    def request(self, generation: Generation) -> RequestTrace | None:
        return None

    def close(self) -> None:
        pass
