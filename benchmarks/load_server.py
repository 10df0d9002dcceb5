"""A Tessera server over one folder, in processes of its own: seconds to its first token, and the memory of its ranks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from serve.v1 import inference_pb2, inference_pb2_grpc
from serve.worker.rank_loop import RANK_NAME

ROOT = Path(__file__).resolve().parents[1]
KV_CACHE_GIB = 0.05
"""Of all ranks together: what a few hundred tokens need."""
PROMPT = tuple(range(8))


@dataclass(frozen=True, slots=True)
class Served:
    """A server that has given its first token."""

    grpc: str
    metrics: str
    seconds: dict[str, float]
    """``total`` from the start of the process to the first token, and its parts as the server tells them."""
    process: int
    """That which speaks gRPC."""
    ranks: tuple[int, ...]
    """The processes of those that it began with."""


@contextmanager
def serving(folder: Path, ranks: int, dtype: str, options: Sequence[str] = ()) -> Iterator[Served]:
    """Serve ``folder``, ask for one token, and end the server."""
    words = ["--model", str(folder), "--tensor-parallel-size", str(ranks), "--dtype", dtype, "--device", "cpu"]
    words += [
        "--verify",
        "structure",
        "--log-level",
        "warning",
        "--port",
        "0",
        "--metrics-port",
        "0",
        "--kv-cache-gib",
        str(KV_CACHE_GIB),
        *options,
    ]
    # Others' modules are compiled where they are installed; so are ours, by the first start.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "serve", *words], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("tessera ready "), f"the server did not start: {line!r}"
            said = dict(word.split("=", 1) for word in line.split() if "=" in word)
            ready = time.perf_counter()
            with grpc.insecure_channel(said["grpc"]) as channel:
                request = inference_pb2.GenerateRequest()
                request.token_ids.ids.extend(PROMPT)
                request.stopping.max_new_tokens = 1
                inference_pb2_grpc.InferenceStub(channel).Generate(request)
            done = time.perf_counter()
            seconds = load_seconds(said["metrics"]) | {"first token": done - ready, "total": done - began}
            yield Served(said["grpc"], said["metrics"], seconds, process.pid, ranks_of(process.pid))
        finally:
            process.terminate()
            process.wait(timeout=60)


def load_seconds(metrics: str) -> dict[str, float]:
    """Seconds of each phase of the load, of rank 0: ``import``, ``build``, ``weights``, ``cache``."""
    with urllib.request.urlopen(metrics) as answer:
        text = answer.read().decode()
    found = re.findall(r'^tessera_model_load_seconds\{[^}]*\bphase="(\w+)"[^}]*\} (\S+)', text, re.MULTILINE)
    return {phase: float(value) for phase, value in found}


def ranks_of(server: int) -> tuple[int, ...]:
    """Processes of the ranks, by the children of the server's threads."""
    children, ranks = set[int](), set[int]()
    for task in Path(f"/proc/{server}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            children.update(map(int, (task / "children").read_text().split()))
    for pid in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # or a process
            if Path(f"/proc/{pid}/comm").read_text().startswith(RANK_NAME):
                ranks.add(pid)
    return tuple(sorted(ranks))


def peak_bytes(pid: int) -> int:
    """Peak of the resident memory of a process."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def wait_until_unmapped(pid: int, folder: Path) -> None:
    """Return when a process has mapped no file below a folder: its weights are packed."""
    while str(folder) in Path(f"/proc/{pid}/maps").read_text():
        time.sleep(0.05)


def bytes_read(pid: int) -> int:
    """All that a process has read by system calls."""
    words = Path(f"/proc/{pid}/io").read_text().split()
    return int(words[words.index("rchar:") + 1])


def drop_from_page_cache(folder: Path) -> None:
    """Have the next reader fetch these files from the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def fetch_into_page_cache(folder: Path) -> None:
    """Read all files once."""
    buffer = bytearray(16 << 20)
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(buffer):
                    pass
