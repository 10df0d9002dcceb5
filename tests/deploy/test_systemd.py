"""The unit: what systemd says of it, and a server on two ranks under an emulation of its filters."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from serve.v1 import admin_pb2, inference_pb2
from tests.repo.documents import REPOSITORY
from tests.support import models, reference
from tests.support.sandbox import UNIT
from tests.support.server import Server, until
from tests.support.unit import CACHE, MODEL, confined

TOOLS = {"systemd-analyze": "systemd", "unshare": "util-linux", "setpriv": "util-linux"}
"""Each program and its package."""
MISSING = sorted(package for program, package in TOOLS.items() if shutil.which(program) is None)
MOST_EXPOSED = 3.0
PROMPT = (5, 6, 7, 8)

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"the unit is not tried: apt-get install {' '.join(MISSING)}"),
]


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a program that is there."""
    changed = tmp_path / UNIT.name
    changed.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(), flags=re.MULTILINE))
    return changed


def test_systemd_finds_no_fault_with_the_unit(unit: Path) -> None:
    done = subprocess.run(("systemd-analyze", "verify", unit), capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unit_is_little_exposed(unit: Path) -> None:
    words = ("systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}", "--json=short")
    done = subprocess.run((*words, unit), capture_output=True, text=True)
    left = [line["description"] for line in json.loads(done.stdout) if not line["set"]]
    assert done.returncode == 0, left


class Manager:
    """What systemd is to a service: a socket that hears what it tells."""

    def __init__(self) -> None:
        self.name = f"tessera-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.heard: list[tuple[str, ...]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{self.name}")
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while message := self._socket.recv(4096):
            self.heard.append(tuple(message.decode().splitlines()))

    def has_heard(self, line: str) -> bool:
        return any(line in message for message in self.heard)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", f"\0{self.name}")
        self._reader.join()
        self._socket.close()


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    yield made
    made.close()


@contextmanager
def started(manager: Manager, model: Path) -> Iterator[Server]:
    words = ["-m", "serve", "--model", MODEL, "--tensor-parallel-size", "2", "--port", "0", "--metrics-port", "0"]
    environment = {"PATH": "/usr/bin:/bin", "TESSERA_CACHE_DIR": CACHE, "HOME": CACHE, "TESSERA_KV_CACHE_GIB": "0.05"}
    environment |= {"NOTIFY_SOCKET": f"@{manager.name}", "WATCHDOG_USEC": "200000"}
    process = subprocess.Popen(
        [*confined(model), sys.executable, *words], cwd=REPOSITORY, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    try:
        line = process.stdout.readline()
        if not line.startswith("tessera ready "):
            process.wait(60)
            reader.join(10)
            pytest.fail(f"no ready line but {line!r}; its log:\n{''.join(log)}")
        server = Server(process, dict(word.split("=", 1) for word in line.split()[2:]), log)
        yield server
        server.channel.close()
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="the unit's filters are not tried: giving up rights needs root")
def test_two_ranks_start_stream_drain_and_end_well_under_the_filters_of_the_unit(manager: Manager, tmp_path: Path) -> None:
    model = models.save("gpt_neox", tmp_path / "model")
    request = inference_pb2.GenerateRequest(
        token_ids={"ids": PROMPT}, stopping={"max_new_tokens": 24, "ignore_eos": True}, sampling={"temperature": 0.0}
    )
    with started(manager, model) as server:
        until(lambda: manager.has_heard("READY=1"), 60)
        assert manager.has_heard("EXTEND_TIMEOUT_USEC=30000000"), "while it loads it asks for more time"
        until(lambda: manager.has_heard("WATCHDOG=1"), 60)
        (answer,) = server.inference.Generate(request, timeout=240).completions
        assert list(answer.token_ids) == reference.greedy(reference.load(model), PROMPT, 24)
        assert any('attention="kernel"' in name for name in server.metrics()), "kernels are compiled under the filters, too"
        ranks = server.rank_pids()
        assert len(ranks) == 2
        for pid in (server.process.pid, *ranks):
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            assert (status["CapEff"], status["NoNewPrivs"], status["Seccomp"]) == ("0" * 16, "1", "2")
        for pid in ranks:
            assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()
        assert server.admin.Reload(admin_pb2.ReloadRequest(), timeout=240), "which reads the checkpoint beside the steps"
        (answer,) = server.inference.Generate(request, timeout=240).completions
        assert len(answer.token_ids) == 24
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0, server.log
    assert manager.has_heard("STOPPING=1")
    assert "Operation not permitted" not in "".join(server.log), "".join(server.log)
