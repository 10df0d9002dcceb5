"""The Dockerfile's images, built and started: ``make test-image``.

Needs root, buildah, debootstrap and runc, and the package sources of pip and apt; no Docker and no image registry: the base is
a Debian with its own Python 3.11, under the name that the Dockerfile asks for, in a storage of its own, removed at the end.
What pip is configured to use here, folders included, is used in the image too; PIP_ARGS of the environment goes before it.
TESSERA_IMAGE_STORE names a folder that keeps images and their layers for the next time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
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

TOOLS = ("buildah", "debootstrap", "runc")
DEBIAN = "bookworm"
"""The release whose Python is the one of the Dockerfile's base image."""
PROMPT = (5, 6, 7, 8)
START_SECONDS = 300.0
MOST_BYTES = 2_200_000_000

pytestmark = [
    pytest.mark.image,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="the image is not tested: building it without Docker needs root"),
    pytest.mark.skipif(
        any(shutil.which(tool) is None for tool in TOOLS),
        reason=f"the image is not tested: {', '.join(tool for tool in TOOLS if shutil.which(tool) is None)} missing "
        "(apt-get install buildah debootstrap runc)",
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
    kept = os.environ.get("TESSERA_IMAGE_STORE")
    made = Storage(Path(kept or tempfile.mkdtemp(prefix="tessera-image-")))
    made.root.mkdir(exist_ok=True)
    made.root.chmod(0o755)  # what is mounted from it is read by the image's user
    yield made
    made.buildah("umount", "--all")
    made.buildah("rm", "--all")
    subprocess.run(["umount", made.root / "store/overlay"], capture_output=True)  # where the driver has bound it to itself
    if not kept:
        shutil.rmtree(made.root)


@pytest.fixture(scope="module")
def base(storage: Storage) -> str:
    """A Debian under the name of the Dockerfile's base image."""
    name = re.search(r"^ARG BASE=docker.io/library/(\S+)$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE)
    assert name is not None
    full = f"docker.io/library/{name[1]}"
    if full in storage.buildah("images", "--format", "{{.Name}}:{{.Tag}}").split():
        return full
    root = storage.root / "debian"
    packages = "python3,python3-pip,python3-venv,python3-dev,ca-certificates"
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
    storage.buildah("commit", "-q", "--rm", container, full)
    shutil.rmtree(root)
    return full


def build(storage: Storage, target: str) -> dict[str, Any]:
    """Build one target; its configuration, as ``buildah inspect`` gives it."""
    pip = Pip().read()
    volumes = [word for mount in sorted(pip.mounts) for word in ("--volume", f"{mount}:{mount}:ro")]
    arguments = ["--build-arg", f"PIP_ARGS={' '.join(pip.arguments)}", "--build-arg", "CPU_INDEX="]
    options = ["--isolation", "chroot", "--pull-never", "--layers", "--format", "docker", "--target", target]
    storage.buildah("bud", *options, "-t", f"tessera:{target}", *volumes, *arguments, REPOSITORY)
    return dict(json.loads(storage.buildah("inspect", "--type", "image", f"tessera:{target}"))["Docker"]["config"])


@pytest.fixture(scope="module")
def image(storage: Storage, base: str) -> dict[str, Any]:
    """The configuration of the image that serves on the CPU."""
    return build(storage, "cpu")


@pytest.fixture(scope="module")
def container(storage: Storage, image: dict[str, Any]) -> str:
    return storage.buildah("from", "--pull-never", "tessera:cpu")


@pytest.fixture(scope="module")
def root(storage: Storage, container: str) -> Path:
    """The image's files."""
    return Path(storage.buildah("mount", container))


@pytest.fixture(scope="module")
def model(storage: Storage) -> Path:
    folder = models.save("gpt_neox", storage.root / "model")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


def kill(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        for child in (*psutil.Process(process.pid).children(recursive=True), process):
            child.kill()


@dataclass
class Bundle:
    """What runc starts: the image's files, only to be read, as the image's user, without a right and without a home."""

    folder: Path
    name: str

    @classmethod
    def of(cls, storage: Storage, root: Path, image: dict[str, Any], model: Path, words: Sequence[str]) -> Bundle:
        made = cls(Path(tempfile.mkdtemp(dir=storage.root)), f"tessera-{os.getpid()}-{secrets.token_hex(4)}")
        made.runc("spec", "--bundle", made.folder)
        spec = json.loads((made.folder / "config.json").read_text())
        user = [int(number) for number in image["User"].split(":")]
        spec["process"] |= {
            "terminal": False, "args": [*image["Entrypoint"], *words], "env": image["Env"], "cwd": "/",
            "user": {"uid": user[0], "gid": user[1]}, "noNewPrivileges": True, "rlimits": [],
            "capabilities": {kind: [] for kind in ("bounding", "effective", "permitted", "ambient")},
        }  # fmt: skip
        spec["root"] = {"path": str(root), "readonly": True}
        memory = next(mount for mount in spec["mounts"] if mount["destination"] == "/dev/shm")
        memory["options"] = ["nosuid", "noexec", "nodev", "mode=1777", "size=1g"]
        spec["mounts"].append({"destination": "/model", "type": "bind", "source": str(model), "options": ["rbind", "ro"]})
        # The test asks on this machine's loopback.
        spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] not in ("network", "cgroup")]
        (made.folder / "config.json").write_text(json.dumps(spec))
        return made

    def runc(self, *words: str | Path, code: int = 0) -> str:
        done = subprocess.run(["runc", *map(str, words)], capture_output=True, text=True)
        assert done.returncode == code, f"runc {words}: {done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self) -> Iterator[Server]:
        """A server in the container; whoever uses it ends it."""
        process = subprocess.Popen(
            ["runc", "run", "--bundle", str(self.folder), self.name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
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
        finally:
            watchdog.cancel()
            kill(process)
            process.wait()
            reader.join()
            subprocess.run(["runc", "delete", "--force", self.name], capture_output=True)
            process.stdout.close()
            process.stderr.close()


def request(count: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids={"ids": PROMPT}, stopping={"max_new_tokens": count, "ignore_eos": True}, sampling={"temperature": 0.0}
    )


LOOPBACK = ("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_image_starts_read_only_streams_drains_and_ends_well(
    storage: Storage, root: Path, image: dict[str, Any], model: Path, ranks: int
) -> None:
    words = ("--model", "/model", "--tensor-parallel-size", str(ranks), "--kv-cache-gib", "0.05", *LOOPBACK)
    bundle = Bundle.of(storage, root, image, model, words)
    expected = reference.greedy(reference.load(model), PROMPT, 24)
    with bundle.serving() as server:
        address = ("--address", server.address)
        assert bundle.runc("exec", bundle.name, *image["Healthcheck"]["Test"][1:], *address) == "SERVING\n"
        events = server.inference.GenerateStream(request(24), timeout=240)
        first = next(events)
        bundle.runc("kill", bundle.name, "TERM")  # with a stream in flight
        tokens = [token for event in (first, *events) for token in event.delta.token_ids]
        assert tokens == expected
        assert server.process.wait(60) == 0, server.log
    log = "".join(server.log)
    assert "attention=kernel linear=kernel kernels=x86-64-v" in log, log
    assert "building the CPU kernels" not in log
    assert not [line for line in server.log if "WARN" in line and "real_accelerator" not in line], log


def test_the_image_has_no_compiler_and_is_not_large(root: Path) -> None:
    found = [path.name for place in ("usr/bin", "usr/local/bin", "opt/tessera/bin") for path in (root / place).glob("*")]
    assert not {"cc", "c++", "gcc", "g++", "clang", "ld"} & set(found)
    files = [path.lstat() for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    size = sum({(one.st_dev, one.st_ino): one.st_size for one in files}.values())
    print(f"image: {size / 1e9:.2f} GB")
    assert size <= MOST_BYTES


def test_the_image_lists_its_parts_and_tells_how_it_is(root: Path, image: dict[str, Any]) -> None:
    parts = json.loads((root / "opt/tessera/sbom.cdx.json").read_text())
    assert parts["bomFormat"] == "CycloneDX"
    assert {"tessera", "torch", "grpcio", "deepspeed"} <= {part["name"] for part in parts["components"]}
    assert "libc6" in (root / "usr/share/sbom/debian.txt").read_text()
    assert image["Healthcheck"]["Test"] == ["CMD", "tessera-health"]
    assert image["User"] == "10001:10001"
    assert not any(line.startswith("HOME=") for line in image["Env"])


def test_the_default_command_is_one_that_the_server_understands(
    storage: Storage, container: str, image: dict[str, Any]
) -> None:
    words = [*image["Entrypoint"], *image["Cmd"], "--print-config"]
    assert "path: /model" in storage.buildah("run", "--isolation", "chroot", container, "--", *words)


def test_the_image_for_training_can_train(storage: Storage, image: dict[str, Any]) -> None:
    build(storage, "train")
    container = storage.buildah("from", "--pull-never", "tessera:train")
    doctor = storage.buildah("run", "--isolation", "chroot", container, "--", "tessera-finetune", "doctor")
    assert "c++ compiler" in doctor


COMPILES = """
from triton.runtime.build import compile_module_from_src
from serve.model.cuda.device import lack_of_triton
source = '''
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", "", -1, methods};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
'''
print([lack_of_triton(), compile_module_from_src(source, "probe").answer()])
"""
"""As Triton compiles what launches its kernels, which no GPU is needed for."""


def test_in_the_image_for_cuda_triton_compiles_and_runs_what_it_compiled(storage: Storage, base: str, model: Path) -> None:
    """Read-only, as the user that it has, with a folder in memory at /tmp as Kubernetes has one.

    Where pip's index has torch for CPUs alone, the image comes without Triton, and gets this environment's.
    """
    image = build(storage, "cuda")
    container = storage.buildah("from", "--pull-never", "tessera:cuda")
    root = Path(storage.buildah("mount", container))
    bundle = Bundle.of(storage, root, image, model, ())
    spec = json.loads((bundle.folder / "config.json").read_text())
    if not list(root.glob("opt/tessera/lib/python3.*/site-packages/triton")):
        assert list(root.glob(f"opt/tessera/lib/python{sys.version_info[0]}.{sys.version_info[1]}")), "another Python's Triton"
        (own,) = importlib.util.find_spec("triton").submodule_search_locations or ()  # type: ignore[union-attr]  # it is installed
        spec["mounts"].append({"destination": "/own/triton", "type": "bind", "source": own, "options": ["rbind", "ro"]})
        spec["process"]["env"] = [*image["Env"], "PYTHONPATH=/own"]
    spec["process"]["args"] = ["python", "-c", COMPILES]
    spec["mounts"].append(
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
    )
    (bundle.folder / "config.json").write_text(json.dumps(spec))
    assert bundle.runc("run", "--bundle", bundle.folder, bundle.name).strip() == "['', 42]"
    spec["mounts"].pop()
    (bundle.folder / "config.json").write_text(json.dumps(spec))
    told = bundle.runc("run", "--bundle", bundle.folder, f"{bundle.name}-without", code=1)
    assert told == "", "without it nothing is compiled"
