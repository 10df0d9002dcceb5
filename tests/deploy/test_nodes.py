"""One model on several machines: network namespaces on a switch, whose cables can be pulled."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from host.modules import import_path
from serve.worker.rank_loop import RANK_NAME
from tests.chaos.history import Call, Load, judge, undisturbed
from tests.deploy.namespaces import Node, network, require_namespaces
from tests.support.models import save
from tests.support.server import Server, serving, until

pytestmark = pytest.mark.deploy

STREAMS = 16
NOTICED_SECONDS = 15.0
JOIN = 50060


@contextlib.contextmanager
def agent(nodes: Sequence[Node], number: int, key: Path) -> Iterator[psutil.Process]:
    """The agent of node ``number``, the server being on the first; it and its ranks are gone at the end, however it stands."""
    words = ["-m", "serve", "agent", "--join", f"{nodes[0].address}:{JOIN}", "--node", str(number), "--key-file", str(key)]
    environment = {**os.environ, "PYTHONPATH": import_path(os.environ), "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen([*nodes[number].under, sys.executable, *words], env=environment)
    try:
        yield psutil.Process(process.pid)
    finally:
        for member in tree(process.pid):
            member.kill()
        process.wait()


def tree(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    top = psutil.Process(pid)
    return [top, *top.children(recursive=True)]


def ranks_below(agent: psutil.Process) -> int:
    """How many ranks an agent has."""
    return sum(process.name().startswith(RANK_NAME) for process in agent.children(recursive=True))


def all_under_way(load: Load) -> list[Call]:
    """Calls that have begun to stream, once as many have as there are callers."""
    return until(lambda: len(calls := load.under_way()) == STREAMS and calls)


def until_noticed(server: Server, began: float) -> None:
    """The server must say in time that it does not serve."""
    until(lambda: server.health() == "NOT_SERVING", began + NOTICED_SECONDS - time.monotonic())


def until_streaming_again(server: Server, met: list[Call]) -> None:
    """Calls that the fault met end well, and so do others after them."""
    until(lambda: server.health() == "SERVING")
    until(lambda: all(call.code is not None for call in met))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_namespaces()
    return save("gpt_neox", tmp_path_factory.mktemp("nodes") / "model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[int, list[int]]:
    """What one process says."""
    with serving(model) as alone:
        return undisturbed(alone, model)


@pytest.mark.parametrize(
    ("stages", "ranks"),
    [(1, (1, 1)), (2, (2, 1, 1))],
    ids=["two ranks on two machines", "two stages of two ranks on three"],
)
def test_streams_over_machines_outlive_a_cut_cable_and_a_frozen_machine_and_say_what_one_process_says(
    tmp_path: Path, model: Path, expected: dict[int, list[int]], stages: int, ranks: tuple[int, ...]
) -> None:
    key = tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    options = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", str(stages)]
    # A socket in the file system is reached from here, whatever network its server is in.
    options += ["--host", f"unix:{tmp_path}/socket", "--max-num-seqs", str(STREAMS)]
    with network(len(ranks)) as machines, contextlib.ExitStack() as agents:
        first, second, last = machines[0], machines[1], len(ranks) - 1
        running = [agents.enter_context(agent(machines, number, key)) for number in range(1, len(ranks))]
        options += ["--nodes", str(len(ranks)), "--agents-listen", f"{first.address}:{JOIN}", "--agents-key-file", str(key)]
        with serving(model, *options, under=first.under) as server:
            assert (len(server.rank_pids()), *map(ranks_below, running)) == ranks
            load = Load(server, 0, expected, streams=STREAMS)
            with load.going_on():
                all_under_way(load)
                second.cut()
                began, met = time.monotonic(), load.under_way()
                until_noticed(server, began)
                second.mend()
                until_streaming_again(server, met)

                all_under_way(load)
                for process in (frozen := tree(running[-1].pid)):
                    process.suspend()
                began, met = time.monotonic(), load.under_way()
                until_noticed(server, began)
                for process in frozen:
                    process.send_signal(signal.SIGKILL)  # what a launcher does to a node that does not answer
                agents.enter_context(agent(machines, last, key))
                until_streaming_again(server, met)
            verdict = judge(load.calls, expected)
            assert (verdict.lost, verdict.wrong) == ({}, 0), f"of {verdict.calls} calls"
            lost = [line.partition("serve.worker.nodes: ")[2] for line in server.log if " was lost: " in line]
            lost = [line.partition(" was lost")[0] for line in lost if line]
            assert lost == ["node 1", f"node {last}"]
