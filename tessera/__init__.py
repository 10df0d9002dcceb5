"""The Python client of Tessera under a name of its own.

    from tessera import Client

    with Client("127.0.0.1:50051") as client:
        print(client.generate("def read_config(path):", max_new_tokens=64).text)

Everything of ``serve.client`` is here, and is imported when it is first asked for. It needs gRPC and protobuf alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve.client import (
        AsyncClient as AsyncClient,
    )
    from serve.client import (
        AsyncEventStream as AsyncEventStream,
    )
    from serve.client import (
        AsyncPool as AsyncPool,
    )
    from serve.client import (
        BadLine as BadLine,
    )
    from serve.client import (
        BatchEvent as BatchEvent,
    )
    from serve.client import (
        ChatMessage as ChatMessage,
    )
    from serve.client import (
        Client as Client,
    )
    from serve.client import (
        Completion as Completion,
    )
    from serve.client import (
        Connecting as Connecting,
    )
    from serve.client import (
        Delta as Delta,
    )
    from serve.client import (
        Event as Event,
    )
    from serve.client import (
        EventStream as EventStream,
    )
    from serve.client import (
        FieldViolation as FieldViolation,
    )
    from serve.client import (
        FileReport as FileReport,
    )
    from serve.client import (
        Finish as Finish,
    )
    from serve.client import (
        Generated as Generated,
    )
    from serve.client import (
        Load as Load,
    )
    from serve.client import (
        MadeBy as MadeBy,
    )
    from serve.client import (
        Model as Model,
    )
    from serve.client import (
        Options as Options,
    )
    from serve.client import (
        Prompt as Prompt,
    )
    from serve.client import (
        PromptInfo as PromptInfo,
    )
    from serve.client import (
        Rendered as Rendered,
    )
    from serve.client import (
        Request as Request,
    )
    from serve.client import (
        RequestLimits as RequestLimits,
    )
    from serve.client import (
        Score as Score,
    )
    from serve.client import (
        ScoreItem as ScoreItem,
    )
    from serve.client import (
        TesseraError as TesseraError,
    )
    from serve.client import (
        Timings as Timings,
    )
    from serve.client import (
        Tls as Tls,
    )
    from serve.client import (
        TokenLogprob as TokenLogprob,
    )
    from serve.client import (
        Usage as Usage,
    )
    from serve.client import (
        generate_file as generate_file,
    )

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


def __getattr__(name: str) -> Any:
    """A name of the client.

    Raises:
        ImportError: another package of the name ``serve`` is found in place of Tessera's.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tessera import neighbours

    if others := neighbours.found_in_place("serve"):
        raise ImportError(" ".join(others))
    from serve import client

    return getattr(client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
