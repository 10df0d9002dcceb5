"""One model on two machines: two network namespaces with a cable between them, which can be pulled."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from host.modules import import_path
from tests.chaos.history import Call, Load, judge, undisturbed
from tests.deploy.namespaces import Node, network, require_namespaces
from tests.support.models import save
from tests.support.server import Server, serving, until

pytestmark = pytest.mark.deploy

STREAMS = 16
NOTICED_SECONDS = 15.0
JOIN = 50060


@contextlib.contextmanager
def agent(node: Node, server: Node, key: Path) -> Iterator[psutil.Process]:
    """The agent on ``node``; it and its ranks are gone at the end, however it stands."""
    words = ["-m", "serve", "agent", "--join", f"{server.address}:{JOIN}", "--key-file", str(key)]
    environment = {**os.environ, "PYTHONPATH": import_path(os.environ), "DS_ACCELERATOR": "cpu"}
    process = subprocess.Popen([*node.under, sys.executable, *words], env=environment)
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


def test_streams_over_two_machines_outlive_a_cut_cable_and_a_frozen_machine_and_say_what_one_process_says(
    tmp_path: Path,
) -> None:
    require_namespaces()
    model, key = save("gpt_neox", tmp_path / "model"), tmp_path / "key"
    key.write_text(secrets.token_hex(32))
    with serving(model) as alone:
        expected = undisturbed(alone)
    options = ["--tensor-parallel-size", "2", "--nodes", "2", "--agents-key-file", str(key)]
    # A socket in the file system is reached from here, whatever network its server is in.
    options += ["--host", f"unix:{tmp_path}/socket", "--max-num-seqs", str(STREAMS)]
    with network(2) as (first, second), contextlib.ExitStack() as agents:
        running = agents.enter_context(agent(second, first, key))
        with serving(model, *options, "--agents-listen", f"{first.address}:{JOIN}", under=first.under) as server:
            assert len(server.rank_pids()) == 1, "the other rank is the agent's"
            load = Load(server, seed=0, streams=STREAMS)
            with load.going_on():
                all_under_way(load)
                second.cut()
                began, met = time.monotonic(), load.under_way()
                until_noticed(server, began)
                second.mend()
                until_streaming_again(server, met)

                all_under_way(load)
                for process in (frozen := tree(running.pid)):
                    process.suspend()
                began, met = time.monotonic(), load.under_way()
                until_noticed(server, began)
                for process in frozen:
                    process.send_signal(signal.SIGKILL)  # what a launcher does to a node that does not answer
                agents.enter_context(agent(second, first, key))
                until_streaming_again(server, met)
            verdict = judge(load.calls, expected)
            assert (verdict.lost, verdict.wrong) == ({}, 0), f"of {verdict.calls} calls"
            assert len([line for line in server.log if "serve.worker.nodes: node 1 was lost" in line]) == 2
