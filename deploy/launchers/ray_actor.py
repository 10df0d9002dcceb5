"""The actor that Ray has on each node of a launch. Its class travels to the nodes by value: they need not have this file."""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_READ_BYTES: Final = 1 << 16
# The kernel kills the program when the actor's process ends, however that comes. Ray's workers block SIGINT, and hand that on.
_BEFORE_PROGRAM: Final = """import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])"""


def lacks(key_file: str, path: str) -> str:
    """What this machine needs and has not; empty: nothing."""
    if not os.access(key_file, os.R_OK) or not Path(key_file).is_file():
        return f"no key file {key_file}, which must be the same on every node"
    if shutil.which("tessera-serve", path=path) is None:
        return "no tessera-serve on the PATH of Ray's workers, nor beside their Python"
    return ""


def search_path() -> str:
    """``PATH``, and before it the folder of this Python's programs."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


class OnNode:
    """What runs on one node, as an actor of Ray: looks at the machine, and runs one program at a time there."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    def look(self, key_file: str) -> tuple[str, list[str], str]:
        """The address by which Ray knows this node, all addresses of the machine, and what it lacks."""
        import psutil  # Ray brings it
        import ray

        families = ("AF_INET", "AF_INET6")
        found = [each for several in psutil.net_if_addrs().values() for each in several if each.family.name in families]
        address: str = ray.util.get_node_ip_address()
        return address, [each.address for each in found], lacks(key_file, search_path())

    def run(self, command: list[str], folder: str) -> Iterator[tuple[int, bytes] | int]:
        """Run a program to its end: what it says, as (1 or 2, bytes), and at last its exit code.

        Args:
            folder: where, if this machine has it, as it is where the launcher runs.
        """
        guarded = [sys.executable, "-I", "-c", _BEFORE_PROGRAM, str(os.getpid()), *command]
        place = folder if os.path.isdir(folder) else None
        variables = {**os.environ, "PATH": search_path(), "PYTHONUNBUFFERED": "1"}
        with (
            subprocess.Popen(guarded, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=place, env=variables) as process,
            selectors.DefaultSelector() as outputs,
        ):
            self._process = process
            self._started.set()
            assert process.stdout is not None
            assert process.stderr is not None
            outputs.register(process.stdout, selectors.EVENT_READ, 1)
            outputs.register(process.stderr, selectors.EVENT_READ, 2)
            while outputs.get_map():
                for output, _ in outputs.select():
                    if said := os.read(output.fd, _READ_BYTES):
                        yield output.data, said
                    else:
                        outputs.unregister(output.fileobj)
            yield process.wait()

    def tell(self, number: int) -> None:
        """Send a signal to the program, once it is there; nothing where it has ended."""
        self._started.wait()
        assert self._process is not None
        self._process.send_signal(number)
