"""The launcher for Ray, on a Ray of several nodes that listens on this machine's loopback alone."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.one_model import MOST_SECONDS, address_of, ids_of, model_and_key, said_by_one, stream
from tests.deploy.ray_cluster import Cluster, cluster_of_two
from tests.repo.documents import REPOSITORY
from tests.serve.client.offline.test_ray import addresses_that_listen
from tests.support.ports import held_port
from tests.support.server import until

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray: make test-ray installs it"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_and_key(tmp_path_factory.mktemp("ray_nodes"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """What one process says."""
    return said_by_one(folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with cluster_of_two() as cluster:
        yield cluster


class Launcher:
    """A launcher that runs, and what it has said to standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def ends(self) -> tuple[int, str]:
        """Its exit code and the last line that it says, once it has ended."""
        code = self.process.wait(MOST_SECONDS)
        self._reader.join()
        return code, self.said[-1] if self.said else ""


@contextlib.contextmanager
def launched(cluster: Cluster, folder: Path, *options: str, key: str = "key") -> Iterator[Launcher]:
    """The launcher; it must leave nothing, however it ends."""
    server = [
        "--model",
        str(folder / "model"),
        "--tensor-parallel-size",
        "2",
        "--device",
        "cpu",
        "--port",
        "0",
        "--metrics-port",
        "0",
    ]
    with held_port() as port:
        words = [
            str(folder / key),
            "--ray",
            cluster.address,
            "--agents-port",
            str(port),
            "--nodes",
            "2",
            *options,
            "--",
            *server,
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.launchers.ray_nodes", *words],
            cwd=REPOSITORY,
            env=cluster.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        launcher = Launcher(process)
        try:
            yield launcher
        finally:
            process.kill()
            launcher.ends()
            assert process.stdout is not None
            process.stdout.close()
            assert process.stderr is not None
            process.stderr.close()
        until(lambda: not cluster.ours())
        until(lambda: set(cluster.ask("groups")) <= {"REMOVED"})


def test_a_killed_agent_comes_back_under_a_stream_and_a_launcher_that_is_told_to_end_drains_first(
    cluster: Cluster, folder: Path, expected: list[int]
) -> None:
    with launched(cluster, folder) as launcher:
        address = address_of(launcher.process)
        listens = addresses_that_listen(cluster.process.pid) | addresses_that_listen(launcher.process.pid)
        assert listens <= {"127.0.0.1", "::ffff:127.0.0.1"}
        events = stream(address)
        said = list(next(events).delta.token_ids)
        agent = until(lambda: cluster.program(agent=True))
        agent.kill()
        assert said + ids_of(events) == expected
        assert any("the agent of node 1 was killed by signal 9, and is started again" in line for line in launcher.said)
        events = stream(address)
        said = list(next(events).delta.token_ids)
        launcher.process.send_signal(signal.SIGTERM)
        assert said + ids_of(events) == expected
        assert launcher.ends()[0] == 0
        assert (cluster.ours(), set(cluster.ask("groups"))) == ([], {"REMOVED"})


def test_a_node_that_is_lost_is_replaced_by_one_that_comes(cluster: Cluster, folder: Path, expected: list[int]) -> None:
    with launched(cluster, folder) as launcher:
        events = stream(address_of(launcher.process))
        said = list(next(events).delta.token_ids)
        cluster.lose(cluster.node_of(until(lambda: cluster.program(agent=True))))
        until(lambda: any("node 1 was lost; " in line for line in launcher.said))
        cluster.add()
        assert said + ids_of(events) == expected
        launcher.process.send_signal(signal.SIGINT)
        assert launcher.ends()[0] == 0


def test_the_loss_of_the_server_s_node_ends_all(cluster: Cluster, folder: Path) -> None:
    with launched(cluster, folder) as launcher:
        address_of(launcher.process)
        cluster.lose(cluster.node_of(until(lambda: cluster.program(agent=False))))
        assert launcher.ends() == (1, "ray_nodes: node 0 (127.0.0.1) was lost, and the server with it\n")
        cluster.add()


def test_programs_see_the_gpus_that_were_asked_for_and_a_launcher_that_is_killed_leaves_none(
    cluster: Cluster, folder: Path
) -> None:
    with launched(cluster, folder, "--gpus-per-node", "1") as launcher:
        address_of(launcher.process)
        programs = [until(lambda: cluster.program(agent=False)), until(lambda: cluster.program(agent=True))]
        assert [program.environ()["CUDA_VISIBLE_DEVICES"] for program in programs] == ["0", "0"]
        launcher.process.kill()


def test_a_mistake_of_the_server_s_options_is_told_with_its_exit_code(cluster: Cluster, folder: Path) -> None:
    with launched(cluster, folder / "nothing", key="../key") as launcher:
        code, said = launcher.ends()
        assert (code, str(folder / "nothing/model") in said) == (2, True), launcher.said


def test_a_cluster_that_nobody_answers_for_is_told_at_once(cluster: Cluster, folder: Path) -> None:
    with held_port() as nobody, launched(cluster, folder, "--ray", f"127.0.0.1:{nobody}") as launcher:
        assert launcher.ends() == (
            1, f"ray_nodes: no Ray cluster was joined at 127.0.0.1:{nobody} (--ray): [Errno 111] Connection refused\n",
        )  # fmt: skip


def test_what_a_cluster_lacks_is_told(cluster: Cluster, folder: Path) -> None:
    for options, key, code, says in (
        (["--nodes", "4", "--wait-seconds", "1"], "key", 1, "--nodes asks for 4 nodes, and the Ray cluster has 3 after 1 s"),
        (["--gpus-per-node", "2", "--wait-seconds", "1"], "key", 1, "no 2 of them have 1 CPUs and 2 GPUs free"),
        ([], "none", 2, f"node 127.0.0.1 has no key file {folder / 'none'}, which must be the same on every node"),
    ):
        with launched(cluster, folder, *options, key=key) as launcher:
            ended, said = launcher.ends()
            assert (ended, says in said) == (code, True), said
