"""Who called what, how much there was of it, and how it ended: a line for each call, and never a word of what was said."""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import random
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from logging.handlers import QueueHandler, QueueListener
from typing import Final, Protocol

from serve.errors import ConfigError
from serve.logs import RotatedFile
from serve.rpc.identity import CALLER

LINES_WAITING: Final = 8192
"""Lines that wait for the disk, about twelve megabytes; more are lost."""

_DIGITS: Final = 6
"""Digits of a second that are written."""

_access = logging.getLogger("serve.access")
_log = logging.getLogger(__name__)


class Called(Protocol):
    """What is asked of a call."""

    def peer(self) -> str:
        """The client's address, as gRPC writes it."""
        ...


@dataclass(slots=True)
class Used:
    """What a call has used so far. Its handler adds to it, in whatever task that runs."""

    elapsed: Callable[[], float]
    """Seconds since the call began."""
    request_id: str = ""
    """The name of the call's first request."""
    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    queue_seconds: float | None = None
    """The longest that one of its requests waited for its first step; ``None`` while none has had it."""
    first_token_seconds: float | None = None
    """From its beginning to its first generated token; ``None`` before."""


USED: Final[ContextVar[Used | None]] = ContextVar("used", default=None)
"""What the call that is being answered has used; ``None`` where nobody keeps books."""


def note(
    request_id: str = "",
    *,
    requests: int = 0,
    prompt_tokens: int = 0,
    generated_tokens: int = 0,
    queue_seconds: float | None = None,
) -> None:
    """Add to what the call that is being answered has used."""
    used = USED.get()
    if used is not None:
        used.request_id = used.request_id or request_id
        used.requests += requests
        used.prompt_tokens += prompt_tokens
        used.generated_tokens += generated_tokens
        if queue_seconds is not None:
            used.queue_seconds = max(queue_seconds, used.queue_seconds or 0.0)
        if generated_tokens and used.first_token_seconds is None:
            used.first_token_seconds = used.elapsed()


class Entry(Protocol):
    """A call that goes on, of which a line is written when it ends."""

    def ended(self, code: str) -> None:
        """It ends with this status; called once."""
        ...


class Books(Protocol):
    """Keeps books of calls: who asked for what, what it used and how it ended."""

    def entry(self, method: str, call: Called) -> Entry:
        """A call begins, in the task that answers it."""
        ...


class NoBooks:
    """Keeps no books: nothing is written of any call."""

    def entry(self, method: str, call: Called) -> Entry:
        return self

    def ended(self, code: str) -> None:
        """A call has ended with this status; nothing is written of it."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is written of one call."""

    time: str
    """Its end, in UTC."""
    tenant: str
    """By its token; empty where the server has no tokens, or the call none."""
    peer: str
    method: str
    code: str
    seconds: float
    queue_seconds: float | None
    """Until the first step of its requests, for the one that waited longest; ``None`` where there was none."""
    first_token_seconds: float | None
    """Until its first generated token; ``None`` where there was none."""
    request_id: str
    requests: int
    prompt_tokens: int
    generated_tokens: int

    def as_json(self) -> str:
        """One object; keys are the fields."""
        return json.dumps(asdict(self))

    def as_text(self) -> str:
        """``key=value``, words of clients in quotes, nothing for what is not known."""
        return " ".join(
            f"{key}={json.dumps(value) if isinstance(value, str) and key != 'time' else '' if value is None else value}"
            for key, value in asdict(self).items()
        )


class Audit:
    """Writes a line for every call to a file, and some of them to the server's log.

    The file may be moved or removed while it is written: lines go to the one that has its name, so that log rotation needs no
    signal. A thread writes; calls do not wait for the disk. What comes while ``LINES_WAITING`` wait for it is lost.
    """

    def __init__(
        self,
        *,
        file: str = "",
        as_text: bool = False,
        sample: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            file: empty for none. It is made for its owner alone to read.
            as_text: ``key=value`` in it instead of JSON.
            sample: share of the calls that are told in the server's log.
            clock: monotonic seconds.
            now: Unix time.
            chance: a number from 0 to 1, of which ``sample`` decides.
            lost: called for each line that is not in the file; any thread.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._as_text, self._sample = as_text, sample
        self._clock, self._now, self._chance = clock, now, chance
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(LINES_WAITING)
        self._listener: QueueListener | None = None
        if file:
            try:
                os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
                handler = RotatedFile(file, what="the audit log", tell=_log.warning, lost=lost)
            except OSError as error:
                raise ConfigError(f"rpc.audit_log is {file!r}; it cannot be written: {error.strerror}") from error
            self._handler = _Waiting(self._lines, lost)
            self._listener = _Writer(self._lines, handler)
            self._listener.start()

    def entry(self, method: str, call: Called) -> Entry:
        """Begin the books of a call, in the task that answers it: what that uses is noted until the entry's ``ended``."""
        began = self._clock()
        used = Used(lambda: self._clock() - began)
        USED.set(used)
        return _Call(self, method, call.peer(), used)

    def write(self, method: str, peer: str, used: Used, code: str) -> None:
        """Write the line of a call that has ended."""
        moment = datetime.datetime.fromtimestamp(self._now(), datetime.UTC)
        line = Line(
            time=moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            tenant=CALLER.get().name,
            peer=peer,
            method=method,
            code=code,
            seconds=round(used.elapsed(), _DIGITS),
            queue_seconds=_rounded(used.queue_seconds),
            first_token_seconds=_rounded(used.first_token_seconds),
            request_id=used.request_id,
            requests=used.requests,
            prompt_tokens=used.prompt_tokens,
            generated_tokens=used.generated_tokens,
        )
        if self._listener is not None:
            text = line.as_text() if self._as_text else line.as_json()
            self._handler.emit(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))
        if self._sample > 0 and self._chance() < self._sample:
            _access.info("%s", line.as_text(), extra={"request_id": line.request_id or None})

    def flush(self) -> None:
        """Wait until all lines so far are written."""
        self._lines.join()

    def close(self) -> None:
        """Write what is still to be written."""
        if self._listener is not None:
            self._listener.stop()
            for handler in self._listener.handlers:
                handler.close()
            self._listener = None


class _Waiting(QueueHandler):
    """Puts lines where they wait for the disk, and those that there is no room for nowhere. Says once that some are lost."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None], lost: Callable[[], None]) -> None:
        super().__init__(lines)
        self._lines, self._lost = lines, lost
        self._num_lost = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        """Called by ``emit``; does not wait."""
        if self._num_lost and self._lines.empty():  # not at the first room: a flood would have it lost and found all the time
            _log.warning("the audit log keeps up again; lines that were lost: %d", self._num_lost)
            self._num_lost = 0
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self._lost()
            if not self._num_lost:
                _log.warning("the audit log's disk is too slow: %d lines wait for it, and more are lost", self._lines.maxsize)
            self._num_lost += 1


class _Writer(QueueListener):
    """The thread that writes them."""

    def __init__(self, lines: queue.Queue[logging.LogRecord | None], handler: logging.Handler) -> None:
        super().__init__(lines, handler)
        self._lines = lines

    def enqueue_sentinel(self) -> None:
        """Have it end behind the last line; waits for room, where the handler's own would raise."""
        self._lines.put(None)


@dataclass(frozen=True, slots=True)
class _Call:
    audit: Audit
    method: str
    peer: str
    used: Used

    def ended(self, code: str) -> None:
        self.audit.write(self.method, self.peer, self.used, code)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)
