"""What a service manager is told, and by whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.runtime.service_manager import ServiceManager
from serve.runtime.state import State


@pytest.fixture
def ear(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(tmp_path / "notify"))
        heard.settimeout(20)
        yield heard


def variables(ear: socket.socket, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(ear.getsockname()), "PATH": "/bin", **more}


def test_the_states_of_the_server_are_told_in_the_words_of_the_protocol(ear: socket.socket) -> None:
    manager = ServiceManager.named_in(variables(ear))
    told = {}
    for state in (State.LOADING, State.SERVING, State.DOWN, State.DRAINING):
        manager.state_changed(state)
        told[state] = ear.recv(4096).decode().splitlines()
    assert told == {
        State.LOADING: ["STATUS=loading"],
        State.SERVING: ["READY=1", "STATUS=serving"],
        State.DOWN: ["STATUS=down"],
        State.DRAINING: ["STOPPING=1", "STATUS=draining", "EXTEND_TIMEOUT_USEC=30000000"],
    }


def test_the_variables_are_taken_out_so_that_no_child_speaks_for_the_server(ear: socket.socket) -> None:
    environment = variables(ear, WATCHDOG_USEC="2000000", WATCHDOG_PID=str(os.getpid()))
    ServiceManager.named_in(environment)
    assert environment == {"PATH": "/bin"}


async def test_a_server_that_loads_asks_for_time_and_one_that_serves_only_shows_that_it_lives(ear: socket.socket) -> None:
    manager = ServiceManager.named_in(variables(ear, WATCHDOG_USEC="2000"))
    async with manager.kept_informed():
        first = await asyncio.to_thread(ear.recv, 4096)
        assert first.decode().splitlines() == ["WATCHDOG=1", "EXTEND_TIMEOUT_USEC=30000000"]
        manager.state_changed(State.SERVING)
        async with asyncio.timeout(20):
            while b"READY=1" not in await asyncio.to_thread(ear.recv, 4096):
                pass
        assert await asyncio.to_thread(ear.recv, 4096) == b"WATCHDOG=1"


async def test_a_manager_that_takes_nothing_at_the_moment_is_told_of_the_state_later(ear: socket.socket) -> None:
    manager = ServiceManager.named_in(variables(ear, WATCHDOG_USEC="2000"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, contextlib.suppress(BlockingIOError):
        other.setblocking(False)
        while True:  # until the socket's queue is full
            other.sendto(b"STATUS=of another service", ear.getsockname())
    manager.state_changed(State.SERVING)
    async with manager.kept_informed():
        async with asyncio.timeout(20):
            while b"READY=1\nSTATUS=serving" not in await asyncio.to_thread(ear.recv, 4096):
                pass
            while await asyncio.to_thread(ear.recv, 4096) != b"WATCHDOG=1":
                pass


async def test_a_watchdog_of_another_process_is_not_answered(ear: socket.socket) -> None:
    manager = ServiceManager.named_in(variables(ear, WATCHDOG_USEC="2000", WATCHDOG_PID="1"))
    async with manager.kept_informed():
        assert await asyncio.to_thread(ear.recv, 4096) == b"EXTEND_TIMEOUT_USEC=30000000"


async def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": "vsock:2:1234"}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}):
        manager = ServiceManager.named_in(environment)
        async with manager.kept_informed():
            manager.state_changed(State.SERVING)
            await asyncio.sleep(0)
