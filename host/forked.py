"""Processes made by forking one that has imported what they need, and waited for as any other; see ``host.fork_server``."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from host import fork_server
from host.fork_server import LENGTH, MAX_DESCRIPTORS, Order
from host.modules import import_path, module_command

_PR_SET_CHILD_SUBREAPER: Final = 36
_LOOK_SECONDS: Final = 0.5
_LONGEST_WAIT: Final = 0.05


class ForkServerLost(Exception):
    """The process that others are forked from has ended, or was given up; says how."""


class ForkedProcess:
    """A child of this process, as ``subprocess.Popen`` shows one: those of its methods that ranks need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        """As subprocess gives it: ``None`` while it runs, negative for a signal."""
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The return code if the process has ended, and collect it."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody else has collected it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process has ended; its return code.

        Raises:
            subprocess.TimeoutExpired: it has not, ``timeout`` seconds later.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = 0.0005
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() >= end:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_WAIT)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended and was collected: its number may be another's by then."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """A process that imports ``modules`` and is forked whenever another process is wanted. Ends with ``close`` or with us.

    Made while this process has one thread and has imported them already, it is forked itself. Thread-safe.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it; it imports meanwhile.

        Args:
            environment: what the modules shall see while they are imported.
        """
        # What is forked there loses its parent at once, and comes to us.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
        self._lock = threading.Lock()
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(_LOOK_SECONDS)
        with theirs:
            self._process = _start(theirs, modules, environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def spawn(
        self,
        call: str,
        words: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
        new_session: bool = False,
        unless: Callable[[], None] = lambda: None,
    ) -> ForkedProcess:
        """Make a process that calls a function and ends with the exit code that it returns.

        Args:
            call: ``module:function``, which takes ``words``.
            environment: all of the process's variables.
            descriptors: what shall be its descriptors 0, 1, 2, 3 and so on; they stay open here too.
            new_session: whether it leads a session of its own.
            unless: called twice a second while nothing is heard, in the beginning for as long as the imports take; what it
                raises ends the wait, and nothing can be asked of this object any more.

        Raises:
            ForkServerLost: there will be no process.
            BlockingIOError: the system has no process to give at this moment.
        """
        order = Order(call=call, words=list(words), environment=dict(environment), new_session=new_session)
        payload = json.dumps(order).encode()
        if len(descriptors) > MAX_DESCRIPTORS:
            raise ValueError(f"{len(descriptors)} descriptors; at most {MAX_DESCRIPTORS} can be handed over")
        with self._lock:
            try:
                if self._orders.fileno() < 0:
                    raise ConnectionAbortedError("it was given up")
                socket.send_fds(self._orders, [LENGTH.pack(len(payload))], list(descriptors))
                self._send(payload, unless)
                if (pid := self._answer(unless)) == 0:
                    raise BlockingIOError(errno.EAGAIN, "no process could be forked")
                return ForkedProcess(pid)
            except ConnectionError as error:
                raise ForkServerLost(self._how_it_ended(error)) from None
            except BlockingIOError:
                raise
            except BaseException:
                self._end()  # an answer that comes later would be taken for the next one's
                raise

    def _send(self, payload: bytes, unless: Callable[[], None]) -> None:
        while payload:
            try:
                payload = payload[self._orders.send(payload) :]
            except TimeoutError:
                unless()

    def _answer(self, unless: Callable[[], None]) -> int:
        got = b""
        while len(got) < LENGTH.size:
            try:
                part = self._orders.recv(LENGTH.size - len(got))
            except TimeoutError:
                unless()
                continue
            if not part:
                raise ConnectionResetError
            got += part
        return int(LENGTH.unpack(got)[0])

    def _how_it_ended(self, error: ConnectionError) -> str:
        try:
            code = self._process.wait(timeout=_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            self._end()
            return f"its connection was lost: {error.strerror or error}"
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def close(self) -> None:
        """End it. What was forked from it lives on."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._orders.close()


def _start(
    theirs: socket.socket, modules: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | ForkedProcess:
    if all(module in sys.modules for module in modules) and len(os.listdir("/proc/self/task")) == 1:
        return _forked(theirs, modules)
    return subprocess.Popen(
        [*module_command(fork_server.__name__), str(theirs.fileno()), *modules],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(theirs.fileno(),),
        env={**environment, "PYTHONPATH": import_path(environment)},
        start_new_session=True,
    )


def _forked(theirs: socket.socket, modules: Sequence[str]) -> ForkedProcess:
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    try:
        os.setsid()
        atexit._clear()  # what is to be done when we end is not for the others to do
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        os.dup2(theirs.fileno(), 3)
        for number in [int(name) for name in os.listdir("/proc/self/fd")]:
            if number > 3:
                with contextlib.suppress(OSError):  # the one that read this list
                    os.close(number)
        fork_server.serve(3, modules)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
