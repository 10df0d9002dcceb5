"""What an administrator can end by its name although the engine does not know it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from serve.errors import RequestAborted
from serve.types import RequestId


@dataclass(slots=True, eq=False)
class _Work:
    task: asyncio.Task[object]
    is_aborted: bool = False


class Abortable:
    """Work on requests, by their names, each in a task: what makes them ready for the engine, and scoring calls as a whole.

    Several requests may have one name until the engine refuses all but the first; they are ended together. Belongs to the event
    loop.
    """

    def __init__(self) -> None:
        self._works: dict[str, set[_Work]] = {}
        """No set is empty."""

    @contextlib.contextmanager
    def named(self, request_id: str) -> Iterator[None]:
        """Within, this task works on a request of this name: ``abort`` ends it wherever it waits.

        What a thread does for it meanwhile goes on, and comes to nothing. A name that the client has not given is empty, and
        nobody can ask for it.

        Raises:
            RequestAborted: an administrator ended it.
        """
        task = asyncio.current_task()
        assert task is not None
        num_cancelled = task.cancelling()
        work = _Work(task)
        self._works.setdefault(request_id, set()).add(work)
        try:
            yield
        except BaseException as error:
            # The task may be cancelled by its client at the same moment, which then is how it ends.
            if work.is_aborted and task.uncancel() <= num_cancelled and isinstance(error, asyncio.CancelledError):
                raise RequestAborted("the request was aborted by an administrator") from None
            raise
        finally:
            self._forget(request_id, work)

    def abort(self, request_id: RequestId) -> bool:
        """End all work on requests of this name, whoever's they are; False if there is none."""
        works = self._works.pop(request_id, set())
        for work in works:
            work.is_aborted = True
            work.task.cancel()
        return bool(works)

    def _forget(self, request_id: str, work: _Work) -> None:
        works = self._works.get(request_id)
        if works is not None:
            works.discard(work)
            if not works:
                del self._works[request_id]
