"""The lines of the server's log: its own and its ranks' in one shape, as text or as JSON."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Callable, Mapping
from logging.handlers import WatchedFileHandler
from typing import Any, Final

FORMATS: Final = ("text", "json")
MARK: Final = "\x1e"
"""Begins what a rank's log tells its server; whatever else a rank writes has no such beginning."""


class RotatedFile(WatchedFileHandler):
    """A file that may be moved or removed while it is written: lines go to the one that has its name.

    Says once that it cannot be written, and once that it can again.
    """

    def __init__(
        self, filename: str, *, what: str, tell: Callable[[str], None], lost: Callable[[], None] = lambda: None
    ) -> None:
        """
        Args:
            what: what is written, for the sentences that are told.
            tell: says that lines are lost, or no longer, elsewhere than in this file.
            lost: called for each line that is.

        Raises:
            OSError: the file cannot be written.
        """
        super().__init__(filename, encoding="utf-8")
        self._what, self._tell, self._lost = what, tell, lost
        self._fails = self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; that it cannot be written is nothing to the caller."""
        self._failed, self._fails = self._fails, False
        try:
            super().emit(record)
        except OSError:  # of opening it again, which the handler leaves to its caller
            self.handleError(record)
        if self._failed and not self._fails:
            self._tell(f"{self._what} is written again")

    def handleError(self, record: logging.LogRecord) -> None:
        """Tell of the first line of several that cannot be written; called by ``logging`` while the exception is handled."""
        self._fails = True
        self._lost()
        if not self._failed:
            self._tell(f"{self._what} cannot be written; all else goes on, and its lines are lost: {sys.exc_info()[1]}")


class TextLines(logging.Formatter):
    """``TIME LEVEL [rank N] LOGGER: MESSAGE``, and a traceback below it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(origin)s%(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        rank = getattr(record, "rank", None)
        record.origin = "" if rank is None else f"rank {rank} "
        return super().format(record)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _time(record)


class JsonLines(logging.Formatter):
    """One object a line: ``time``, ``level``, ``logger``, ``message``; ``rank``, ``request_id``, ``traceback`` where known."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": _time(record),
            "level": record.levelname,
            "rank": getattr(record, "rank", None),
            "logger": record.name,
            "request_id": getattr(record, "request_id", None),
            "message": record.getMessage(),
            "traceback": self._traceback(record),
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None})

    def _traceback(self, record: logging.LogRecord) -> str | None:
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        return record.exc_text


class _ForServer(JsonLines):
    """What a rank's log hands to its server: a marked line with all that the server's own formatter asks for."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "name": record.name,
            "levelno": record.levelno,
            "levelname": record.levelname,
            "created": record.created,
            "msecs": record.msecs,
            "msg": record.getMessage(),
            "exc_text": self._traceback(record),
            "request_id": getattr(record, "request_id", None),
        }
        return MARK + json.dumps(fields)


def set_up(level: str, *, form: str = "text", file: str | None = None) -> None:
    """Have everything that is logged from here on written.

    Args:
        level: the least that is.
        form: one of ``FORMATS``.
        file: instead of standard error; see ``RotatedFile``.

    Raises:
        OSError: the file cannot be written.
    """
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if file is not None:
        handler = RotatedFile(file, what=f"the log {file}", tell=lambda text: print(f"tessera-serve: {text}", file=sys.stderr))
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_up_for_server(level: str) -> None:
    """Log to standard error, in lines of which the server that reads them makes its own; see ``serve.worker.rank_output``.

    Args:
        level: of what Tessera says; of the libraries' talk, warnings are enough.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ForServer())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("serve").setLevel(level)


def say(line: str, *, source: str, rank: int | None) -> None:
    """Log a line that a process of this server has written to its standard error.

    What it has logged itself has the level, time and logger that it had there. All else, such as what a library prints or
    a crash leaves, is never held back.

    Args:
        source: logger of a line that was not logged.
    """
    fields: Mapping[str, Any] | None = None
    if line.startswith(MARK):
        try:
            fields = json.loads(line[len(MARK) :])
        except ValueError:  # another thread wrote into it
            line = line[len(MARK) :]
    if fields is None:
        fields = {"name": source, "levelno": logging.WARNING, "levelname": "WARNING", "msg": line}
    logging.getLogger(fields["name"]).handle(logging.makeLogRecord({**fields, "rank": rank}))


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
