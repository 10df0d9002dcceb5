"""What reads bytes of others, with good inputs to begin from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import CheckpointError, open_checkpoint
from serve.config import AdmissionConfig, ServerConfig
from serve.engine.plan import Sampled, Span, Start, StepPlan, StepResult
from serve.errors import ConfigError
from serve.options import build_config, to_yaml
from serve.rpc.bounds import request_bounds
from serve.rpc.decoding import Malformed, Reader, Unread
from serve.rpc.tokens import read_tokens
from serve.types import BlockId, SamplingParams, SequenceId
from serve.v1 import inference_pb2
from serve.worker import wire
from tests.checkpoint.folders import some_tensors, write_config, written


@dataclass(frozen=True, slots=True)
class Target:
    """A reader."""

    seeds: list[bytes]
    read: Callable[[bytes], str]
    """Reads; ``read`` or ``refused``. Raises where it should not."""


def requests(folder: Path) -> Target:
    """Messages on the gRPC port, small ones and large."""
    reader = Reader(inference_pb2.GenerateRequest, request_bounds(AdmissionConfig()))
    whole = inference_pb2.GenerateRequest(text="Once upon a time", request_id="x", sampling={"top_k": 3, "temperature": 0.5})
    ids = inference_pb2.GenerateRequest(
        token_ids={"ids": range(300)}, stopping={"max_new_tokens": 3, "stop_strings": ["a", "b"]}
    )
    chat = inference_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "Hello"}] * 3})

    def read(data: bytes) -> str:
        message = reader.decode(data)
        if isinstance(message, Unread):
            message = reader._read_large(message.take())
        return "refused" if isinstance(message, Malformed) else "read"

    return Target([message.SerializeToString() for message in (whole, ids, chat)], read)


def plans(folder: Path) -> Target:
    """What ranks and server tell one another."""
    start = Start(sequence=SequenceId(0), index=0, token_ids=(3, 4, 5), num_prompt_tokens=3, sampling=SamplingParams())
    span = Span(sequence=SequenceId(0), start=0, count=3, new_blocks=(BlockId(0),), sample=True)
    plan = wire.encode(StepPlan(step=7, starts=(start,), spans=(span,)))
    result = wire.encode(StepResult(step=7, sampled=(Sampled(sequence=SequenceId(0), token_id=9),)))

    def read(data: bytes) -> str:
        ends = []
        for decode in (wire.decode_plan, wire.decode_result, wire.decode_report, wire.decode_order):
            try:
                decode(data)
            except wire.Malformed:
                ends.append("refused")
            else:
                ends.append("read")
        return "read" if "read" in ends else "refused"

    return Target([plan, result], read)


def _by_file(file: Path, seeds: list[bytes], read: Callable[[Path], object], refusals: Iterable[type[Exception]]) -> Target:
    def one(data: bytes) -> str:
        file.write_bytes(data)
        try:
            read(file)
        except tuple(refusals):
            return "refused"
        return "read"

    return Target(seeds, one)


def configuration(folder: Path) -> Target:
    """The server's YAML."""
    seeds = [to_yaml(_config()).encode(), b"model:\n  path: /m\nrpc:\n  port: 1\n"]
    return _by_file(folder / "config.yaml", seeds, lambda file: build_config(str(file), {}), (ConfigError,))


def _config() -> ServerConfig:
    return build_config(None, {"model.path": ("/m", "--model")})


def tokens(folder: Path) -> Target:
    """The file of tokens."""
    entry = b'{"name": "a", "sha256": "%s", "scopes": ["generate"], "max_running": 2, "expires": "2030-01-01T00:00:00Z"}' % (
        b"0" * 64
    )
    seeds = [b'{"version": 1, "tokens": [' + entry + b"]}", b'{"version": 1, "tokens": []}']
    return _by_file(folder / "tokens.json", seeds, read_tokens, (ConfigError,))


def _checkpoint(folder: Path, name: str) -> Target:
    file = folder / name
    seeds = [file.read_bytes()]

    def read(_: Path) -> None:
        with open_checkpoint(folder) as checkpoint:
            for tensor in list(checkpoint.tensors)[:4]:
                checkpoint.read(tensor)

    return _by_file(file, seeds, read, (CheckpointError,))


def safetensors(folder: Path) -> Target:
    """A shard of Tessera's own, without its manifest, which would tell every change."""
    made = written(folder / "run")
    (made / "manifest.json").unlink()
    shard = sorted(made.glob("*.safetensors"))[0]
    return _checkpoint(made, shard.name)


def settings(folder: Path) -> Target:
    """``config.json`` of a checkpoint."""
    made = written(folder / "run")
    (made / "manifest.json").unlink()
    return _checkpoint(made, "config.json")


def pickles(folder: Path) -> Target:
    """A checkpoint that torch pickled."""
    torch.save(some_tensors(), write_config(folder) / "pytorch_model.bin")
    return _checkpoint(folder, "pytorch_model.bin")


TARGETS: dict[str, Callable[[Path], Target]] = {
    "requests": requests, "plans": plans, "configuration": configuration, "tokens": tokens,
    "safetensors": safetensors, "settings": settings, "pickles": pickles,
}  # fmt: skip
