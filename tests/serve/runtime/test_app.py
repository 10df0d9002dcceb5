"""The server as a process: its one line, its ports, its signals, its exit codes."""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import save_file

from checkpoint import CheckpointWriter
from serve import app
from serve.app import DESCRIPTORS, ready_line
from serve.errors import ConfigError
from serve.runtime.opening import with_checkpoint_folder
from serve.v1 import inference_pb2, inference_pb2_grpc
from tests.serve.runtime.ranks import FACTS, expected_ids, options

PATIENCE_SECONDS = 120


@dataclass
class Process:
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    lines: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    def ready_line(self) -> dict[str, str]:
        """The words ``name=value`` of the start-up line."""
        line = self.lines.get(timeout=PATIENCE_SECONDS)
        assert line.startswith("tessera ready "), line
        return dict(word.split("=", 1) for word in line.split()[2:])

    def until_log(self, text: str) -> None:
        """Wait until standard error has a line with ``text``."""
        assert self.process.stderr is not None
        assert any(text in line for line in iter(self.process.stderr.readline, "")), f"the log never said {text!r}"

    def end(self) -> tuple[int, str]:
        """(exit code, the rest of standard error)."""
        assert self.process.stderr is not None
        log = self.process.stderr.read()
        return self.process.wait(PATIENCE_SECONDS), log


@contextlib.contextmanager
def serving(mode: str, folder: Path, *arguments: str) -> Iterator[Process]:
    (folder / "config.json").write_text('{"model_type": "gpt_neox"}', encoding="utf-8")
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    command = [sys.executable, "-m", "tests.serve.runtime.fake_server", mode, "--model", str(folder), "--port", "0"]
    with subprocess.Popen(
        [*command, "--metrics-port", "0", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        made = Process(process)
        reader = threading.Thread(target=_read_lines, args=(made,), daemon=True)
        reader.start()
        try:
            yield made
        finally:
            process.kill()
            process.wait(PATIENCE_SECONDS)
            reader.join()


def _read_lines(made: Process) -> None:
    assert made.process.stdout is not None
    for line in made.process.stdout:
        made.lines.put(line)


def ask(tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids={"ids": [5, 6, 7]},
        stopping={"max_new_tokens": tokens, "ignore_eos": True},
        response={"token_ids": True},
    )


def ids_in(events: list[inference_pb2.GenerateEvent]) -> tuple[int, ...]:
    return tuple(id_ for event in events for id_ in event.delta.token_ids)


def test_a_server_says_where_it_is_and_drains_on_sigterm(tmp_path: Path) -> None:
    with serving("slow", tmp_path, "--tensor-parallel-size", "2", "--model-name", "tiny") as server:
        ready = server.ready_line()
        assert (ready["model"], ready["tp"], ready["dtype"], ready["kv_blocks"]) == ("tiny", "2", "float32", "2000")
        with urllib.request.urlopen(ready["metrics"], timeout=PATIENCE_SECONDS) as response:
            assert 'tessera_engine_up{model_name="tiny"} 1.0' in response.read().decode()
        with grpc.insecure_channel(ready["grpc"]) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.GenerateStream(ask(tokens=40))
            events = [next(call), next(call)]
            server.process.send_signal(signal.SIGTERM)
            server.until_log("draining")
            with pytest.raises(grpc.RpcError) as refused:
                stub.Generate(ask(tokens=1))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            events += list(call)
            assert ids_in(events) == expected_ids((5, 6, 7), 40), "the call in flight was lost"
        code, log = server.end()
        assert code == 0, log
        assert server.lines.empty(), "there is one line on standard output"


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    with serving("slow", tmp_path) as server:
        with grpc.insecure_channel(server.ready_line()["grpc"]) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(ask(tokens=9_000))
            next(call)
            server.process.send_signal(signal.SIGINT)
            server.until_log("draining")
            server.process.send_signal(signal.SIGINT)
            with pytest.raises(grpc.RpcError) as ended:
                list(call)
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        code, log = server.end()
        assert code == 0, log


def test_a_signal_while_the_model_loads_ends_with_0(tmp_path: Path) -> None:
    with serving("loading", tmp_path, "--log-level", "debug") as server:
        server.until_log("loading the model")
        server.process.send_signal(signal.SIGTERM)
        code, log = server.end()
        assert code == 0, log
        assert server.lines.empty(), "it was never ready"


def test_a_server_that_cannot_go_on_ends_with_1(tmp_path: Path) -> None:
    with serving("dying", tmp_path, "--max-restarts-in-a-row", "0") as server:
        with grpc.insecure_channel(server.ready_line()["grpc"]) as channel, pytest.raises(grpc.RpcError) as ended:
            inference_pb2_grpc.InferenceStub(channel).Generate(ask(tokens=4))
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        code, log = server.end()
        assert code == 1
        assert log.splitlines()[-1] == (
            "tessera-serve: the engine failed after 0 restarts without a completed step, "
            "the limit of supervisor.max_restarts_in_a_row; at last: rank 0 died: signal SIGKILL"
        )


def test_the_server_may_have_as_many_descriptors_as_the_system_allows(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with serving("slow", tmp_path) as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (256, hard))
        server.ready_line()
        assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)[0] == min(DESCRIPTORS, hard)


def test_a_port_that_is_taken_ends_with_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for flag in ("--port", "--metrics-port"):
            with serving("slow", tmp_path, flag, port) as server:
                code, log = server.end()
                assert code == 2
                assert "Traceback" not in log
                assert log.splitlines()[-1].startswith(f"tessera-serve: rpc.{flag[2:].replace('-', '_')}: ")


def test_a_folder_that_is_not_there_ends_with_2(tmp_path: Path) -> None:
    with serving("slow", tmp_path, "--model", str(tmp_path / "nothing")) as server:
        code, log = server.end()
        assert code == 2
        assert log.splitlines() == [f"tessera-serve: model.path is {str(tmp_path / 'nothing')!r}; it must exist"]


def written(root: Path, step: int) -> Path:
    with CheckpointWriter(root, step=step, config={"model_type": "gpt_neox"}) as writer:
        writer.add("w", torch.zeros(2))
    return root / f"step-{step:08d}"


def test_the_checkpoint_that_is_newest_at_the_start_is_served_for_good(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first = written(root, 1)
    config = with_checkpoint_folder(options(model={"path": str(root)}))
    assert config.model.path == str(first)
    assert config.model.served_name == "run", "clients see the name they were told"
    written(root, 2)
    assert with_checkpoint_folder(config) == config


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/runs/mine", "mine"),
        ("/runs/mine/checkpoints", "mine"),
        ("/runs/mine/checkpoints/", "mine"),
        ("/runs/mine/checkpoints/step-00000320", "mine"),
        ("/runs/mine/step-00000320", "mine"),
        ("/checkpoints", "checkpoints"),
        ("/models/gpt2-checkpoints", "gpt2-checkpoints"),
    ],
)
def test_a_model_is_served_under_the_name_of_its_run(path: str, name: str) -> None:
    assert options(model={"path": path}).model.served_name == name


def test_a_path_from_where_the_server_starts_has_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "mine" / "checkpoints"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert options(model={"path": "."}).model.served_name == "mine"
    monkeypatch.chdir(inside.parent)
    assert options(model={"path": "checkpoints"}).model.served_name == "mine"
    assert options(model={"path": "checkpoints", "name": "checkpoints"}).model.served_name == "checkpoints"


def test_the_ready_line_has_the_step_beside_the_name() -> None:
    config = options(model={"path": "/runs/mine/checkpoints/step-00000320"})
    line = ready_line(config, dataclasses.replace(FACTS, checkpoint_step=320), "127.0.0.1:1", "http://127.0.0.1:2/metrics")
    assert " model=mine " in line
    assert line.endswith(" step=320")
    assert "step=" not in ready_line(config, dataclasses.replace(FACTS, checkpoint_step=None), "a", "b")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty, which is no checkpoint of a known layout"):
        with_checkpoint_folder(options(model={"path": str(tmp_path)}))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="it must be a folder"):
        with_checkpoint_folder(options(model={"path": str(tmp_path / "file")}))


def test_connections_that_no_descriptors_are_left_for_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    app._warn_of_few_descriptors(options(rpc={"max_connections": 1}))
    assert not caplog.records
    app._warn_of_few_descriptors(options(rpc={"max_connections": 1_000_000}))
    assert limit == resource.RLIM_INFINITY or limit > 1_000_256 or "rpc.max_connections is 1000000" in caplog.text
