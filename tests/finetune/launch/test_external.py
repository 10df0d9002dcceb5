"""Ranks that another launcher started: torchrun, and whatever sets the same environment."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from finetune.launch.external import interface_towards, started_by_launcher
from tests.finetune.support import ROOT, run_command, small_run, witness_environment, write_config
from tests.finetune.train.test_tune import losses_of
from tests.support.ports import held_port

pytestmark = pytest.mark.slow

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "finetune")


def torchrun(*words: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*TORCHRUN, *map(str, words)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def test_torchrun_trains_as_the_command_alone_does(text_folder: Path, tmp_path: Path) -> None:
    tree = small_run(text_folder, tmp_path / "own", schedule={"steps": 4, "warmup": 1}, offload={"optimizer": "cpu"})
    own = write_config({**tree, "run": {**tree["run"], "ranks": 2}}, tmp_path / "own.yaml")
    done = run_command("tune", own)
    assert done.returncode == 0, done.stderr
    # As many ranks as the launcher started, whatever the file says.
    done = torchrun("tune", write_config(tree, tmp_path / "run.yaml"), "--run.output", tmp_path / "theirs")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("2 ranks on cpu") == 1, "rank 0 alone speaks"
    assert losses_of(tmp_path / "theirs") == losses_of(tmp_path / "own")


def test_ranks_that_slurm_started_train_together(text_folder: Path, tmp_path: Path) -> None:
    environment, seen = witness_environment(tmp_path)
    tree = small_run(text_folder, tmp_path / "run", schedule={"steps": 2, "warmup": 1}, eval={"every": 0})
    config = write_config(tree, tmp_path / "run.yaml")
    with held_port() as port, contextlib.ExitStack() as stack:
        shared = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        tasks = []
        for n in range(2):
            task = subprocess.Popen(
                [sys.executable, "-m", "finetune", "tune", str(config)],
                cwd=ROOT,
                env={**environment, **shared, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(task.kill)
            tasks.append(task)
        told = [task.communicate(timeout=400) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], told
    assert "2 ranks on cpu" in told[0][0]
    assert told[1][0] == "", "rank 0 alone speaks"
    assert sorted(losses_of(tmp_path / "run")) == [1, 2]
    assert seen() == ["ended", "ended"], "no rank takes the interpreter down under threads of Gloo"


def test_a_fault_ends_every_rank_and_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": broken}\n')
    tree = small_run(tmp_path, tmp_path / "run", data={"train": str(tmp_path / "data.jsonl")})
    done = torchrun("tune", write_config(tree, tmp_path / "run.yaml"))
    assert done.returncode != 0
    assert done.stderr.count("data.jsonl, line 1") == 1
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_one_process_is_not_taken_for_a_rank() -> None:
    assert not started_by_launcher({"RANK": "0"})
    assert not started_by_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}), "a plain job of Slurm"
    assert started_by_launcher({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"})


def test_slurm_names_are_understood() -> None:
    environment = {
        "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_ADDR": "h", "MASTER_PORT": "1",
    }  # fmt: skip
    assert started_by_launcher(environment)
    assert [environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")] == ["3", "1", "4", "2"]


def test_ranks_of_other_nodes_are_met_on_the_network_that_leads_there() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET:
                expected = None if one.address.startswith("127.") else name
                assert interface_towards(one.address) == expected
    assert interface_towards("localhost") is None


@contextlib.contextmanager
def as_only_rank(config: Path) -> Iterator[subprocess.Popen[str]]:
    """The command as a launcher with one rank starts it; what still runs at the end is killed."""
    with held_port() as port:
        launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**os.environ, **launched, "GLOO_SOCKET_IFNAME": "lo"}
        words = [sys.executable, "-m", "finetune", "tune", str(config)]
        with subprocess.Popen(
            words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as task:
            try:
                yield task
            finally:
                task.kill()


def test_what_cannot_be_written_is_told_in_a_line(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / "config.yaml").mkdir(parents=True)
    with as_only_rank(write_config(small_run(text_folder, tmp_path / "run"), tmp_path / "run.yaml")) as task:
        _, stderr = task.communicate(timeout=400)
    assert task.returncode == 2
    assert "error: rank 0: run.output: " in stderr
    assert "config.yaml" in stderr
    assert "Traceback" not in stderr


def test_a_stop_before_the_first_step_ends_the_preparation(text_folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    # Written before the data are prepared, it is more than the pipe takes: rank 0 waits there until it is read.
    os.mkfifo(output / "config.yaml")
    tree = small_run(text_folder, output, log={"sample_prompts": ["long " * 4000]})
    with open(os.open(output / "config.yaml", os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
        with as_only_rank(write_config(tree, tmp_path / "run.yaml")) as task:
            assert select.select([reader], [], [], 400.0)[0], "it came nowhere near the preparation"
            task.terminate()
            os.set_blocking(reader.fileno(), True)
            reader.readall()
            _, stderr = task.communicate(timeout=400)
    assert task.returncode == 1
    assert "stopped by SIGTERM before training began" in stderr
    assert not list(output.glob("checkpoints/step-*"))


def test_a_missing_hostfile_is_named(text_folder: Path, tmp_path: Path) -> None:
    config = write_config(small_run(text_folder, tmp_path / "run"), tmp_path / "run.yaml")
    done = run_command("tune", config, "--hostfile", tmp_path / "hosts")
    assert done.returncode == 2
    assert "hosts is no file" in done.stderr
