"""The asyncio client: several prompts at once, each line printed when its stream has an event.

python -m examples.stream_async "import os" "class Queue:" --address 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from serve.client import AsyncClient, Delta, Finish, TesseraError


async def show(client: AsyncClient, number: int, prompt: str, max_new_tokens: int) -> None:
    """Print one stream. The same seed gives the same tokens, whatever else the server computes beside them."""
    async for event in client.stream(prompt, max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.95, seed=number):
        match event:
            case Delta():
                print(f"[{number}] {event.text!r}")
            case Finish():
                print(f"[{number}] {event.reason} after {event.usage.completion_tokens} tokens, seed {event.seed}")


async def stream_all(address: str, prompts: list[str], max_new_tokens: int) -> None:
    """Stream all prompts over one connection. The first that fails ends the others, and cancels them on the server."""
    async with AsyncClient(address) as client, asyncio.TaskGroup() as streams:
        for number, prompt in enumerate(prompts):
            streams.create_task(show(client, number, prompt, max_new_tokens))


def main() -> int:
    parser = argparse.ArgumentParser(description="Stream several completions at once.")
    parser.add_argument("prompts", nargs="*", default=["def read_config(path):", "class Queue:"])
    parser.add_argument("--address", default="127.0.0.1:50051", help="host:port or unix:/path of tessera-serve")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    arguments = parser.parse_args()
    try:
        asyncio.run(stream_all(arguments.address, arguments.prompts, arguments.max_new_tokens))
    except* TesseraError as failed:
        print(f"stream_async: {failed.exceptions[0]}", file=sys.stderr)
        sys.exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
