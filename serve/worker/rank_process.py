"""How the process of a rank is made: forked from one that has imported everything, or started as a program."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from host import limits
from host.forked import ForkedProcess, ForkServer, ForkServerLost
from host.modules import import_path, module_command
from serve.config import ServerConfig
from serve.errors import RankStartError
from serve.worker.vitals import Work

_MODULES: Final = ("serve.worker.lean_torch", "serve.worker.rank_loop", "serve.worker.lean_imports")
_FOR_SEVERAL: Final = ("serve.worker.lean_deepspeed",)
_LOOK_SECONDS: Final = 0.5
_GPUS: Final = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""What is there where CUDA may find a GPU: of Linux, and of Linux beneath Windows (WSL)."""

_EXCHANGE_OF_GPUS: Final = {
    # An exchange that fails, or takes too long, ends the process at once; it does not wait for a peer that is gone.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

_log = logging.getLogger(__name__)


class RemoteProcess(ABC):
    """A rank's process on another node, as ``subprocess.Popen`` shows one of this: those of its methods that ranks need."""

    pid: Final = 0
    """No process of this machine."""

    def __init__(self, node: int) -> None:
        self.node = node
        self.remote_pid = 0
        """Its number there."""
        self.how: str | None = None
        """How it ended, where its return code does not tell."""

    @abstractmethod
    def poll(self) -> int | None:
        """The return code if it has ended, or its node is lost."""

    @abstractmethod
    def wait(self, timeout: float | None = None) -> int:
        """Wait until it has ended; its return code.

        Raises:
            subprocess.TimeoutExpired: it has not, ``timeout`` seconds later.
        """

    @abstractmethod
    def send_signal(self, number: int) -> None:
        """Send a signal, at some time."""

    def kill(self) -> None:
        """Send SIGKILL, which ends it at some time."""
        self.send_signal(signal.SIGKILL)


RankProcess = subprocess.Popen[bytes] | ForkedProcess | RemoteProcess


@dataclass(frozen=True, slots=True)
class NewRank:
    """What the process of a rank is given."""

    number: int
    environment: dict[str, str]
    sockets: tuple[int, int, int]
    """Descriptors of its ends: steps, orders, pulse."""
    rendezvous: int
    """Descriptor of the file where ranks meet."""
    shared: int
    """Descriptor of a file of memory through which ranks on CPUs exchange activations."""
    log_level: str
    meeting: str = ""
    """``HOST:PORT`` where ranks of several nodes meet; rank 0's ``rendezvous`` is then the socket that listens there."""
    output: int = 2
    """Descriptor for its standard output and error."""

    @property
    def descriptors(self) -> tuple[int, int, int, int, int]:
        """All of them, in the order of ``words``."""
        return *self.sockets, self.rendezvous, self.shared

    def words(self, steps: int, orders: int, pulse: int, rendezvous: int, shared: int) -> list[str]:
        """The arguments of ``serve.worker.rank_loop``, with the numbers that the descriptors have there."""
        numbers = (self.number, steps, orders, pulse, -1 if self.meeting else shared)
        place = f"/proc/self/fd/{rendezvous}"
        if self.meeting:
            place = f"tcp://{self.meeting}" + (f"/{rendezvous}" if self.number == 0 else "")
        return [*map(str, numbers), place, self.log_level]


class RankStarter(Protocol):
    """Makes the processes of ranks."""

    def start(self, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        """A new process, which dies with this one.

        Args:
            unless: called now and then where the start takes long; what it raises ends it.

        Raises:
            OSError: the system has no process to give.
            RankStartError: it was started and hangs.
        """
        ...


class ProgramStarter:
    """Each rank a program of its own, which imports everything anew. The thread that starts it must outlive it."""

    def start(self, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        command = [*module_command("serve.worker.rank_loop"), *rank.words(*rank.descriptors)]
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=rank.output,
            stderr=rank.output,
            pass_fds=rank.descriptors,
            env=rank.environment,
        )


class ForkStarter:
    """Ranks forked from a process that imports torch, transformers and DeepSpeed once, when this object is made.

    A rank begins within some ten milliseconds and shares those libraries' memory with the others. Where the forked-from
    process fails, a rank is started as a program, which says better what is wrong; the next start tries anew.
    """

    def __init__(self, size: int, device: str, *, stall_seconds: float) -> None:
        """Begin to import.

        Args:
            size: how many ranks make a group.
            stall_seconds: for how long the imports may show no progress.
        """
        # Variables that libraries read when they are loaded are the same for all ranks.
        self._environment = rank_environment(0, size, device)
        self._modules = (*_MODULES, *_FOR_SEVERAL) if size > 1 else _MODULES
        self._stall_seconds = stall_seconds
        self._programs = ProgramStarter()
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._closed = False
        self._begin()

    def _begin(self) -> ForkServer | None:
        with self._lock:
            if self._server is None and not self._closed:
                try:
                    self._server = ForkServer(self._modules, self._environment)
                except OSError as error:
                    _log.warning("no process to fork ranks from (%s): each is started as a program", error)
            return self._server

    def start(self, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        server = self._begin()
        if server is None:
            return self._programs.start(rank, unless)
        work = Work(server.pid, time.monotonic())

        def look() -> None:
            unless()
            work.look(now := time.monotonic())
            if now - work.last > self._stall_seconds:
                raise RankStartError(
                    f"what ranks are forked from hangs or is frozen: for {now - work.last:.1f} s it has neither read nor "
                    "computed anything"
                )

        try:
            with open(os.devnull, "rb") as nothing:
                return server.spawn(
                    "serve.worker.rank_loop:main",
                    rank.words(3, 4, 5, 6, 7),
                    environment=rank.environment,
                    descriptors=(nothing.fileno(), rank.output, rank.output, *rank.descriptors),
                    unless=look,
                )
        except ForkServerLost as error:
            _log.warning("what ranks are forked from is gone (%s): rank %d is started as a program", error, rank.number)
            self._forget(server)
            return self._programs.start(rank, unless)
        except BaseException:
            self._forget(server)
            raise

    def ask(
        self, call: str, told: bytes, environment: dict[str, str], unless: Callable[[], None], output: int = 2
    ) -> tuple[bytes, int]:
        """Have a function called in a forked process that reads ``told`` from its standard input.

        Args:
            call: ``module:function``, which takes a list of words, here none.
            unless: called twice a second; what it raises ends the process too.
            output: descriptor for its standard error.

        Returns:
            What it wrote to standard output, and its return code.

        Raises:
            ForkServerLost: there is nothing to fork.
        """
        server = self._begin()
        if server is None:
            raise ForkServerLost("none could be started")
        with contextlib.ExitStack() as stack:
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            try:
                process = server.spawn(
                    call, (), environment=environment, descriptors=(theirs.fileno(), theirs.fileno(), output), unless=unless
                )
            except BaseException:
                self._forget(server)
                raise
            stack.callback(process.wait)
            stack.callback(process.kill)
            theirs.close()
            ours.settimeout(_LOOK_SECONDS)
            ours.sendall(told)
            ours.shutdown(socket.SHUT_WR)
            answer = b""
            while True:
                try:
                    part = ours.recv(65536)
                except TimeoutError:
                    unless()
                    continue
                if not part:
                    return answer, process.wait()
                answer += part

    def _forget(self, server: ForkServer) -> None:
        with self._lock:
            if self._server is server:
                self._server = None
        server.close()

    def close(self) -> None:
        """End what ranks are forked from. Ranks live on."""
        with self._lock:
            self._closed, server, self._server = True, self._server, None
        if server is not None:
            server.close()


@contextlib.contextmanager
def rank_starter(config: ServerConfig) -> Iterator[ForkStarter | None]:
    """What ranks are forked from while this lasts, if they are. Its imports begin here, beside all else that a start does."""
    size, device, stall_seconds = config.model.num_ranks, config.model.device, config.supervisor.load_stall_seconds
    if not (config.supervisor.fork_ranks and can_fork(device)):
        yield None
        return
    with contextlib.closing(ForkStarter(size, device, stall_seconds=stall_seconds)) as starter:
        yield starter


def rank_environment(number: int, size: int, device: str, gpus: str = "") -> dict[str, str]:
    """The rank's environment: ours, and its fair share of the cores, loopback only, nothing fetched.

    Args:
        gpus: ``model.gpus``.
    """
    cores = limits.usable_cores()
    on_cpu = device == "cpu"
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(max(1, cores // size)),
        # Threads that wait for one another spin for some ten microseconds and then sleep. Without a bound a spinning thread
        # keeps the one it waits for from running (steps thirty times as long on a busy machine); without any spin each
        # linear layer pays for waking them (twice as long at one row).
        "GOMP_SPINCOUNT": "20000",
        # Weights and KV blocks on two-mebibyte pages: reading all weights per token is a fifth faster.
        "THP_MEM_ALLOC_ENABLE": "1",
        "LOCAL_RANK": str(number),
        **({"DS_ACCELERATOR": "cpu"} if on_cpu else _EXCHANGE_OF_GPUS),
        # All of the ranks' GPUs, in their order, so that whether they reach one another can be asked.
        **({"CUDA_VISIBLE_DEVICES": gpus, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if gpus else {}),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": import_path(os.environ),
    }


def can_fork(device: str) -> bool:
    """Whether ranks may be forked: CUDA, once looked at, is of no use in a fork; and looking is what an import may do.

    Args:
        device: a value of ``model.device``.
    """
    return device == "cpu" or (device == "auto" and not any(path.exists() for path in _GPUS))
