"""The systems under measurement, each behind one call: decode a batch of prompts greedily, ids in, nothing out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol

import grpc
import torch
from transformers import ContinuousBatchingConfig

from benchmarks.pretrained import Generates, greedy, read_model
from serve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig
from serve.engine.engine import Engine
from serve.engine.limits import EngineLimits
from serve.engine.text import TextDelta
from serve.types import Generation, RequestId, ResponseOptions, SamplingParams, StoppingParams
from serve.v1 import inference_pb2, inference_pb2_grpc
from serve.worker.executor import RankExecutor

Prompts = Sequence[Sequence[int]]
Dtype = Literal["float32", "bfloat16", "float16"]
Device = Literal["cpu", "cuda"]
ROOT = Path(__file__).resolve().parents[1]


class System(Protocol):
    """One way to generate."""

    name: str

    def generate(self, prompts: Prompts, tokens: int) -> None:
        """Generate exactly ``tokens`` tokens after each prompt, all prompts submitted at once."""
        ...

    def close(self) -> None: ...


_ROOM: Final = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)
"""Blocks and budget as it would choose them with room for these sequences, so that it never has to evict."""


class TransformersGenerate:
    """``model.generate`` on one padded batch (the prompts here are of one length, so nothing is padded)."""

    name = "transformers generate"

    def __init__(self, model: Generates) -> None:
        self._model = model

    @torch.inference_mode()
    def generate(self, prompts: Prompts, tokens: int) -> None:
        """See ``System``."""
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self._model.device)
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert isinstance(out, torch.Tensor)
        assert out.shape[1] == ids.shape[1] + tokens

    def close(self) -> None:
        """Nothing to end."""


class TransformersContinuousBatching:
    """``model.generate_batch``: transformers' own paged engine."""

    name = "transformers continuous batching"

    def __init__(self, model: Generates, batching: ContinuousBatchingConfig | None = _ROOM) -> None:
        """``batching``: how many blocks there are, and tokens in a step; ``None`` lets it choose by what is free."""
        self._model = model
        self._batching = batching

    @torch.no_grad()  # it updates its buffers from a thread of its own, outside inference mode
    def generate(self, prompts: Prompts, tokens: int) -> None:
        """See ``System``."""
        answers = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=greedy(tokens),
            continuous_batching_config=self._batching,
            progress_bar=False,
        )
        lengths = [len(answer.generated_tokens) for answer in answers.values()]
        assert lengths == [tokens] * len(prompts), f"continuous batching gave {lengths}"

    def close(self) -> None:
        """Nothing to end."""


class _NoText:
    """A text stream that writes nothing: ids are what is measured."""

    def push(self, token_id: int) -> TextDelta:
        return TextDelta("", None)

    def finish(self) -> str:
        return ""


def server_config(path: Path, dtype: Dtype, device: Device, ranks: int = 1) -> ServerConfig:
    """The configuration that engine and server are measured with."""
    return ServerConfig(
        model=ModelConfig(path=str(path), dtype=dtype, device=device, tensor_parallel_size=ranks),
        cache=CacheConfig(kv_cache_gib=1.0, prefix_caching=False),
        scheduler=SchedulerConfig(max_step_tokens=2048),
    )


class TesseraEngine:
    """The engine driven directly: scheduler, rank process, sampler; no gRPC."""

    name = "tessera engine"

    def __init__(self, path: Path, dtype: Dtype, device: Device, ranks: int = 1) -> None:
        import time

        config = server_config(path, dtype, device, ranks)
        self._executor = RankExecutor(config)
        facts = self._executor.start()
        limits = EngineLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_step_tokens=config.scheduler.max_step_tokens,
            max_queued_requests=1024,
            max_queued_tokens=10**6,
            prefix_caching=False,
            async_scheduling=config.scheduler.async_scheduling,
        )
        self._engine = Engine(
            facts=facts, limits=limits, executor=self._executor, open_text=lambda *_: _NoText(), clock=time.monotonic
        )
        self._count = 0

    def generate(self, prompts: Prompts, tokens: int) -> None:
        """See ``System``."""
        for prompt in prompts:
            self._count += 1
            self._engine.add(
                Generation(
                    request_id=RequestId(str(self._count)),
                    prompt_ids=tuple(prompt),
                    sampling=SamplingParams(),
                    stopping=StoppingParams(max_new_tokens=tokens, ignore_eos=True),
                    response=ResponseOptions(text=False),
                )
            )
        before = self._engine.stats().generation_tokens
        while self._engine.has_work:
            self._engine.step()
        assert self._engine.stats().generation_tokens - before == tokens * len(prompts)

    def close(self) -> None:
        """End the ranks."""
        self._executor.close()


class TesseraServer:
    """The whole server in its own process, streamed over gRPC by one asyncio client, a light one: it shares the cores."""

    name = "tessera over gRPC"

    def __init__(self, path: Path, dtype: str, device: str, *options: str, program: tuple[str, ...] = ("serve",)) -> None:
        command = [
            sys.executable,
            "-m",
            *program,
            "--model",
            str(path),
            "--dtype",
            dtype,
            "--device",
            device,
            "--port",
            "0",
            "--metrics-port",
            "0",
            "--kv-cache-gib",
            "1.0",
            "--max-step-tokens",
            "2048",
            "--no-prefix-caching",
            *options,
        ]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=os.environ
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("tessera ready "), f"the server did not start: {line!r}"
        address = next(word.removeprefix("grpc=") for word in line.split() if word.startswith("grpc="))
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._connect(address))

    def generate(self, prompts: Prompts, tokens: int, sampling: inference_pb2.Sampling | None = None) -> None:
        """See ``System``; greedy unless told otherwise."""
        each = self._stream_all(prompts, tokens, sampling or inference_pb2.Sampling(temperature=0.0))
        assert self._loop.run_until_complete(each) == [tokens] * len(prompts)

    async def _connect(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def _stream_all(self, prompts: Prompts, tokens: int, sampling: inference_pb2.Sampling) -> list[int]:
        return await asyncio.gather(*(self._stream(prompt, tokens, sampling) for prompt in prompts))

    async def _stream(self, prompt: Sequence[int], tokens: int, sampling: inference_pb2.Sampling) -> int:
        """Tokens that came."""
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(prompt)
        request.sampling.CopyFrom(sampling)
        request.stopping.max_new_tokens = tokens
        request.stopping.ignore_eos = True
        return sum([len(event.delta.token_ids) async for event in self._stub.GenerateStream(request)])

    def close(self) -> None:
        """Stop the server."""
        self._loop.run_until_complete(self._channel.close(None))
        self._loop.close()
        self._process.terminate()
        self._process.wait(timeout=60)
        if self._process.stdout is not None:
            self._process.stdout.close()


@contextlib.contextmanager
def transformers_model(path: Path, dtype: Dtype, device: Device) -> Iterator[Generates]:
    """The peers' model, freed afterwards so that systems do not share memory or cores."""
    model = read_model(path, dtype, device)
    yield model
    del model
