"""The launchers' files, started by torchrun and Open MPI themselves and by a stand-in for Slurm.

Both nodes are on this machine's loopback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from host.modules import import_path
from tests.deploy import srun
from tests.deploy.one_model import MOST_SECONDS, address_of, ids_of, model_and_key, said_by_one, stream
from tests.deploy.tools import needs
from tests.repo.documents import REPOSITORY
from tests.support.ports import held_port
from tests.support.server import until

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

LAUNCHERS = REPOSITORY / "deploy/launchers"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_and_key(tmp_path_factory.mktemp("launchers"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    """What one process says."""
    return said_by_one(folder)


def options(folder: Path) -> list[str]:
    """For ``tessera-node.sh``: its key, and what the server is given."""
    words = [str(folder / "key"), "--model", str(folder / "model"), "--tensor-parallel-size", "2"]
    return [*words, "--device", "cpu", "--port", "0", "--metrics-port", "0"]


@contextlib.contextmanager
def started(*words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher; it and all below it are gone at the end."""
    path = f"{variables.pop('first_on_path', '')}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": import_path(os.environ), "PATH": path, "DS_ACCELERATOR": "cpu", **variables}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    below: list[psutil.Process] = []
    try:
        yield process
        below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    finally:
        if process.poll() is None:
            below = below or psutil.Process(process.pid).children(recursive=True)
            process.kill()
        for member in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def below(launcher: subprocess.Popen[str], *, agent: bool) -> psutil.Process:
    """The server that a launcher has started, or the agent: the first process that bears its command."""
    for process in psutil.Process(launcher.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if any(word.endswith("tessera-serve") for word in words) and ("agent" in words) == agent:
                return process
    raise AssertionError("it is not running")


def test_by_torchrun_a_killed_agent_comes_back_and_all_end_when_the_server_does(folder: Path, expected: list[int]) -> None:
    node = [str(LAUNCHERS / "tessera-node.sh"), *options(folder)]
    with contextlib.ExitStack() as launchers:
        here, agents = (str(launchers.enter_context(held_port(FIRST))) for _ in range(2))
        meets = ["--master-addr", FIRST, "--master-port", here, "--nnodes", "2", "--nproc-per-node", "1"]
        variables = {"AGENTS_PORT": agents, "LEAVE_SECONDS": "1"}
        first, second = (
            launchers.enter_context(started("torchrun", "--no-python", "--node-rank", number, *meets, *node, **variables))
            for number in ("0", "1")
        )
        events = stream(address_of(first))
        said = list(next(events).delta.token_ids)
        below(second, agent=True).kill()
        assert said + ids_of(events) == expected
        below(first, agent=False).send_signal(signal.SIGTERM)
        assert (first.wait(MOST_SECONDS), second.wait(MOST_SECONDS)) == (0, 0)


@needs("mpirun")
def test_by_mpi_a_killed_agent_comes_back_and_all_end_when_the_server_does(
    folder: Path, expected: list[int], tmp_path: Path
) -> None:
    """Open MPI starts a program that calls nothing of it, and says by its own variables which node each is."""
    with held_port(FIRST) as port:
        variables = (f"MASTER_ADDR={FIRST}", f"AGENTS_PORT={port}", "LEAVE_SECONDS=1", "PATH", "PYTHONPATH")
        given = [word for variable in variables for word in ("-x", variable)]
        (tmp_path / "hosts").write_text("localhost slots=2\n")
        words = ["mpirun", "--allow-run-as-root", "--hostfile", str(tmp_path / "hosts"), "-n", "2", *given]
        loopback = ["--mca", "oob_tcp_if_include", "lo", "--mca", "btl_tcp_if_include", "lo"]
        with started(*words, *loopback, str(LAUNCHERS / "tessera-node.sh"), *options(folder)) as launcher:
            events = stream(address_of(launcher))
            said = list(next(events).delta.token_ids)
            below(launcher, agent=True).kill()
            assert said + ids_of(events) == expected
            below(launcher, agent=False).send_signal(signal.SIGTERM)
            assert launcher.wait(MOST_SECONDS) == 0


def test_by_slurm_a_job_that_is_told_to_end_drains_first(folder: Path, expected: list[int], tmp_path: Path) -> None:
    for name, does in (
        ("srun", f'exec {sys.executable} {srun.__file__} "$@"'),
        ("scontrol", f'[ "$*" = "show hostnames node[1-2]" ] && printf "{FIRST}\\n{SECOND}\\n"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_SUBMIT_DIR": str(LAUNCHERS)}
    words = ["bash", str(LAUNCHERS / "tessera.sbatch"), *options(folder)]
    with (
        held_port(FIRST) as port,
        started(*words, first_on_path=f"{tmp_path}{os.pathsep}", AGENTS_PORT=str(port), **job) as batch,
    ):
        events = stream(address_of(batch))
        said = list(next(events).delta.token_ids)
        batch.send_signal(signal.SIGTERM)  # to every node at once
        assert said + ids_of(events) == expected
        assert batch.wait(MOST_SECONDS) == 0


def test_a_node_that_no_launcher_has_started_is_told_what_is_missing(folder: Path) -> None:
    with started(str(LAUNCHERS / "tessera-node.sh"), *options(folder)) as alone:
        until(lambda: alone.poll() is not None)
        assert alone.returncode == 2
