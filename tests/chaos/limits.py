"""What a process may have runs out: descriptors, room on the disk of its logs, room in shared memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
from pathlib import Path

import grpc

from serve.v1 import admin_pb2, admin_pb2_grpc
from tests.chaos.case import (
    RANKS,
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
from tests.support.server import Server, serving, until

_ROOM_DESCRIPTORS = 16
_FULL_BYTES = 1 << 20
"""Room on a disk that is filled."""


def _num_descriptors(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def _connect(server: Server, connections: contextlib.ExitStack) -> bool:
    """One idle connection more; False if the server takes none."""
    host, _, port = server.address.rpartition(":")
    before = _num_descriptors(server)
    connections.enter_context(socket.create_connection((host, int(port)), timeout=60))
    with contextlib.suppress(AssertionError):
        until(lambda: _num_descriptors(server) > before, seconds=2)
    return _num_descriptors(server) > before


def _descriptors(field: Field, report: Report, rounds: int) -> None:
    draw = field.draw("descriptors")
    with field.server() as server, under_load(field, report, server) as (load, leftovers):
        whole = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        for _ in range(rounds):
            streams_under_way(load)
            leftovers.saw(ranks_of(server))
            with contextlib.ExitStack() as connections:
                limit = _num_descriptors(server) + _ROOM_DESCRIPTORS
                resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (limit, whole[1]))
                connections.callback(resource.prlimit, server.process.pid, resource.RLIMIT_NOFILE, whole)
                while _connect(server, connections):
                    report.count("connections until there were no descriptors")
                goes_on(load)
                # New ranks need descriptors, too: what is in flight waits until there are some.
                os.kill(draw.choice(ranks_of(server)), signal.SIGKILL)
                at_a_random_moment(draw, 1.0)
            goes_on(load)
            with grpc.insecure_channel(server.address) as channel:
                admin_pb2_grpc.AdminStub(channel).GetLoad(admin_pb2.GetLoadRequest(), timeout=60, wait_for_ready=True)


def _with_disk(folder: Path, bytes_: int) -> list[str]:
    """Words before a command that give it a file system of so many bytes at a folder, which nobody else sees."""
    mount = f'mount -t tmpfs -o size={bytes_} none "{folder}" && exec "$@"'
    return ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]


def _as_seen_by(server: Server, folder: Path) -> Path:
    """A folder in the file systems that a server has."""
    return Path(f"/proc/{server.process.pid}/root{folder}")


def _fill(folder: Path) -> Path:
    """Write a file until there is no room."""
    file = folder / "full"
    with file.open("wb", buffering=0) as filled, contextlib.suppress(OSError):
        for size in (4096, 1):
            while True:
                filled.write(b"x" * size)
    return file


def _num_lines(*files: Path) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


def _disk(field: Field, report: Report, rounds: int) -> None:
    draw, expected = field.draw("disk"), field.expected
    assert expected
    folder = field.folder("disk")
    log, audit = folder / "log", folder / "audit"
    # A line for each call: what is left of the last page of a file takes some lines even on a full disk.
    options = ("--log-file", str(log), "--audit-log", str(audit), "--access-log-sample", "1")
    under = _with_disk(folder, _FULL_BYTES)
    with serving(field.model, *RANKS, *options, under=under, program=field.program) as server:
        seen = _as_seen_by(server, folder)
        files = seen / log.name, seen / audit.name

        def told(what: str) -> int:
            return "".join(server.log).count(what)

        with under_load(field, report, server) as (load, leftovers):
            for _ in range(rounds):
                streams_under_way(load)
                leftovers.saw(ranks_of(server))
                refused, written, restarted = told("cannot be written"), told("is written again"), restarts(server)
                full = _fill(seen)
                until(lambda refused=refused: told("cannot be written") > refused)  # type: ignore[misc]
                os.kill(draw.choice(ranks_of(server)), signal.SIGKILL)
                until(lambda restarted=restarted: restarts(server) > restarted)  # type: ignore[misc]
                goes_on(load)
                before = _num_lines(*files)
                full.unlink()
                until(lambda written=written: told("is written again") > written)  # type: ignore[misc]
                goes_on(load)
                until(lambda before=before: _num_lines(*files) > before)  # type: ignore[misc]


def _shared_memory(field: Field, report: Report, rounds: int) -> None:
    draw, expected = field.draw("shared"), field.expected
    assert expected
    under = _with_disk(Path("/dev/shm"), 4096)
    with serving(field.model, *RANKS, under=under, program=field.program) as server:
        _fill(_as_seen_by(server, Path("/dev/shm")))
        with under_load(field, report, server) as (load, leftovers):
            for _ in range(rounds):
                streams_under_way(load)
                leftovers.saw(ranks_of(server))
                restarted = restarts(server)
                os.kill(draw.choice(ranks_of(server)), signal.SIGKILL)
                until(lambda restarted=restarted: restarts(server) > restarted)  # type: ignore[misc]
                goes_on(load)


CASES: dict[str, Case] = {
    "descriptors": Case("the server has no descriptor left, and a rank is killed meanwhile", _descriptors, 2),
    "disk": Case("the disk of the logs is full, and a rank is killed meanwhile", _disk, 1),
    "shared-memory": Case("/dev/shm is full from the start, and a rank is killed", _shared_memory, 1),
}
