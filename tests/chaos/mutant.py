"""A server with a fault in it: ``python -m tests.chaos.mutant NAME [PLACE] OPTION ...``, the rest as for ``tessera-serve``.

What is changed is changed in this process alone, before it serves, and knows no way into what is installed.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from grpc._cython import cygrpc

from serve import cli
from serve.engine.block_pool import BlockPool
from serve.rpc.identity import Identities
from serve.runtime.stream import Stream
from serve.types import TokensOut

_EVERY = 97
"""Of so many, one meets the fault."""


def _leaked_block() -> None:
    """Now and then a block that is given back is not free."""
    release, count = BlockPool.release, itertools.count(1)

    def leaking(pool: BlockPool, block: Any) -> None:
        if next(count) % _EVERY:
            release(pool, block)

    BlockPool.release = leaking  # type: ignore[method-assign]


def _dropped_event() -> None:
    """Now and then tokens are not told."""
    feed, count = Stream.feed, itertools.count(1)

    def dropping(stream: Stream, event: Any) -> None:
        if not isinstance(event, TokensOut) or next(count) % _EVERY:
            feed(stream, event)

    Stream.feed = dropping  # type: ignore[method-assign]


def _doubled_event() -> None:
    """Now and then tokens are told twice."""
    feed, count = Stream.feed, itertools.count(1)

    def doubling(stream: Stream, event: Any) -> None:
        feed(stream, event)
        if isinstance(event, TokensOut) and not next(count) % _EVERY:
            feed(stream, event)

    Stream.feed = doubling  # type: ignore[method-assign]


def _answer_after_cancel() -> None:
    """A request whose call was cancelled goes on to its end."""

    def going_on(stream: Stream, error: Any) -> None:
        stream._abort = lambda stream, error: None
        cut(stream, error)

    cut = Stream.cut
    Stream.cut = going_on  # type: ignore[method-assign]


def _expired_token() -> None:
    """The end of a token's time is not looked at."""
    made = Identities.__init__

    def lenient(identities: Identities, *args: Any, **options: Any) -> None:
        made(identities, *args, **{**options, "now": lambda: 0.0})

    Identities.__init__ = lenient  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[], None]] = {
    "leaked-block": _leaked_block,
    "dropped-event": _dropped_event,
    "doubled-event": _doubled_event,
    "answer-after-cancel": _answer_after_cancel,
    "expired-token": _expired_token,
}
STEPPED = "stepped-clock"
_LOOK_SECONDS = 0.01


def _step_clock(place: Path) -> None:
    """The clock that tells the date is off by as many seconds as a file says at the moment.

    To all Python but gRPC's, whose core compares it with a clock that is not stepped with it here and always is by a system.
    """
    cygrpc.time = SimpleNamespace(**vars(time))
    seconds, nanoseconds, monotonic = time.time, time.time_ns, time.monotonic
    looked, offset = -_LOOK_SECONDS, 0

    def off() -> int:
        nonlocal looked, offset
        if monotonic() - looked >= _LOOK_SECONDS:
            looked, offset = monotonic(), int(place.read_text() or offset)
        return offset

    time.time = lambda: seconds() + off()
    time.time_ns = lambda: nanoseconds() + off() * 10**9


def main(words: list[str]) -> int:
    """Be that server."""
    name, *rest = words
    if name == STEPPED:
        place, *rest = rest
        _step_clock(Path(place))
    else:
        MUTANTS[name]()
    return cli.main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
