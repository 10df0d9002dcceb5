"""``tessera-serve`` as users run it, asked over gRPC by one light client in this process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc

from benchmarks.engines.systems.answering import answer
from serve.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[3]


class Tessera:
    """A server of its own on a free port of loopback, and a channel to it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {"tessera": version("tessera"), "grpcio": grpc.__version__, "torch": version("torch")}
        command = [
            sys.executable, "-m", "serve", "--model", settings["model"], "--device", "cpu", "--port", "0",
            "--metrics-port", "0", *settings["options"],
        ]  # fmt: skip
        self._streamed = bool(settings["streamed"])
        self._server = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=ROOT)
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line.startswith("tessera ready "):
            raise RuntimeError(f"the server did not start: {line!r}")
        address = next(word.removeprefix("grpc=") for word in line.split() if word.startswith("grpc="))
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect(address))

    async def _connect(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float = 0.0) -> list[list[int]]:
        """See ``Engine``; its cache has the type of the model unless it is told otherwise."""
        return self._loop.run_until_complete(self._all(prompts, tokens, every))

    async def _all(self, prompts: list[list[int]], tokens: int, every: float) -> list[list[int]]:
        return await asyncio.gather(*(self._one(prompt, tokens, place * every) for place, prompt in enumerate(prompts)))

    async def _one(self, prompt: list[int], tokens: int, delay: float) -> list[int]:
        """Ids of one call, made after some seconds. Text is left out, as the peers make none."""
        await asyncio.sleep(delay)
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(prompt)
        request.sampling.temperature = 0.0
        request.stopping.max_new_tokens = tokens
        request.stopping.ignore_eos = True
        request.response.text = False
        if not self._streamed:
            return list((await self._stub.Generate(request)).completions[0].token_ids)
        ids: list[int] = []
        async for event in self._stub.GenerateStream(request):
            ids.extend(event.delta.token_ids)
        return ids

    def close(self) -> None:
        """Stop the server."""
        self._loop.run_until_complete(self._channel.close(None))
        self._loop.close()
        self._server.terminate()
        self._server.wait(timeout=60)


if __name__ == "__main__":
    answer(Tessera)
