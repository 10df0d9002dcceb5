"""Ranks on other nodes: their agents join the server, and start what the executor asks for as if it were here."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from serve.config import ServerConfig
from serve.errors import ConfigError, RankStartError
from serve.worker.link import (
    HANDSHAKE_SECONDS,
    Began,
    Begin,
    Ended,
    Frame,
    Link,
    LinkLost,
    Refused,
    Signal,
    let_in,
    read_key,
    server_context,
)
from serve.worker.rank_process import NewRank, ProgramStarter, RankProcess, RankStarter, RemoteProcess, rank_environment
from serve.worker.wiring import address_of, interface_of

T = TypeVar("T")

_LOOK_SECONDS: Final = 0.05
_MAX_STRANGERS: Final = 32
"""Connections that have not proved the key."""

_log = logging.getLogger(__name__)


class _Node:
    """One node that has joined, and the ranks that it was asked for. Belongs to the loop."""

    def __init__(self, number: int, link: Link, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.link = link
        self._loop = loop
        self._runs = itertools.count(1)
        self._processes: dict[int, _AgentsProcess] = {}

    def begin(self, rank: NewRank, begin: Callable[[int], Begin], sockets: list[socket.socket]) -> _AgentsProcess:
        """Ask for a rank; ``began`` of what is returned tells whether there is one."""
        run = next(self._runs)
        process = self._processes[run] = _AgentsProcess(self.number, run, self._loop, self.link)
        self.link.carry(run, sockets)
        self.link.send(begin(run))
        _log.debug("rank %d was asked of node %d", rank.number, self.number)
        return process

    def handle(self, frame: Frame) -> None:
        """Take in what the agent tells."""
        if isinstance(frame, Began) and (process := self._processes.get(frame.run)) is not None:
            if frame.refusal:
                del self._processes[frame.run]
                process.began.set_exception(RankStartError(f"node {self.number} could not start a rank: {frame.refusal}"))
            else:
                process.began.set_result(frame.process_id)
        elif isinstance(frame, Ended) and (process := self._processes.pop(frame.run, None)) is not None:
            process.ended(frame.code, None)

    def lost(self, why: str) -> None:
        """The node is gone, and its ranks with it."""
        for process in self._processes.values():
            if not process.began.done():
                process.began.set_exception(RankStartError(f"node {self.number} was lost: {why}"))
            process.ended(-signal.SIGKILL, f"node {self.number} was lost: {why}")
        self._processes.clear()


class _AgentsProcess(RemoteProcess):
    """A rank on another node, as its agent tells of it. Any thread."""

    def __init__(self, node: int, run: int, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        super().__init__(node)
        self.began: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._run, self._loop, self._link = run, loop, link
        self._gone = threading.Event()
        self._code: int | None = None

    def ended(self, code: int, how: str | None) -> None:
        """The rank has ended with this return code; ``how`` in words where the code does not tell."""
        self._code, self.how = code, how
        self._gone.set()

    def poll(self) -> int | None:
        return self._code if self._gone.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._gone.wait(timeout):
            raise subprocess.TimeoutExpired("a rank on another node", timeout or 0.0)
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the node ends its ranks by itself
            self._loop.call_soon_threadsafe(self._link.send, Signal(self._run, number))


class NodeStarter:
    """Starts each rank on its node: the first ranks here, the next on node 1, and so on. A context manager.

    Agents join at an own port, in a thread of its own. One that is lost takes its ranks with it, as the agent does at its end;
    the next start waits for it to come back.
    """

    def __init__(self, config: ServerConfig, local: RankStarter | None) -> None:
        """Nothing listens yet.

        Args:
            local: starts the ranks of this node.

        Raises:
            ConfigError: the address, the key or the certificate is at fault.
        """
        nodes, model = config.nodes, config.model
        host, _, port = nodes.agents_listen.rpartition(":")
        self._address, self._port = address_of(host, "nodes.agents_listen"), int(port)
        self._interface = interface_of(self._address)
        self._key = read_key(nodes.agents_key_file, "nodes.agents_key_file")
        self._context, self._certificate = server_context(nodes.agents_tls_cert, nodes.agents_tls_key)
        self._count, self._per_node = nodes.count, config.ranks_per_node
        self._places = [(node, local) for node, count in enumerate(self._per_node) for local in range(count)]
        """The node of each rank, and its number there."""
        self._device, self._patience_seconds = model.device, config.supervisor.start_timeout_seconds
        self._local = local or ProgramStarter()
        self._nodes: dict[int, _Node] = {}
        self._strangers = 0
        self._meeting: socket.socket | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tessera-nodes", daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port at which agents join."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def __enter__(self) -> NodeStarter:
        """Listen.

        Raises:
            ConfigError: the address cannot be had.
        """
        self._thread.start()
        try:
            self._server = self._call(
                asyncio.start_server(
                    self._stranger,
                    self._address,
                    self._port,
                    ssl=self._context,
                    ssl_handshake_timeout=HANDSHAKE_SECONDS,
                    ssl_shutdown_timeout=HANDSHAKE_SECONDS,
                )
            )
        except OSError as error:
            self.__exit__()
            raise ConfigError(f"nodes.agents_listen cannot be listened at: {error}") from None
        _log.info("agents join at %s:%d", self._address, self.port)
        return self

    def __exit__(self, *_: object) -> None:
        """End what is joined; its agents end their ranks."""
        self._call(self._leave())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._forget_meeting()

    async def _leave(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _stranger(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its handshake to its end."""
        link = Link(reader, writer)
        node: _Node | None = None
        self._strangers += 1
        try:
            if self._strangers > _MAX_STRANGERS:
                raise Refused("too many connections have not proved the key")
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                number = await let_in(link, self._key, self._certificate, self._place)
            node = self._nodes[number] = _Node(number, link, self._loop)
        except (Refused, LinkLost, TimeoutError) as error:
            _log.warning("a connection from %s is no agent of ours: %s", link.peer, error or "it said nothing")
        finally:
            self._strangers -= 1
            if node is None:
                link.leave()
        if node is None:
            return
        _log.info("node %d has joined from %s", node.number, link.peer)
        why = "the server stops"
        try:
            why = str(await link.run(node.handle))
            _log.warning("node %d was lost: %s", node.number, why)
        except asyncio.CancelledError:  # the server stops; asyncio would log that a connection's task was cancelled
            pass
        finally:
            del self._nodes[node.number]
            node.lost(why)

    def _place(self, wanted: int | None) -> int | str:
        free = [number for number in range(1, self._count) if number not in self._nodes]
        if wanted is None:
            return free[0] if free else "every node has joined already"
        if not 1 <= wanted < self._count:
            return f"it says that it is node {wanted}; those with agents are 1 to {self._count - 1}"
        return wanted if wanted in free else f"node {wanted} has joined already"

    def start(self, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        """Start a rank on the node that has its place: here, or by the agent there. It dies with this process.

        The first rank waits for all nodes: those that wait for others seem to hang.

        Args:
            unless: called now and then where the start takes long; what it raises ends it.

        Raises:
            OSError: the system has no process to give.
            RankStartError: a node did not join or was lost, or the rank was started and hangs.
        """
        if rank.number == 0:
            self._wait_for_all(unless)
            self._forget_meeting()
            self._meeting = socket.create_server((self._address, 0))
        assert self._meeting is not None, "rank 0 is started first"
        address, port = self._meeting.getsockname()
        node, local_number = self._places[rank.number]
        placed = dataclasses.replace(rank, meeting=f"{address}:{port}", rendezvous=self._meeting.fileno())
        if node == 0:
            environment = rank_environment(local_number, self._per_node[0], self._device) | self._interface
            return self._local.start(dataclasses.replace(placed, environment=environment), unless)
        return self._start_there(node, local_number, placed, unless)

    def _start_there(self, node: int, local_number: int, rank: NewRank, unless: Callable[[], None]) -> RankProcess:
        sockets = [socket.socket(fileno=os.dup(descriptor)) for descriptor in rank.sockets]

        def begin(run: int) -> Begin:
            return Begin(run, rank.number, local_number, self._per_node[node], self._device, rank.meeting, rank.log_level)

        async def ask() -> _AgentsProcess:
            if (joined := self._nodes.get(node)) is None:
                for end in sockets:
                    end.close()
                raise RankStartError(f"node {node} was lost before it was asked for rank {rank.number}")
            return joined.begin(rank, begin, sockets)

        process = self._call(ask())
        while True:
            try:
                process.remote_pid = process.began.result(_LOOK_SECONDS)
                return process
            except concurrent.futures.TimeoutError:
                unless()

    def _wait_for_all(self, unless: Callable[[], None]) -> None:
        deadline, said = time.monotonic() + self._patience_seconds, False
        while missing := [number for number in range(1, self._count) if number not in self._nodes]:
            unless()
            if not said:
                _log.info("waiting for the agents of %s", ", ".join(f"node {number}" for number in missing))
                said = True
            if time.monotonic() > deadline:
                raise RankStartError(f"node {missing[0]} did not join within {self._patience_seconds:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def _forget_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None
