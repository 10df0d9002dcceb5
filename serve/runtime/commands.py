"""What the event loop asks of the engine thread. Values, except for the stream that answers come back through."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from serve.engine.swap import Swap, Swapped
from serve.errors import RequestError
from serve.runtime.stream import Stream
from serve.types import RequestId


@dataclass(frozen=True, slots=True)
class Add:
    """Take the request of ``stream``, which its events go to."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody reads ``stream`` any more: free what its request holds."""

    stream: Stream
    error: RequestError


@dataclass(frozen=True, slots=True)
class Abort:
    """End the live request of this id; its stream hears of it."""

    request_id: RequestId
    error: RequestError
    found: Future[bool]


@dataclass(frozen=True, slots=True)
class FlushPrefixCache:
    """Forget every cached block that nobody holds."""

    num_dropped: Future[int]


@dataclass(frozen=True, slots=True)
class SwapWeights:
    """Have the engine take weights that the ranks hold ready."""

    swap: Swap
    is_meant: Callable[[], bool]
    """Whether the engine that obeys is on the ranks that were told to prepare them."""
    done: Future[Swapped]


@dataclass(frozen=True, slots=True)
class Wake:
    """Look around: something changed that is not in the queue."""


Command = Add | Drop | Abort | FlushPrefixCache | SwapWeights | Wake
