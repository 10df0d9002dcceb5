"""The file of answers: one line for each request, in the requests' order, whole whatever ends the run that writes it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from serve.client.errors import TesseraError
from serve.client.offline.lines import BadLine, Line
from serve.client.results import Generated


class Answers:
    """Appends answers to a file that this run alone writes.

    A line is ``{"line": 1, "id": …, "request": digest, …}`` and then ``answer``, or ``error`` of a request that failed. Its
    number, id and digest are the request's, so that what is there already is known to belong to the same requests. A run that
    is killed can leave half a line at the end, which ``resume`` takes away.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or make it.

        Raises:
            ValueError: another run writes it.
            OSError: it cannot be written.
        """
        self.path = path
        self._file = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise ValueError(f"{path} is being written by another run") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def resume(self, lines: Iterator[Line]) -> tuple[int, int]:
        """Take from ``lines`` those that are answered already, and take away half an answer at the end.

        Returns:
            How many are answered, and how many of them by an error.

        Raises:
            BadLine: the file holds something else than answers to these lines; nothing is changed.
        """
        self._file.seek(0)
        whole, num_answered, num_failed = 0, 0, 0
        for number, raw in enumerate(self._file, 1):
            line = next(lines, None)
            if line is None:
                raise BadLine(self.path, number, "there are more answers than requests")
            head = line.head.encode()
            if not raw.endswith(b"\n"):
                raw = raw.rstrip(b"\0")  # what a file system may leave where the machine lost its power
                if not raw.startswith(head) and not head.startswith(raw):
                    raise BadLine(self.path, number, "not the beginning of an answer, and nothing that a run wrote")
                # It is computed again; the caller has taken its request and asks for the lines anew.
                self._file.truncate(whole)
                break
            num_failed += self._check(number, raw, head)
            whole += len(raw)
            num_answered += 1
        self._file.seek(0, os.SEEK_END)
        return num_answered, num_failed

    def _check(self, number: int, raw: bytes, head: bytes) -> bool:
        """Whether a whole line is an error."""
        try:
            found = json.loads(raw)
        except ValueError as error:
            raise BadLine(self.path, number, f"not an answer: {error}") from error
        if not raw.startswith(head) or not isinstance(found, dict) or ("answer" in found) == ("error" in found):
            raise BadLine(
                self.path, number, "not an answer to this line of the requests; give another file for other requests or options"
            )
        return "error" in found

    def write(self, line: Line, told: dict[str, Any]) -> None:
        """Append one answer, as ``told`` has it, and hand it to the system.

        Raises:
            OSError: it cannot be written; the file may end in half a line.
        """
        rest = json.dumps(told, ensure_ascii=False).removeprefix("{")
        self._file.write(f"{line.head}, {rest}\n".encode())
        self._file.flush()

    def sync(self) -> None:
        """Return when the disk has what was written."""
        os.fsync(self._file.fileno())


def told(outcome: Generated | TesseraError) -> dict[str, Any]:
    """What a line says of how its request ended."""
    if isinstance(outcome, Generated):
        return {"answer": dataclasses.asdict(outcome)}
    violations = [dataclasses.asdict(violation) for violation in outcome.violations]
    return {"error": {"code": outcome.code, "message": outcome.message, "reason": outcome.reason, "violations": violations}}
