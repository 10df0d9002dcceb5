"""A server with TLS and tokens on one rank and a small model, for the benchmarks of what keeps callers apart."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import grpc
import psutil
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import NameOID
from transformers import AutoConfig

from finetune.machine.inventory import cpu_description
from finetune.model.pretrained import new_model

ROOT: Final = Path(__file__).resolve().parents[1]
VOCABULARY: Final = 8192


def make_model(folder: Path, *, hidden: int = 192, layers: int = 12, vocabulary: int = VOCABULARY) -> Path:
    """Save a small GPT-NeoX with random seeded weights, whose steps take some milliseconds on one core.

    It is deep and narrow, so that a step of many sequences takes hardly longer than one of a few, as on a GPU.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_neox", hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden, vocab_size=vocabulary, max_position_embeddings=1024, rotary_pct=0.25,
    )  # fmt: skip
    new_model(config, torch.bfloat16).save_pretrained(folder)
    return folder


def make_certificate(folder: Path, name: str, *, by: str = "", days: int = 30) -> tuple[Path, Path]:
    """A certificate for localhost and its key; replaced, each as a whole, where they are there.

    Args:
        by: the name of who signs; empty: it signs itself, and may sign others.
        days: until it ends; negative for one that has ended.
    """
    secret = ec.generate_private_key(ec.SECP256R1())
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signing, issuer = secret, named
    if by:
        key = load_pem_private_key((folder / f"{by}.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey), "made here, all of one kind"
        signing, issuer = key, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, by)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(issuer)
        .public_key(secret.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=90))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=not by, path_length=None), critical=True)
        .sign(signing, hashes.SHA256())
    )
    return replace(folder / f"{name}.pem", made.public_bytes(Encoding.PEM)), replace(
        folder / f"{name}.key", secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )


def replace(file: Path, content: bytes) -> Path:
    """Write a file whole or not at all."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, file)
    return file


class Server:
    """A running ``tessera-serve``."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, str]) -> None:
        self.process = process
        self.address = ready["grpc"].replace("127.0.0.1", "localhost")
        self._metrics_url = ready["metrics"]

    def metrics(self) -> dict[str, float]:
        """Samples of /metrics, by name and labels as they are written there; of a server without TLS and tokens."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self._metrics_url, timeout=60) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}

    def memory_bytes(self) -> int:
        """Memory that the process which speaks gRPC holds alone: the ranks have their own."""
        return int(psutil.Process(self.process.pid).memory_full_info().uss)


_CORES: Final = os.sched_getaffinity(0)


def _on_one_core() -> None:
    """While it starts, so that the rank takes one thread to compute: a second one would wait for whoever else has the core."""
    os.sched_setaffinity(0, {min(_CORES)})


def _on_cores(cores: set[int], *processes: psutil.Process) -> None:
    for process in processes:
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@contextlib.contextmanager
def serving(model: Path, *options: str, log: Path | None = None, apart: bool = False) -> Iterator[Server]:
    """Start a server on free ports of this machine, and stop it at the end.

    Args:
        log: file for what it says; nothing is kept otherwise.
        apart: the rank has a core of its own; the server, the calling process and what that starts share the others.
    """
    words = ["--model", str(model), "--port", "0", "--metrics-port", "0", "--device", "cpu", "--kv-cache-gib", "0.5", *options]
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w")) if log is not None else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", *words], stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT,
            preexec_fn=_on_one_core,
        )  # fmt: skip
        assert process.stdout is not None
        stack.callback(process.stdout.close)
        try:
            line = process.stdout.readline()
            if not line.startswith("tessera ready "):
                raise RuntimeError(f"the server did not start: {line!r}")
            if apart:
                os.sched_setaffinity(0, _CORES - {min(_CORES)})
                stack.callback(os.sched_setaffinity, 0, _CORES)
                _on_cores(os.sched_getaffinity(0), psutil.Process(process.pid))
            else:
                _on_cores(_CORES, psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True))
            yield Server(process, dict(word.split("=", 1) for word in line.split()[2:]))
        finally:
            process.terminate()
            process.wait(60)


def machine() -> dict[str, str]:
    """What the figures belong to."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return {
        "device": f"{cpu_description()}, {len(os.sched_getaffinity(0))} cores, load at the end {load}",
        "python": platform.python_version(), "torch": torch.__version__, "grpc": grpc.__version__,
    }  # fmt: skip
