"""A process that takes calls and ends none: it says SERVING, begins streams, prints each call, and can be killed under them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc

from serve.v1 import inference_pb2
from tests.repo.documents import REPOSITORY

HELD: Final = "held"
"""What it calls every request whose stream it begins."""
MOST_CALLS: Final = 64
SERVING: Final = b"\x08\x01"
"""Of grpc.health.v1."""


class HeldServer:
    """What such a process is to a test."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.address = address
        self._process = process

    async def next_call(self) -> str:
        """The method of the next call whose request has come whole."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode().strip()

    async def kill(self) -> None:
        """As the kernel does it: nothing is closed and nobody is told."""
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()


@contextlib.asynccontextmanager
async def holding() -> AsyncIterator[HeldServer]:
    """One that runs within."""
    words = (sys.executable, "-m", "tests.deploy.holding")
    process = await asyncio.create_subprocess_exec(*words, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        port = (await process.stdout.readline()).decode().strip()
        yield HeldServer(process, f"127.0.0.1:{port}")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class _Handlers(grpc.GenericRpcHandler):
    """Answers health, begins streams, and leaves it at that."""

    def service(self, details: Any) -> Any:
        method = Path(details.method).name
        if method == "Check":
            return grpc.unary_unary_rpc_method_handler(lambda request, context: SERVING)

        def hold(request: bytes, context: Any) -> bytes:
            print(method, flush=True)
            threading.Event().wait()
            return b""

        def begin(request: bytes, context: Any) -> Iterator[bytes]:
            yield inference_pb2.GenerateEvent(request_id=HELD, prompt={}).SerializeToString()
            yield hold(request, context)

        if method == "GenerateStream":
            return grpc.unary_stream_rpc_method_handler(begin)
        return grpc.unary_unary_rpc_method_handler(hold)


def main() -> None:
    """Print the port, then a line for each call, until somebody ends it."""
    server = grpc.server(ThreadPoolExecutor(MOST_CALLS), handlers=[_Handlers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
