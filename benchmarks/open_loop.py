"""Calls that come whether or not those before have ended, from a process of their own: ``python -m benchmarks.open_loop``.

A JSON object with the fields of ``Load`` is read from standard input, one with those of ``Outcome`` written to standard output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import grpc
import grpc.aio

from serve.client.connection import Connection, Tls
from serve.v1 import inference_pb2, inference_pb2_grpc

ROOT: Final = Path(__file__).resolve().parents[1]
CALL_SECONDS: Final = 300.0
_RETRY_INFO: Final = b"google.rpc.RetryInfo"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked of a server."""

    address: str
    seconds: float
    """For how long calls begin."""
    rate: float = 0.0
    """Calls a second, at random moments (Poisson); 0: ``streams`` callers make one call after another instead."""
    streams: int = 0
    apart_seconds: float = 0.0
    """The callers begin at random moments within so many seconds; if at once, all their calls begin and end together."""
    token: str = ""
    ca: str = ""
    """File of an authority: calls go over TLS."""
    prompt_tokens: int = 64
    new_tokens: int = 48
    vocabulary: int = 8000
    seed: int = 0
    warm_seconds: float = 0.0
    """Calls that begin in the first so many seconds count for nothing."""


@dataclass
class Outcome:
    """What became of the calls; times in seconds."""

    codes: dict[str, int] = field(default_factory=dict)
    first_token: list[float] = field(default_factory=list)
    """Of each call that was answered."""
    in_flight: list[int] = field(default_factory=list)
    """How many calls had begun and not ended when each of those began, itself among them."""
    refused: list[float] = field(default_factory=list)
    """From the request to the end, of calls that ended with RESOURCE_EXHAUSTED before anything came."""
    without_retry_info: int = 0
    """Calls that were refused and not told when to come back."""
    tokens_by_second: dict[int, int] = field(default_factory=dict)
    """Tokens that came, of calls that ended well or not, by the second since the beginning."""
    ended_well: dict[int, int] = field(default_factory=dict)
    """Tokens of calls that ended well, by the second of their end."""
    lag: float = 0.0
    """The latest that a call began after its time: where this is large, the figures are the client's."""


class Running:
    """Load that goes on in a process of its own."""

    def __init__(self, load: Load) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.open_loop"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(load)))
        self._process.stdin.close()

    def outcome(self) -> Outcome:
        """Wait until every call has ended."""
        assert self._process.stdout is not None
        said = self._process.stdout.read()
        self._process.stdout.close()
        if self._process.wait() != 0:
            raise RuntimeError("the process that makes the load has failed")
        read = json.loads(said)
        for name in ("tokens_by_second", "ended_well"):
            read[name] = {int(second): count for second, count in read[name].items()}
        return Outcome(**read)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that so much of them do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Count and quantiles in milliseconds."""
    if not values:
        return {"count": 0}
    named = {"median": statistics.median(values), "p95": percentile(values, 0.95), "p99": percentile(values, 0.99)}
    named["most"] = max(values)
    return {"count": len(values), **{name: round(1000 * value, 2) for name, value in named.items()}}


class _Caller:
    def __init__(self, load: Load) -> None:
        tls: Tls | Literal["plain"] = Tls(ca=load.ca, server_name="localhost") if load.ca else "plain"
        self._load = load
        self._connection = Connection.of(load.address, {"credentials": tls, "token": load.token})
        self._draw = random.Random(load.seed)
        self.outcome = Outcome()
        self._codes = Counter[str]()
        self._in_flight = 0

    async def run(self) -> Outcome:
        """Make all calls, and wait for their ends."""
        channel = self._connection.aio_channel()
        self._call = inference_pb2_grpc.InferenceStub(channel).GenerateStream
        async with channel:
            await asyncio.wait_for(channel.channel_ready(), 60)
            self._began = time.monotonic()
            if self._load.rate:
                await self._open()
            else:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._load.streams):
                        group.create_task(self._closed())
        self.outcome.codes = dict(self._codes)
        return self.outcome

    async def _open(self) -> None:
        due = 0.0
        async with asyncio.TaskGroup() as group:
            while due < self._load.seconds:
                now = time.monotonic() - self._began
                if due > now:
                    await asyncio.sleep(due - now)
                self.outcome.lag = max(self.outcome.lag, time.monotonic() - self._began - due)
                group.create_task(self._one())
                due += self._draw.expovariate(self._load.rate)

    async def _closed(self) -> None:
        await asyncio.sleep(self._draw.uniform(0.0, self._load.apart_seconds))
        while time.monotonic() - self._began < self._load.seconds:
            await self._one()

    async def _one(self) -> None:
        request = inference_pb2.GenerateRequest()
        request.token_ids.ids.extend(self._draw.randrange(1, self._load.vocabulary) for _ in range(self._load.prompt_tokens))
        request.stopping.max_new_tokens = self._load.new_tokens
        request.stopping.ignore_eos = True
        request.sampling.temperature = 0.0
        began = time.monotonic()
        self._in_flight += 1
        in_flight = self._in_flight
        counts = began - self._began >= self._load.warm_seconds
        first, tokens, code = None, 0, "OK"
        call = self._call(request, timeout=CALL_SECONDS, metadata=self._connection.metadata)
        try:
            async for event in call:
                if new := len(event.delta.token_ids):
                    first = first or time.monotonic() - began
                    tokens += new
                    second = int(time.monotonic() - self._began)
                    self.outcome.tokens_by_second[second] = self.outcome.tokens_by_second.get(second, 0) + new
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            if counts and code == "RESOURCE_EXHAUSTED" and not tokens:
                self.outcome.refused.append(time.monotonic() - began)
                trailing: Iterable[tuple[str, bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]  # pairs in truth
                told = dict(trailing).get("grpc-status-details-bin", b"")
                self.outcome.without_retry_info += _RETRY_INFO not in told
        else:
            second = int(time.monotonic() - self._began)
            self.outcome.ended_well[second] = self.outcome.ended_well.get(second, 0) + tokens
        self._in_flight -= 1
        if counts:
            self._codes[code] += 1
            if first is not None:
                self.outcome.first_token.append(first)
                self.outcome.in_flight.append(in_flight)


if __name__ == "__main__":
    json.dump(dataclasses.asdict(asyncio.run(_Caller(Load(**json.load(sys.stdin))).run())), sys.stdout)
