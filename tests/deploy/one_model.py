"""A model that launchers start on several nodes, and what one process says of it."""

from __future__ import annotations

import secrets
import subprocess
from pathlib import Path
from typing import Any, Final

import grpc

from serve.v1 import inference_pb2, inference_pb2_grpc
from tests.support.models import save
from tests.support.server import serving

TOKENS: Final = 400
MOST_SECONDS: Final = 300.0


def model_and_key(folder: Path) -> Path:
    """The folder, with the model and the key of server and agents in it."""
    (folder / "key").write_text(secrets.token_hex(32))
    save("gpt_neox", folder / "model")
    return folder


def said_by_one(folder: Path) -> list[int]:
    """What one process says."""
    with serving(folder / "model") as alone:
        return ids_of(stream(alone.address))


def stream(address: str) -> Any:
    request = inference_pb2.GenerateRequest(token_ids={"ids": [5, 6, 7]})
    request.stopping.max_new_tokens, request.stopping.ignore_eos, request.sampling.temperature = TOKENS, True, 0.0
    stub: Any = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(address))  # type: ignore[no-untyped-call]
    return stub.GenerateStream(request, timeout=MOST_SECONDS)


def ids_of(events: Any) -> list[int]:
    return [token for event in events for token in event.delta.token_ids]


def address_of(launcher: subprocess.Popen[str]) -> str:
    """Where the server that it has started answers."""
    assert launcher.stdout is not None
    line = next(line for line in launcher.stdout if "tessera ready " in line)
    return next(word.removeprefix("grpc=") for word in line.split() if word.startswith("grpc="))
