"""A file of requests answered through Ray Data: workers, on one machine or many, each with connections to all servers.

    python -m examples.ray_batch in.jsonl out.jsonl --address a:50051,b:50051 --workers 2

Files are those of ``tessera-generate --batch``, and like there a run goes on where one was ended: either program can finish
what the other began. Needs Ray (``pip install 'ray[data]'``). Without ``--ray`` one is started here, for this run alone, on
loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from serve.client import AsyncPool, BadLine, Generated, Options, TesseraError
from serve.client.offline.answers import Answers, told
from serve.client.offline.lines import Line, check_lines, parse_line, read_lines

# Read when Ray is imported. Ray takes this machine for a node among others and opens ports on all its addresses, but on the
# systems that this variable is named for: 0 has it treat this one likewise and listen on loopback. It also reports on itself.
LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class Answerer:
    """A worker: answers some lines at a time."""

    def __init__(self, addresses: list[str]) -> None:
        self._loop = asyncio.Runner()
        self._pool = self._loop.run(self._connect(addresses))

    async def _connect(self, addresses: list[str]) -> AsyncPool:
        return AsyncPool(addresses)  # which belongs to the loop that it is made on

    def __call__(self, rows: dict[str, Any]) -> dict[str, list[str]]:
        """The answers to a batch of rows, as texts of JSON; Ray's tables would want all of one shape."""
        lines = [parse_line(0, text.encode(), Options()) for text in rows["text"]]
        return {"told": [json.dumps(told(outcome)) for outcome in self._loop.run(self._answer(lines))]}

    async def _answer(self, lines: list[Line]) -> list[Generated | TesseraError]:
        return await asyncio.gather(*map(self._one, lines))

    async def _one(self, line: Line) -> Generated | TesseraError:
        try:
            return await self._pool.generate(line.request.prompt, **line.request.options)
        except TesseraError as error:
            return error


def answer_file(source: Path, target: Path, addresses: list[str], *, workers: int, at_once: int) -> int:
    """Answer what is not answered yet; returns how many answers are errors.

    Args:
        at_once: lines that a worker has in flight.
    """
    import ray.data

    check_lines(source, Options())
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    with Answers(target) as answers:
        num_before, num_failed = answers.resume(read_lines(source, Options()))
        left = list(read_lines(source, Options()))[num_before:]
        if not left:
            return num_failed
        texts = source.read_text(encoding="utf-8").split("\n")[num_before : num_before + len(left)]
        rows = ray.data.from_items([{"text": text} for text in texts], override_num_blocks=workers)
        outcomes = rows.map_batches(
            Answerer,
            fn_constructor_args=(addresses,),
            compute=ray.data.ActorPoolStrategy(size=workers),
            batch_size=at_once,
            num_cpus=0.1,  # a worker waits for servers and computes nothing
        )
        for line, row in zip(left, outcomes.iter_rows(), strict=True):
            outcome = json.loads(row["told"])
            num_failed += "error" in outcome
            answers.write(line, outcome)
        answers.sync()
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description="Answer a file of requests through Ray Data.")
    parser.add_argument("source", type=Path, help="requests, one JSON object a line")
    parser.add_argument("target", type=Path, help="answers, in the same order")
    parser.add_argument("--address", default="127.0.0.1:50051", help="servers, separated by commas")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=32, help="lines that each worker has in flight")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster that runs already, such as auto")
    arguments = parser.parse_args()
    os.environ.update({} if arguments.ray else LOCAL)
    try:
        import ray
    except ModuleNotFoundError as error:
        print(f"ray_batch: {error.name!r} is not installed; pip install 'ray[data]' brings it", file=sys.stderr)
        return 1
    if arguments.ray:
        ray.init(arguments.ray, log_to_driver=False)
    else:
        ray.init(num_cpus=arguments.workers, include_dashboard=False, log_to_driver=False)
    try:
        num_failed = answer_file(
            arguments.source,
            arguments.target,
            arguments.address.split(","),
            workers=arguments.workers,
            at_once=arguments.at_once,
        )
    except BadLine as error:
        print(f"ray_batch: {error}", file=sys.stderr)
        return 2
    finally:
        ray.shutdown()
    if num_failed:
        print(f"ray_batch: {num_failed} lines have an error instead of an answer", file=sys.stderr)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
