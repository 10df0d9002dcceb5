"""A Ray cluster of nodes on this machine's loopback, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from examples.ray_batch import LOCAL
from host.modules import import_path
from tests.repo.documents import REPOSITORY


class Cluster:
    """What such a cluster is to a test: a first node with no room, where launchers are, and others for one program each."""

    def __init__(self, process: subprocess.Popen[str], variables: dict[str, str]) -> None:
        self.process, self.variables = process, variables
        self.address: str = self._answer()
        self.nodes: list[int] = [self.ask("add") for _ in range(2)]
        """The process of each node but the first: its ``raylet``."""

    def ask(self, *words: Any) -> Any:
        """One request, and its answer."""
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def lose(self, node: int) -> None:
        """Kill a node, as a machine that loses its power."""
        self.ask("remove", node)
        self.nodes.remove(node)

    def add(self) -> None:
        self.nodes.append(self.ask("add"))

    def ours(self) -> list[psutil.Process]:
        """Everything on this machine that bears the command of Tessera, and what else an actor of the launcher has started."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # ended meanwhile, or somebody else's
                if process.environ().get("RAY_TMPDIR") == self.variables["RAY_TMPDIR"] and is_ours(process):
                    found.append(process)
        return found

    def program(self, *, agent: bool) -> psutil.Process | None:
        """The server, or the agent, where it runs: those below have their parent's command."""
        for process in self.ours():
            with contextlib.suppress(psutil.NoSuchProcess):
                if ("agent" in process.cmdline()) == agent and not is_ours(process.parent()):
                    return process
        return None

    def node_of(self, program: psutil.Process) -> int:
        """On which node it runs."""
        return next(parent.pid for parent in program.parents() if parent.pid in self.nodes)


def is_ours(process: psutil.Process | None) -> bool:
    """Whether it bears the command of Tessera, as ranks do too."""
    if process is None:
        return False
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(word.endswith("tessera-serve") for word in process.cmdline()) or process.name().startswith("tessera")
    return False


@contextlib.contextmanager
def cluster_of_two() -> Iterator[Cluster]:
    """One that is gone at the end."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short: sockets have their names in it
        (Path(folder) / "ray").mkdir()
        variables = {
            **os.environ,
            **LOCAL,
            "RAY_TMPDIR": folder,
            "PYTHONPATH": import_path(os.environ),
            "DS_ACCELERATOR": "cpu",
        }
        words = [sys.executable, "-m", "tests.deploy.ray_cluster"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(words, cwd=REPOSITORY, env=variables, **pipes) as process:
            yield Cluster(process, variables)  # its standard input ends, and it with that


def main() -> None:
    """Keep nodes as standard input says."""
    from ray.cluster_utils import Cluster as Nodes

    answers, sys.stdout = sys.stdout, sys.stderr
    common = {"include_dashboard": False, "node_ip_address": "127.0.0.1"}
    cluster = Nodes(initialize_head=True, head_node_args={**common, "num_cpus": 0})
    nodes: dict[int, Any] = {}

    def answer(what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    answer(cluster.address)
    for line in sys.stdin:
        word, *given = line.split()
        if word == "add":
            node = cluster.add_node(**common, num_cpus=1, num_gpus=1)  # which Ray does not look for
            nodes[pid := node.all_processes["raylet"][0].process.pid] = node
            answer(pid)
        elif word == "remove":
            cluster.remove_node(nodes.pop(int(given[0])), allow_graceful=False)
            answer(None)
        else:
            answer([group["state"] for group in cluster.global_state.placement_group_table().values()])
    cluster.shutdown()


if __name__ == "__main__":
    main()
