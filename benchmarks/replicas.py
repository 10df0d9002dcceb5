"""Three servers of one model behind HAProxy, and by gRPC's own policy: ``python -m benchmarks.replicas``.

What each way does with the same calls: how evenly they are spread, how much of the prompts the prefix caches had beside one
server alone, how long the slowest took; and what becomes of calls when one server is killed, drained, or overloaded by others.
The model is tiny, and all servers share this machine's cores: times are compared with one another alone.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import datetime
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from serve.client import AsyncClient, TesseraError
from serve.client.connection import Policy

ROOT: Final = Path(__file__).resolve().parents[1]
REPLICAS: Final = 3
CALLERS: Final = 24
PREFIXES: Final = 24
"""Beginnings that calls share, each of ``PREFIX_TOKENS``."""
PREFIX_TOKENS: Final = 192
OWN_TOKENS: Final = 8
NEW_TOKENS: Final = 16
FLOOD: Final = 32
"""Streams that overload one server, past whoever balances."""
FLOOD_TOKENS: Final = 64
START_SECONDS: Final = 300.0
WARM_SECONDS: Final = 4.0
"""gRPC's policy lets two seconds pass before it weighs."""
WAYS: Final = {"HAProxy": "calls with x-tessera-affinity", "client": "weighted_round_robin by load reports"}


class Replica:
    """One server, on ports that it keeps through its lives."""

    def __init__(self, model: Path, ports: tuple[int, int]) -> None:
        self.address = f"127.0.0.1:{ports[0]}"
        self._metrics = f"http://127.0.0.1:{ports[1]}/metrics"
        words = ["--model", str(model), "--device", "cpu", "--port", str(ports[0]), "--metrics-port", str(ports[1])]
        words += ["--max-num-seqs", "16", "--kv-cache-gib", "0.25", "--drain-least-seconds", "2"]
        self._command = [sys.executable, "-m", "serve", *words]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life."""
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "DS_ACCELERATOR": "cpu"},
        )

    async def until_serving(self) -> None:
        """Wait for its health."""
        async with AsyncClient(self.address, options=(("grpc.use_local_subchannel_pool", 1),)) as client:
            await client.wait_until_serving(START_SECONDS)

    def kill(self) -> None:
        """End it at once."""
        assert self.process is not None
        self.process.kill()

    def drain(self) -> None:
        """Ask it to end."""
        assert self.process is not None
        self.process.terminate()

    async def ended(self) -> int:
        """Its exit code."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait)

    def figures(self) -> dict[str, float]:
        """Calls answered, and tokens looked up and found in the prefix cache, in this life."""
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self._metrics, timeout=60) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        found = dict.fromkeys(("calls", "looked up", "found"), 0.0)
        names = {"tessera_prefix_cache_queries_total": "looked up", "tessera_prefix_cache_hits_total": "found"}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name in names:
                found[names[sample.name]] += sample.value
            elif (
                sample.name == "tessera_requests_total"
                and sample.labels["method"] == "Generate"
                and sample.labels["code"] == "OK"
            ):
                found["calls"] += sample.value
        return found


@dataclasses.dataclass
class Told:
    """What became of the calls of one turn."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    """Of unary calls."""
    lost: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Calls that failed although nothing of an answer had come, by how."""
    cut: int = 0
    """Streams that had begun: nobody can ask for the rest again but the caller."""
    answered: int = 0

    def figures(self) -> dict[str, object]:
        """As they are kept."""
        ranks = statistics.quantiles(self.seconds, n=100)
        took = {"p50": round(ranks[49], 3), "p99": round(ranks[98], 3)}
        return {"calls": self.answered, "lost": dict(self.lost), "begun streams cut": self.cut, "seconds": took}


class Callers:
    """Callers who make one call after another, a quarter of them streams if wanted, and what became of them."""

    def __init__(self, address: str, policy: Policy, seed: str) -> None:
        draw = random.Random(seed)
        self._prefixes, self._others = (
            [[draw.randrange(1, 200) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)] for _ in range(2)
        )
        self._draw = draw
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000))
        self._client = AsyncClient(
            address, timeout=300, retries=12, retry_when_full=True, policy=policy, affinity=True, options=options
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def warm_up(self) -> None:
        """Until the policy weighs, with prompts that begin otherwise: no cache has seen the others."""
        self._prefixes, self._others = self._others, self._prefixes
        until = time.monotonic() + WARM_SECONDS
        while time.monotonic() < until:
            await self.make(CALLERS)
        self._prefixes, self._others = self._others, self._prefixes

    async def make(self, count: int, *, streams: bool = False, strike: Callable[[], None] = lambda: None) -> Told:
        """Make so many calls; ``strike`` comes once a quarter of them was answered."""
        told, numbers, struck = Told(), iter(range(count)), False

        async def caller() -> None:
            nonlocal struck
            for number in numbers:
                await self._one(told, as_stream=streams and number % 4 == 0)
                if not struck and told.answered >= count / 4:
                    struck = True
                    strike()

        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return told

    async def _one(self, told: Told, *, as_stream: bool) -> None:
        own = [self._draw.randrange(1, 200) for _ in range(OWN_TOKENS)]
        prompt = self._draw.choice(self._prefixes) + own
        began, heard = time.perf_counter(), False
        try:
            if as_stream:
                async for _ in self._client.stream(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True):
                    heard = True
            else:
                await self._client.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True)
                told.seconds.append(time.perf_counter() - began)
            told.answered += 1
        except TesseraError as error:
            if heard:
                told.cut += 1
            else:
                told.lost[error.code] += 1


@contextlib.asynccontextmanager
async def flood(replica: Replica) -> AsyncIterator[None]:
    """Within, one server has more streams than it can run, from somebody who does not balance."""
    async with AsyncClient(replica.address, retries=0, options=(("grpc.use_local_subchannel_pool", 1),)) as client:

        async def stream() -> None:
            while True:
                prompt = [random.randrange(1, 200) for _ in range(100)]
                with contextlib.suppress(TesseraError):
                    async for _ in client.stream(prompt, max_new_tokens=FLOOD_TOKENS, ignore_eos=True):
                        pass

        streams = [asyncio.ensure_future(stream()) for _ in range(FLOOD)]
        try:
            yield
        finally:
            for each in streams:
                each.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


@contextlib.contextmanager
def haproxy(replicas: Sequence[Replica], folder: Path) -> Iterator[str]:
    """Our configuration with these servers' addresses."""
    front, metrics = free_ports(2)
    text = (ROOT / "deploy/haproxy/haproxy.cfg").read_text()
    for number, replica in enumerate(replicas, 1):
        text = text.replace(f"10.0.0.{number}:50051", replica.address)
    text = text.replace("127.0.0.1:50050", f"127.0.0.1:{front}").replace("127.0.0.1:8405", f"127.0.0.1:{metrics}")
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")], stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{front}"
    finally:
        process.terminate()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody has now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


async def even(callers: Callers, replicas: Sequence[Replica], count: int) -> dict[str, object]:
    """Calls with nothing amiss: spread, prefix hits, times."""
    before = [replica.figures() for replica in replicas]
    told = await callers.make(count)
    grown = [
        {name: now - then[name] for name, now in replica.figures().items()}
        for replica, then in zip(replicas, before, strict=True)
    ]
    calls = [growth["calls"] for growth in grown]
    mean = sum(calls) / len(calls)
    return {
        **told.figures(),
        "calls of each": calls,
        "farthest from even": round(max(abs(each - mean) for each in calls) / mean, 3),
        "prefix hits": round(sum(growth["found"] for growth in grown) / sum(growth["looked up"] for growth in grown), 4),
    }


async def struck(callers: Callers, replicas: Sequence[Replica], count: int) -> dict[str, object]:
    """One server killed, then another drained, then the third overloaded; each is whole again before the next."""
    said: dict[str, object] = {}
    for name, victim in (("killed", replicas[0]), ("drained", replicas[1])):
        told = await callers.make(count, streams=True, strike=victim.kill if name == "killed" else victim.drain)
        said[name] = {**told.figures(), "its exit code": await victim.ended()}
        victim.start()
        await victim.until_serving()
        await callers.make(2 * CALLERS)
    before = [replica.figures()["calls"] for replica in replicas]
    async with flood(replicas[2]):
        told = await callers.make(count)
    grown = [replica.figures()["calls"] - then for replica, then in zip(replicas, before, strict=True)]
    said["overloaded"] = {
        **told.figures(),
        "calls of each, the last overloaded": grown,
    }
    return said


async def measure(model: Path, folder: Path, count: int) -> dict[str, dict[str, Any]]:
    """All ways in one run, with one server alone as what they are compared with."""
    ports = free_ports(2 * REPLICAS)
    replicas = [Replica(model, (ports[2 * number], ports[2 * number + 1])) for number in range(REPLICAS)]
    said: dict[str, dict[str, Any]] = {}
    try:
        for replica in replicas:
            replica.start()
        for replica in replicas:
            await replica.until_serving()
        with haproxy(replicas, folder) as front:
            addresses = {
                "one server": replicas[0].address,
                "HAProxy": front,
                "client": "ipv4:" + ",".join(each.address for each in replicas),
            }
            for name, address in addresses.items():
                callers = Callers(address, "weighted_round_robin" if name == "client" else "pick_first", seed=name)
                await callers.warm_up()
                taking = replicas[:1] if name == "one server" else replicas
                result: dict[str, Any] = {"even": await even(callers, taking, count)}
                if name in WAYS:
                    result["how"] = WAYS[name]
                    result["struck"] = await struck(callers, replicas, count // 3)
                said[name] = result
                print(name, json.dumps(result), flush=True)
                await callers.close()
        return said
    finally:
        for replica in replicas:
            if replica.process is not None and replica.process.poll() is None:
                replica.process.kill()
                replica.process.wait()


def main() -> None:
    """Measure, and write the results to a file if one is named."""
    parser = argparse.ArgumentParser(description="Three servers behind HAProxy and by the client's policy, beside one.")
    parser.add_argument("--calls", type=int, default=1920, help="of each way with nothing amiss; a third at each strike")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from benchmarks.serving import machine
    from tests.support.models import save

    with tempfile.TemporaryDirectory() as scratch:
        model = save("gpt_neox", Path(scratch) / "model")
        ways = asyncio.run(measure(model, Path(scratch), options.calls))
    alone = ways["one server"]["even"]["prefix hits"]
    beside = {name: round(ways[name]["even"]["prefix hits"] / alone, 3) for name in WAYS}
    result = {
        "what": "three servers of a tiny model behind HAProxy and by the client's own policy, beside one server, in one run",
        "date": datetime.date.today().isoformat(),
        "machine": machine("cpu"),
        "load": f"{CALLERS} callers; of a prompt {PREFIX_TOKENS} tokens are one of {PREFIXES} beginnings, {OWN_TOKENS} its own",
        "ways": ways,
        "prefix hits beside one server's": beside,
    }
    print(json.dumps(result, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
