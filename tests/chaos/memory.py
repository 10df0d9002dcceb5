"""The memory of the control group that a server is in runs out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from tests.chaos.case import (
    Case,
    Field,
    Report,
    at_a_random_moment,
    goes_on,
    ranks_of,
    restarts,
    streams_under_way,
    under_load,
)  # fmt: skip
from tests.chaos.group import Group
from tests.chaos.history import Load
from tests.chaos.leftovers import GROUP_NAME
from tests.support.server import ROOT, Server, until

_ROOM_BYTES = 512 << 20
"""What the group may have beside what it has when its limit is set."""
_RUNS_OUT = 'tessera_engine_failures_total{reason="memory"}'


@contextmanager
def _group() -> Iterator[Group]:
    """A group of our own, which is removed when it is empty.

    Raises:
        OSError: we may make none here.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    places = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    version = 1 if "memory" in places else 2
    top = Path("/sys/fs/cgroup/memory" if version == 1 else "/sys/fs/cgroup")
    folder = Path(f"{top}{places['memory' if version == 1 else '']}") / GROUP_NAME
    folder.mkdir()
    try:
        if not (folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).exists():
            raise OSError("the group's parent gives it no control of memory")
        yield Group(folder, version)
    finally:
        with suppress(OSError, AssertionError):
            until(lambda: not (folder / "cgroup.procs").read_text(), seconds=30)
            folder.rmdir()


def _exhaust(group: Group) -> None:
    """Have a process take memory in the group until the kernel has killed one of the others."""
    words = [sys.executable, "-m", "tests.chaos.group", str(group.folder), str(group.version)]
    subprocess.run(words, timeout=300, cwd=ROOT, check=True)


def _new_ranks(server: Server, load: Load, strike: Callable[[], None]) -> None:
    before = restarts(server)
    strike()
    until(lambda: restarts(server) > before)
    goes_on(load)


def _group_exhausted(field: Field, report: Report, rounds: int) -> None:
    with ExitStack() as stack:
        try:
            group = stack.enter_context(_group())
        except OSError as error:
            report.not_run = f"no control group can be made here: {error}"
            return
        stack.callback(field.close)  # what is in the group ends with it
        with field.server() as server, under_load(field, report, server) as (load, leftovers):
            for process in (psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)):
                group.add(process.pid)
            leftovers.saw(ranks_of(server))
            # The memory of these ranks was paid for elsewhere: killing them would give the group nothing back.
            _new_ranks(server, load, lambda: os.kill(ranks_of(server)[0], signal.SIGKILL))
            before = server.metrics().get(_RUNS_OUT, 0)
            for number in field.turns(report, rounds):
                leftovers.saw(ranks_of(server))
                streams_under_way(load)
                at_a_random_moment(field.draw(f"memory {number}"), 0.25)
                group.limit(_ROOM_BYTES)
                _new_ranks(server, load, lambda: _exhaust(group))
                known = server.metrics().get(_RUNS_OUT, 0) - before
                report.expect(known > number, "a death for want of memory was not known for one")


CASES: dict[str, Case] = {"memory": Case("the memory of the server's control group runs out", _group_exhausted, 2)}
