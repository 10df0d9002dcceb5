"""Machines that are network namespaces, each on a cable to one switch. As root, with iproute2's ``ip``."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_SWITCH = "switch"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=30)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stdout}"


@dataclass(frozen=True)
class Node:
    """A machine of its own network: what runs ``under`` it reaches the others and nobody else."""

    address: str
    _namespace: str
    _switch: str
    _port: str

    @property
    def under(self) -> tuple[str, ...]:
        """Words before a command that has it run there; they become that command."""
        return ("ip", "netns", "exec", self._namespace)

    def cut(self) -> None:
        """Pull its cable."""
        _ip("-n", self._switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Put its cable back."""
        _ip("-n", self._switch, "link", "set", self._port, "up")


@functools.cache
def why_not() -> str:
    """What keeps this process from making namespaces; empty if nothing does."""
    if shutil.which("ip") is None:
        return "ip is missing (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces are made by root"
    try:
        with network(1):
            return ""
    except AssertionError as error:
        return f"this kernel or container gives root no network namespaces: {error}"


def require_namespaces() -> None:
    """Skip the test that asks where there can be none, and say what is missing."""
    if why := why_not():
        pytest.skip(f"not tried: {why}")


@contextlib.contextmanager
def network(count: int) -> Iterator[list[Node]]:
    """So many machines at 10.77.0.1 and on, and the switch between them; all are gone at the end."""
    tag = f"tessera-{os.getpid()}"
    switch = f"{tag}-{_SWITCH}"
    with contextlib.ExitStack() as stack:

        def add(namespace: str) -> None:
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)

        add(switch)
        _ip("-n", switch, "link", "add", _SWITCH, "type", "bridge")
        _ip("-n", switch, "link", "set", _SWITCH, "up")
        nodes = []
        for number in range(count):
            node = Node(f"10.77.0.{number + 1}", f"{tag}-{number}", switch, f"port{number}")
            add(node._namespace)
            _ip("-n", switch, "link", "add", node._port, "type", "veth", "peer", "name", "cable", "netns", node._namespace)
            _ip("-n", switch, "link", "set", node._port, "master", _SWITCH, "up")
            _ip("-n", node._namespace, "address", "add", f"{node.address}/24", "dev", "cable")
            for name in ("lo", "cable"):
                _ip("-n", node._namespace, "link", "set", name, "up")
            nodes.append(node)
        yield nodes
