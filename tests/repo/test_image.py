"""The Dockerfile's image, built and started: ``make test-image``.

Needs root, buildah and debootstrap, and the package sources of pip and apt; no Docker and no image registry: the base image is
a Debian with its own Python 3.11, under the name that the Dockerfile asks for, in a storage of its own, removed at the end.
What pip is configured to use here, folders included, is used in the image too; PIP_ARGS of the environment goes before it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from serve.v1 import inference_pb2
from tests.repo.documents import REPOSITORY
from tests.support import models, reference
from tests.support.server import Server

TOOLS = ("buildah", "debootstrap", "unshare")
DEBIAN = "bookworm"
"""The release whose Python is the one of the Dockerfile's base image."""
PROMPT = (5, 6, 7, 8)
START_SECONDS = 300.0

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="the image is not tested: building it without Docker needs root"),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"the image is not tested: {', '.join(tool for tool in TOOLS if shutil.which(tool) is None)} missing "
        "(apt-get install buildah debootstrap)",
    ),
]


@dataclass
class Storage:
    """Images and containers of these tests alone."""

    root: Path

    def buildah(self, *words: str | Path) -> str:
        """Run one buildah command; what it prints."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True)
        assert done.returncode == 0, f"buildah {' '.join(map(str, words))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout.strip()

    def command(self, *words: str | Path) -> list[str]:
        return ["buildah", "--root", str(self.root / "store"), "--runroot", str(self.root / "run"), *map(str, words)]


@dataclass
class Pip:
    """How pip is configured here, for a place where it is not."""

    arguments: list[str] = field(default_factory=lambda: os.environ.get("PIP_ARGS", "").split())
    mounts: set[str] = field(default_factory=set)

    def read(self) -> Pip:
        listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
        for option, value in re.findall(r"[.](index-url|extra-index-url|find-links|cert|timeout)='(.*)'", listed.stdout):
            for word in value.split():
                self.arguments += [f"--{option}", word]
                if word.startswith(("/", "file://")):
                    path = Path(word.removeprefix("file://"))
                    # An index's pages point to files beside its folder.
                    self.mounts.add(str(path.parent if option.endswith("index-url") or path.is_file() else path))
        return self


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    made = Storage(Path(tempfile.mkdtemp(prefix="tessera-image-")))
    made.root.chmod(0o755)  # what is mounted from it is read by the image's user
    yield made
    made.buildah("umount", "--all")
    made.buildah("rm", "--all")
    shutil.rmtree(made.root)


@pytest.fixture(scope="module")
def base(storage: Storage) -> str:
    """A Debian under the name of the Dockerfile's base image."""
    name = re.search(r"^FROM (\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert name is not None
    root = storage.root / "debian"
    packages = "python3,python3-pip,python3-dev,ca-certificates"
    command = ["debootstrap", "--variant=minbase", f"--include={packages}", DEBIAN, str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"debootstrap failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    (python,) = (root / "usr/lib").glob("python3.*")
    assert name[1] == f"{python.name.replace('python3', 'python:3')}-slim", f"Debian {DEBIAN} has another Python than {name[1]}"
    # python.org's image has the one Python, and pip may write to it.
    (root / "usr/bin/python").symlink_to("python3")
    (python / "EXTERNALLY-MANAGED").unlink()
    container = storage.buildah("from", "scratch")
    storage.buildah("add", "-q", container, root, "/")
    full = f"docker.io/library/{name[1]}"
    storage.buildah("commit", "-q", "--rm", container, full)
    shutil.rmtree(root)
    return full


@pytest.fixture(scope="module")
def image(storage: Storage, base: str) -> dict[str, Any]:
    """The built image's configuration, as ``buildah inspect`` gives it."""
    pip = Pip().read()
    volumes = [word for mount in sorted(pip.mounts) for word in ("--volume", f"{mount}:{mount}:ro")]
    arguments = ["--build-arg", f"PIP_ARGS={' '.join(pip.arguments)}"]
    storage.buildah("bud", "--isolation", "chroot", "--pull-never", "-t", "tessera", *volumes, *arguments, REPOSITORY)
    return dict(json.loads(storage.buildah("inspect", "--type", "image", "tessera"))["OCIv1"]["config"])


@pytest.fixture(scope="module")
def container(storage: Storage, image: dict[str, Any]) -> str:
    return storage.buildah("from", "--pull-never", "tessera")


@pytest.fixture(scope="module")
def model(storage: Storage) -> Path:
    folder = models.save("gpt_neox", storage.root / "model")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    """A server behind a command that starts it elsewhere; the command must end with 0."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    log: list[str] = []
    reader = threading.Thread(target=log.extend, args=(process.stderr,), daemon=True)
    reader.start()
    watchdog = threading.Timer(START_SECONDS, kill, (process,))
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line.startswith("tessera ready "), f"no ready line but {line!r}; its log:\n{''.join(log)}"
        server = Server(process, dict(word.split("=", 1) for word in line.split()[2:]), log)
        yield server
        server.channel.close()
        inside(process).send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, f"the server ended badly; its log:\n{''.join(log)}"
    finally:
        watchdog.cancel()
        kill(process)
        process.wait()
        reader.join()
        process.stdout.close()
        process.stderr.close()


def inside(process: subprocess.Popen[str]) -> psutil.Process:
    """The server itself, which is what was started or stands behind it."""
    started = psutil.Process(process.pid)
    everything = (started, *started.children(recursive=True))
    return next(one for one in everything if "python" in (words := one.cmdline())[0] and words[1].endswith("/tessera-serve"))


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for child in (*psutil.Process(process.pid).children(recursive=True), process):
            child.kill()


def generated(server: Server, count: int) -> list[int]:
    request = inference_pb2.GenerateRequest(
        token_ids={"ids": PROMPT}, stopping={"max_new_tokens": count, "ignore_eos": True}, sampling={"temperature": 0.0}
    )
    return list(server.inference.Generate(request, timeout=240).completions[0].token_ids)


LOOPBACK = ("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0")


def test_the_image_serves_on_two_ranks(storage: Storage, container: str, image: dict[str, Any], model: Path) -> None:
    words = [*image["Entrypoint"], "--model", "/model", "--tensor-parallel-size", "2", *LOOPBACK]
    run = storage.command("run", "--isolation", "chroot", "--volume", f"{model}:/model:ro", container, "--", *words)
    with serving(run) as server:
        assert inside(server.process).uids().real == 10001, "not as root"
        assert generated(server, 24) == reference.greedy(reference.load(model), PROMPT, 24)
        assert any('attention="kernel"' in name for name in server.metrics()), server.log


def test_the_image_serves_on_a_read_only_root(storage: Storage, container: str, model: Path) -> None:
    """As Kubernetes does with readOnlyRootFilesystem: /tmp and the folder for kernels can be written, nothing else."""
    root = storage.buildah("mount", container)
    steps = [
        f"mount --bind {root} {root} && cd {root} && mkdir -p model && mount --bind {model} model",
        "mount -t tmpfs -o mode=1777 none tmp && mkdir tmp/kernels && chown 10001 tmp/kernels",
        f"mount --rbind /dev dev && mount -t proc none proc && mount -o remount,bind,ro {root}",
        "exec chroot --userspec=10001:10001 --groups= . env -i PATH=/usr/local/bin:/usr/bin:/bin $0 "
        f"tessera-serve --model /model {' '.join(LOOPBACK)}",
    ]
    script = " && ".join(steps)
    for setting, back_end in (("TESSERA_CACHE_DIR=/tmp/kernels", "kernel"), ("HOME=/nowhere", "torch")):
        with serving(["unshare", "--mount", "sh", "-c", script, setting]) as server:
            assert generated(server, 8) == reference.greedy(reference.load(model), PROMPT, 8)
            assert any(f'attention="{back_end}"' in name for name in server.metrics()), server.log
        warnings = [line for line in server.log if "TESSERA_CACHE_DIR" in line]
        assert len(warnings) == (back_end == "torch"), server.log


def test_the_default_command_is_one_that_the_server_understands(
    storage: Storage, container: str, image: dict[str, Any]
) -> None:
    words = [*image["Entrypoint"], *image["Cmd"], "--print-config"]
    assert "path: /model" in storage.buildah("run", "--isolation", "chroot", container, "--", *words)


def test_the_image_can_train(storage: Storage, container: str) -> None:
    doctor = storage.buildah("run", "--isolation", "chroot", container, "--", "tessera-finetune", "doctor")
    assert "c++ compiler" in doctor
