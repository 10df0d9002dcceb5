"""Ranks on two nodes: a server's own, and an agent's on another loopback address."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from host.modules import import_path, module_command
from serve.config import ModelConfig, NodesConfig, ServerConfig, SupervisorConfig
from serve.engine.executor import loss_reason
from serve.engine.plan import Span, Start, StepPlan
from serve.errors import ConfigError
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.agent import Agent
from serve.worker.executor import RankExecutor
from serve.worker.link import Joined, Link, LinkLost, Refused, agent_context, join
from serve.worker.nodes import NodeStarter
from serve.worker.rank_process import ForkStarter
from tests.support.models import save

STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nodes")
    (root / "key").write_text(secrets.token_hex(32))
    (root / "other").write_text(secrets.token_hex(32))
    save("gpt_neox", root / "model", with_tokenizer=False)
    return root


def _config(folder: Path, size: int = 2) -> ServerConfig:
    nodes = NodesConfig(count=size, agents_listen="127.0.0.2:0", agents_key_file=str(folder / "key"))
    return ServerConfig(
        model=ModelConfig(path=str(folder / "model"), tensor_parallel_size=size, device="cpu", dtype="float32"),
        supervisor=SupervisorConfig(load_stall_seconds=60.0),
        nodes=nodes,
    )


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkStarter]:
    with contextlib.closing(ForkStarter(2, "cpu", stall_seconds=60.0)) as starter:
        yield starter


@pytest.fixture(scope="module")
def nodes(folder: Path, forks: ForkStarter) -> Iterator[NodeStarter]:
    with NodeStarter(_config(folder), forks) as starter:
        yield starter


@contextlib.contextmanager
def _agent(folder: Path, port: int, key: str = "key", *words: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*module_command("serve"), "agent", "--join", f"127.0.0.2:{port}", "--key-file", str(folder / key), *words]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": import_path(os.environ)})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def _is_gone(process: psutil.Process) -> bool:
    """A zombie is gone too: orphans come to this process, which forked others and does not collect them."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    return True


def _tokens(executor: RankExecutor) -> list[int]:
    """What a greedy sequence says in some steps."""
    prompt = (3, 4, 5, 6, 7)
    start = Start(
        sequence=SequenceId(0),
        index=0,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(temperature=0.0),
    )
    span = Span(sequence=SequenceId(0), start=0, count=len(prompt), new_blocks=(BlockId(0),), sample=True)
    tokens = [executor.execute(StepPlan(step=0, starts=(start,), spans=(span,))).sampled[0].token_id]
    for step in range(1, STEPS):
        span = Span(sequence=SequenceId(0), start=len(prompt) + step - 1, count=1, continues=True, sample=True)
        tokens.append(executor.execute(StepPlan(step=step, spans=(span,))).sampled[0].token_id)
    return tokens


@contextlib.contextmanager
def _group(config: ServerConfig, starter: NodeStarter | ForkStarter) -> Iterator[RankExecutor]:
    with contextlib.closing(RankExecutor(config, starter)) as executor:
        executor.start()
        yield executor


@pytest.mark.slow
def test_two_nodes_say_what_one_process_says_and_a_lost_or_frozen_node_is_noticed_and_comes_back(
    folder: Path, forks: ForkStarter, nodes: NodeStarter
) -> None:
    one = dataclasses.replace(_config(folder, 1), nodes=NodesConfig())
    with _group(one, forks) as alone:
        expected = _tokens(alone)
    config = _config(folder)
    with _agent(folder, nodes.port) as agent, _group(config, nodes) as ranks:
        assert _tokens(ranks) == expected
        assert ranks.dead_rank() is None
        children = psutil.Process(agent.pid).children(recursive=True)
        agent.kill()
        _until(ranks.dead_rank)
        assert "node 1 was lost" in str(ranks.dead_rank())
        _until(lambda: all(_is_gone(child) for child in children))
    with _agent(folder, nodes.port, "key", "--node", "1") as agent:
        with _group(config, nodes) as ranks:
            assert _tokens(ranks) == expected
            stopped = [agent, *psutil.Process(agent.pid).children(recursive=True)]
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            _until(ranks.dead_rank, 15.0)
            assert time.monotonic() - began < 15.0
            assert loss_reason(ranks.dead_rank()) in ("died", "frozen")
        for process in stopped:
            process.send_signal(signal.SIGCONT)
        with _group(config, nodes) as ranks:
            assert _tokens(ranks) == expected


def test_an_agent_with_another_key_is_refused_and_says_so(folder: Path, nodes: NodeStarter) -> None:
    with _agent(folder, nodes.port, "other") as agent:
        _until(lambda: agent.poll() is not None)
        assert agent.returncode == 1


def test_nothing_but_tls_a_greeting_and_the_key_is_answered(folder: Path, nodes: NodeStarter) -> None:
    for hostile in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x04junk", b""):
        with (
            socket.create_connection(("127.0.0.2", nodes.port)) as plain,
            contextlib.suppress(OSError),  # it may have hung up before all of it was said
        ):
            plain.sendall(hostile)
            plain.shutdown(socket.SHUT_WR)
            while plain.recv(4096):
                pass
    for malformed in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x04junk", b"\x00\x00\x00\x01\xc0"):
        with (
            socket.create_connection(("127.0.0.2", nodes.port)) as raw,
            agent_context("").wrap_socket(raw) as connection,
            contextlib.suppress(ConnectionError, ssl.SSLError),
        ):
            connection.sendall(malformed)
            assert connection.recv(4096) == b""


def test_an_agent_stays_for_the_servers_drain_and_ends_when_a_server_is_gone_for_good(folder: Path, forks: ForkStarter) -> None:
    """Launchers tell all nodes to end at once, and a server that drains still needs the others."""

    async def ends(linger_seconds: float | None, leave_seconds: float | None) -> bool:
        """Whether the agent ends before the server does, once it is told to with ``linger_seconds``."""
        with contextlib.ExitStack() as server:
            nodes = server.enter_context(NodeStarter(_config(folder), forks))
            key = (folder / "key").read_bytes()
            agent = Agent("127.0.0.2", nodes.port, key, node=1, authority="", starter=forks, leave_seconds=leave_seconds)
            running = asyncio.ensure_future(agent.until_done())
            while not agent._joined:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            if linger_seconds is not None:
                agent.end(linger_seconds)
                await asyncio.wait((running,), timeout=0.2 if linger_seconds else None)
            before = running.done()
            await asyncio.to_thread(server.close)
        await running
        return before

    assert asyncio.run(ends(0.0, None))
    assert not asyncio.run(ends(600.0, None)), "it stays while the server does, and then ends"
    assert not asyncio.run(ends(None, 0.0)), "nobody told it; the server was gone"


def test_the_proof_of_one_handshake_is_none_in_another(folder: Path, nodes: NodeStarter) -> None:
    """What an agent said once, said again by somebody who listened, is refused: the server's number is another."""

    class Recorded(Link):
        said: ClassVar[list[object]] = []

        def send(self, frame: object) -> None:
            self.said.append(frame)
            super().send(frame)  # type: ignore[arg-type]

    async def connect(kind: type[Link]) -> Link:
        return kind(*await asyncio.open_connection("127.0.0.2", nodes.port, ssl=agent_context("")))

    async def replay() -> None:
        await asyncio.to_thread(_until, lambda: not nodes._nodes)  # what joined in another test has left
        link = await connect(Recorded)
        assert await join(link, (folder / "key").read_bytes(), None) == 1
        hello, proof = Recorded.said[:2]
        await link.close()
        again = await connect(Link)
        again.send(hello)  # type: ignore[arg-type]
        await again.receive()
        again.send(proof)  # type: ignore[arg-type]
        assert await again.receive() == Joined(b"", 0)
        with pytest.raises(LinkLost):
            await again.receive()
        await again.close()
        third = await connect(Link)
        with pytest.raises((Refused, LinkLost)):
            await join(third, b"x" * 64, None)
        await third.close()

    asyncio.run(replay())


def test_options_of_several_nodes_are_refused_by_name(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nodes\.agents_listen"):
        NodesConfig(count=2)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 1; it must be at least nodes\.count"):
        dataclasses.replace(_config(folder), model=ModelConfig(path="x"))
    short = folder / "short"
    short.write_text("short")
    for change, message in (
        ({"agents_key_file": str(short)}, "at least 32"),
        ({"agents_key_file": str(folder / "absent")}, "cannot be read"),
        ({"agents_listen": "0.0.0.0:0"}, "must name one address"),
        ({"agents_tls_cert": str(short), "agents_tls_key": str(short)}, "no certificate with its key"),
    ):
        config = _config(folder)
        with pytest.raises(ConfigError, match=message):
            NodeStarter(dataclasses.replace(config, nodes=dataclasses.replace(config.nodes, **change)), None)
