"""Who calls: the tokens of ``--tokens`` as their file holds them now."""

from __future__ import annotations

import hmac
import logging
import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from serve.errors import ConfigError
from serve.rpc.checks import MAX_PRIORITY
from serve.rpc.tokens import SCOPES, Entry, Limits, digest_of, read_tokens

MAX_TOKEN_CHARACTERS: Final = 512
_LOOK_SECONDS: Final = 0.25
"""Between two looks at whether the file has changed."""

_Mark = tuple[int, int, int]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever a token belongs to."""

    name: str
    """The tenant's; empty where the server has no tokens."""
    scopes: frozenset[str]
    limits: Limits


ANYONE: Final = Caller("", frozenset(SCOPES), Limits(max_priority=MAX_PRIORITY))
"""The caller of a server without tokens."""

CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=ANYONE)
"""Who the call that is being answered is of. Set by the guard, in the task that gRPC has made for the call."""


class Identities:
    """Says whose a token is. Reads its file at the start, and again when it has changed.

    A file that cannot be read or breaks a rule changes nothing: the tokens before it go on counting, and each such state of the
    file is logged and counted once. May be asked from any thread.
    """

    def __init__(
        self,
        path: str,
        *,
        refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            path: of a file that ``tessera-serve token`` makes.
            refused: called when a changed file cannot be used.
            clock: monotonic seconds.
            now: seconds since 1970, by which tokens expire.

        Raises:
            ConfigError: the file cannot be used.
        """
        self._path = Path(path)
        self._refused = refused
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._looked = clock()
        self._seen: _Mark | None = self._mark()
        try:
            self._entries = _callers(read_tokens(self._path))
        except ConfigError as error:
            raise ConfigError(f"rpc.tokens: {error}") from error

    def who(self, token: str) -> Caller | None:
        """Whose token this is; ``None`` if it is nobody's, or no longer.

        The time it takes does not tell how much of a token was right, nor which entry it was.
        """
        if not token or len(token) > MAX_TOKEN_CHARACTERS:
            return None
        digest = digest_of(token)
        found = None
        for known, expires_seconds, caller in self._current():
            if hmac.compare_digest(digest, known):
                found = expires_seconds, caller
        if found is None or (found[0] is not None and found[0] <= self._now()):
            return None
        return found[1]

    def names(self) -> frozenset[str]:
        """The tenants there are."""
        return frozenset(caller.name for _, _, caller in self._current())

    def _current(self) -> tuple[tuple[bytes, float | None, Caller], ...]:
        with self._lock:
            if self._clock() - self._looked >= _LOOK_SECONDS:
                self._looked = self._clock()
                self._look()
            return self._entries

    def _look(self) -> None:
        mark = self._mark()
        if mark == self._seen:
            return
        try:
            entries = read_tokens(self._path)
        except ConfigError as error:
            if self._mark() == mark:  # else it is being written: the next look tells
                self._seen = mark
                self._refused()
                _log.error("the tokens before go on counting: %s", error)
            return
        if self._mark() != mark:
            return
        self._seen = mark
        self._entries = _callers(entries)
        _log.info("%d tokens count from now on, of %s", len(entries), self._path)

    def _mark(self) -> _Mark | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _callers(entries: tuple[Entry, ...]) -> tuple[tuple[bytes, float | None, Caller], ...]:
    def seconds(expires: datetime | None) -> float | None:
        return None if expires is None else expires.timestamp()

    return tuple(
        (bytes.fromhex(entry.sha256), seconds(entry.expires), Caller(entry.name, frozenset(entry.scopes), entry.limits))
        for entry in entries
    )
