"""``tessera-serve agent``: starts and watches the ranks of one node for a server on another."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from serve import logs
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
    agent_context,
    join,
    read_key,
)
from serve.worker.rank_output import RankOutput
from serve.worker.rank_process import ForkStarter, NewRank, ProgramStarter, RankProcess, RankStarter, can_fork, rank_environment
from serve.worker.wiring import interface_of

DEFAULT_PORT: Final = 50060
_AGAIN_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.05
_STALL_SECONDS: Final = 120.0
_LEADERS: Final = ("LWS_LEADER_ADDRESS", "MASTER_ADDR")
_NODES: Final = ("LWS_WORKER_INDEX", "SLURM_NODEID", "GROUP_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LANES: Final = 3

_log = logging.getLogger(__name__)


class Agent:
    """Joins a server again and again, and has the ranks that it asks for on this node while they are joined."""

    def __init__(
        self,
        host: str,
        port: int,
        key: bytes,
        *,
        node: int | None,
        authority: str,
        starter: RankStarter,
        leave_seconds: float | None = None,
    ) -> None:
        """Nothing is joined yet.

        Args:
            node: the number of this node, 1 or more; the server's is 0.
            authority: file of the certificates that the server's must be signed by; empty: the key alone tells it.
            leave_seconds: how long a server that was joined once may be gone before this ends too; ``None``: for ever.
        """
        self._host, self._port, self._key, self._node = host, port, key, node
        self._leave_seconds = leave_seconds
        self._left: float | None = None
        """When the server was lost; ``None`` before it was joined, and while it is."""
        self._joined = self._ending = False
        self._context = agent_context(authority)
        self._starter = starter
        # One thread for all of them, which lives as long as this process: the kernel ends ranks with the thread that made them.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starts")
        self._ranks: dict[int, RankProcess] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def end(self, linger_seconds: float) -> None:
        """Have ``run`` return: at once where nothing is joined, else when the server leaves, which may take so long."""
        self._ending = True
        if not self._joined or not linger_seconds:
            self._run.cancel()
        else:
            asyncio.get_running_loop().call_later(linger_seconds, self._run.cancel)

    async def until_done(self) -> None:
        """Join, serve, and join again, until ``end`` is called or the server is gone for good.

        Raises:
            Refused: the server does not hold the key.
        """
        self._run = asyncio.ensure_future(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            await self._run

    def _is_over(self) -> bool:
        if self._left is None or self._leave_seconds is None:
            return False
        return time.monotonic() - self._left > self._leave_seconds

    async def _serve(self) -> None:
        said = ""
        while True:
            try:
                link, node = await self._join()
            except (OSError, LinkLost, TimeoutError) as error:
                if self._is_over():
                    _log.info("the server has been gone for %.0f s", self._leave_seconds)
                    return
                if (says := str(error) or type(error).__name__) != said:
                    _log.warning("not joined with %s:%d, trying again: %s", self._host, self._port, says)
                    said = says
                await asyncio.sleep(_AGAIN_SECONDS)
                continue
            said, self._joined = "", True
            _log.info("node %d has joined %s:%d", node, self._host, self._port)
            try:
                _log.warning("the link to the server was lost: %s", await link.run(functools.partial(self._handle, link)))
            finally:
                self._joined, self._left = False, time.monotonic()
                await self._end_ranks()
            if self._ending:
                return

    async def _join(self) -> tuple[Link, int]:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._context)
            link = Link(reader, writer)
            try:
                return link, await join(link, self._key, self._node)
            except BaseException:
                await link.close()
                raise

    def _handle(self, link: Link, frame: Frame) -> None:
        if isinstance(frame, Begin):
            watch = asyncio.ensure_future(self._rank(link, frame))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
        elif isinstance(frame, Signal) and (process := self._ranks.get(frame.run)) is not None:
            process.send_signal(frame.signal)

    async def _rank(self, link: Link, begin: Begin) -> None:
        """Start one rank, and tell the server how it ends."""
        kinds = (socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        pairs = [socket.socketpair(socket.AF_UNIX, kind) for kind in kinds]
        link.carry(begin.run, [ours for ours, _ in pairs])
        environment = rank_environment(begin.local_number, begin.ranks_here, begin.device)
        environment |= interface_of(link.own_address)
        loop = asyncio.get_running_loop()
        try:
            process = await asyncio.shield(
                loop.run_in_executor(self._thread, self._start, begin, environment, [theirs for _, theirs in pairs])
            )
        except (OSError, RankStartError) as error:
            link.send(Began(begin.run, 0, str(error)))
            return
        self._ranks[begin.run] = process
        _log.info("rank %d started: process %d", begin.number, process.pid)
        link.send(Began(begin.run, process.pid))
        try:
            while (code := process.poll()) is None:  # noqa: ASYNC110  # a process sets no event
                await asyncio.sleep(_LOOK_SECONDS)
            _log.info("rank %d ended: %d", begin.number, code)
            link.send(Ended(begin.run, code))
        finally:
            del self._ranks[begin.run]

    def _start(self, begin: Begin, environment: dict[str, str], sockets: list[socket.socket]) -> RankProcess:
        steps, orders, pulse = sockets
        unused = os.memfd_create("tessera-unused"), os.memfd_create("tessera-unused")
        output = RankOutput("serve.rank", begin.number)
        try:
            return self._starter.start(
                NewRank(
                    number=begin.number,
                    environment=environment,
                    sockets=(steps.fileno(), orders.fileno(), pulse.fileno()),
                    rendezvous=unused[0],
                    shared=unused[1],
                    log_level=begin.log_level,
                    meeting=begin.meeting,
                    output=output.writes,
                ),
                unless=lambda: None,
            )
        finally:
            output.handed_over()
            for descriptor in unused:
                os.close(descriptor)
            for end in sockets:
                end.close()

    async def _end_ranks(self) -> None:
        """Kill the ranks and collect them."""
        while self._watches:
            for process in self._ranks.values():
                process.kill()
            await asyncio.wait(self._watches, timeout=_LOOK_SECONDS)


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 after a signal, 2 for a mistake, 1 where the server has another key."""
    given = _parser().parse_args(arguments)
    logs.set_up("info")
    with contextlib.ExitStack() as stack:
        try:
            host, port = _server(given.join, os.environ)
            key, node = read_key(given.key_file, "--key-file"), _node(given.node, os.environ)
            starter: RankStarter = ProgramStarter()
            if can_fork("auto"):
                starter = stack.enter_context(contextlib.closing(ForkStarter(2, "auto", stall_seconds=_STALL_SECONDS)))
            agent = Agent(
                host, port, key, node=node, authority=given.ca_file, starter=starter, leave_seconds=given.leave_after_seconds
            )
        except ConfigError as error:
            print(f"tessera-serve agent: {error}", file=sys.stderr)
            return error.exit_code
        try:
            asyncio.run(_until_told(agent, given.linger_seconds))
        except Refused as error:
            print(f"tessera-serve agent: {error}", file=sys.stderr)
            return 1
    return 0


async def _until_told(agent: Agent, linger_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.end, linger_seconds)
    await agent.until_done()


def _server(given: str | None, environment: Mapping[str, str]) -> tuple[str, int]:
    told = given or next((environment[name] for name in _LEADERS if environment.get(name)), None)
    if told is None:
        raise ConfigError(f"--join is missing, and none of {', '.join(_LEADERS)} says where the server is")
    host, separator, port = told.rpartition(":")
    if not separator:
        return told, DEFAULT_PORT
    if not host or not port.isdecimal():
        raise ConfigError(f"--join is {told!r}; it must be HOST:PORT")
    return host, int(port)


def _node(given: int | None, environment: Mapping[str, str]) -> int | None:
    if given is not None:
        return given
    told = next((environment[name] for name in _NODES if environment.get(name)), None)
    if told is not None and not told.isdecimal():
        raise ConfigError(f"the launcher's node number is {told!r}; it must be a whole number")
    return None if told is None else int(told)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-serve agent",
        description="Start and watch the ranks of this node for a server on another, which runs with --nodes.",
        allow_abbrev=False,
    )
    parser.add_argument("--join", metavar="HOST:PORT", help=f"The server's --agents-listen. (default: {' or '.join(_LEADERS)})")
    parser.add_argument("--key-file", required=True, metavar="FILE", help="The key that the server has as --agents-key-file.")
    parser.add_argument("--ca-file", default="", metavar="FILE", help="Certificates that the server's is to be signed by.")
    parser.add_argument("--node", type=int, metavar="N", help=f"This node, from 1 on. (default: {', '.join(_NODES)})")
    parser.add_argument(
        "--linger-seconds",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="After SIGTERM, wait so long for the server to leave: launchers tell all nodes at once; it drains. (default: 0)",
    )
    parser.add_argument(
        "--leave-after-seconds",
        type=_seconds,
        metavar="S",
        help="End, with 0, when a server that was joined has been gone for so long. (default: never)",
    )
    return parser


def _seconds(text: str) -> float:
    if (seconds := float(text)) >= 0:  # not a number is not
        return seconds
    raise ValueError
