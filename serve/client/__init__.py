"""The public Python client.

    from serve.client import Client

    with Client("127.0.0.1:50051") as client:
        client.wait_until_serving(timeout=60)
        print(client.generate("def read_config(path):", max_new_tokens=64).text)
        for event in client.stream("Once upon a time", temperature=0.8):
            if isinstance(event, Delta):
                print(event.text, end="", flush=True)

``AsyncClient`` has the same methods for asyncio; ``AsyncPool`` generates at several servers, ``generate_file`` answers a file
of requests. Everything that can go wrong in a call raises ``TesseraError``.
"""

from serve.client.aio import AsyncClient, AsyncEventStream
from serve.client.connection import Connecting, Tls
from serve.client.errors import FieldViolation, TesseraError
from serve.client.offline import BadLine, FileReport, generate_file
from serve.client.pool import AsyncPool
from serve.client.request import ChatMessage, Options, Prompt, Request, ScoreItem
from serve.client.results import (
    BatchEvent,
    Completion,
    Delta,
    Event,
    Finish,
    Generated,
    Load,
    MadeBy,
    Model,
    PromptInfo,
    Rendered,
    RequestLimits,
    Score,
    Timings,
    TokenLogprob,
    Usage,
)
from serve.client.sync import Client, EventStream

__all__ = [
    "AsyncClient",
    "AsyncEventStream",
    "AsyncPool",
    "BadLine",
    "BatchEvent",
    "ChatMessage",
    "Client",
    "Completion",
    "Connecting",
    "Delta",
    "Event",
    "EventStream",
    "FieldViolation",
    "FileReport",
    "Finish",
    "Generated",
    "Load",
    "MadeBy",
    "Model",
    "Options",
    "Prompt",
    "PromptInfo",
    "Rendered",
    "Request",
    "RequestLimits",
    "Score",
    "ScoreItem",
    "TesseraError",
    "Timings",
    "Tls",
    "TokenLogprob",
    "Usage",
    "generate_file",
]
