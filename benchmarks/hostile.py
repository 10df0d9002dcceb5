"""Thousands of attacks on a server with TLS and tokens; certificates and tokens replaced under load: ``make bench-hostile``.

Attacks are those of ``benchmarks.attacks``. A caller with certificate and token asks for the model every few milliseconds all
the while, and some time before: measured is by how much a call is later than they were before. Who was answered is read in
the server's audit log.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import json
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio
from cryptography import x509

from benchmarks.attacks import Orders
from benchmarks.guarded import ROOT, Server, machine, make_certificate, make_model, replace, serving
from benchmarks.open_loop import spread
from serve.rpc.tokens import add_token
from serve.v1 import inference_pb2, inference_pb2_grpc, models_pb2, models_pb2_grpc

MOST_DELAY_SECONDS: Final = 0.1
MOST_GROWTH_BYTES: Final = 32 << 20
_PACE_SECONDS: Final = 0.005
_CALL_SECONDS: Final = 60.0
_ALONE: Final = (("grpc.use_local_subchannel_pool", 1),)


class Site:
    """The files of a server and of those who call it."""

    def __init__(self, folder: Path, max_streams: int) -> None:
        self.folder = folder
        self.max_streams = max_streams
        make_certificate(folder, "ca")
        for name in ("server", "friend"):
            make_certificate(folder, name, by="ca")
        make_certificate(folder, "expired", by="ca", days=-1)
        make_certificate(folder, "stranger")
        self.tokens = folder / "tokens.json"
        self.audit = folder / "audit.log"
        self.token = self.new_token("good")
        self.bad_tokens = [
            add_token(self.tokens, "scorer", scopes=("score",), expires=None, given={}),
            add_token(self.tokens, "late", scopes=("generate",), expires=datetime.datetime.now(datetime.UTC), given={}),
        ]

    def new_token(self, name: str) -> str:
        return add_token(self.tokens, name, scopes=("generate", "admin"), expires=None, given={})

    def keep_newest_token(self) -> None:
        """Take the older ones of the good caller out of the file."""
        content = json.loads(self.tokens.read_text())
        good = [entry for entry in content["tokens"] if entry["name"] == "good"]
        content["tokens"] = [entry for entry in content["tokens"] if entry["name"] != "good"] + good[-1:]
        replace(self.tokens, json.dumps(content).encode())

    def options(self) -> list[str]:
        files = {"--tls-cert": "server.pem", "--tls-key": "server.key", "--tls-client-ca": "ca.pem"}
        tls = [word for option, file in files.items() for word in (option, str(self.folder / file))]
        config = self.folder / "server.yaml"
        config.write_text(f"rpc:\n  max_streams: {self.max_streams}\n")
        files_of = ("--config", str(config), "--tokens", str(self.tokens), "--audit-log", str(self.audit))
        return [*tls, *files_of, "--max-num-seqs", "16"]

    def credentials(self) -> grpc.ChannelCredentials:
        pem = [(self.folder / name).read_bytes() for name in ("ca.pem", "friend.key", "friend.pem")]
        return grpc.ssl_channel_credentials(*pem)

    def answered(self) -> Counter[str]:
        """How many calls of each tenant were answered, by the server's book."""
        lines = (json.loads(line) for line in self.audit.read_text().splitlines())
        return Counter(line["tenant"] for line in lines if line["code"] == "OK")


class Probe:
    """One call after another, and how long each took."""

    def __init__(self, server: Server, site: Site) -> None:
        self._channel = grpc.secure_channel(server.address, site.credentials(), options=_ALONE)
        self._stub = models_pb2_grpc.ModelsStub(self._channel)
        self._metadata = (("authorization", f"Bearer {site.token}"),)
        self.ok = 0
        self.lost = Counter[str]()

    def during(self, over: threading.Event) -> list[float]:
        """Seconds of each call until it is over."""
        seconds = []
        while not over.is_set():
            began = time.monotonic()
            try:
                self._stub.GetModel(models_pb2.GetModelRequest(), metadata=self._metadata, timeout=_CALL_SECONDS)
            except grpc.RpcError as error:
                self.lost[error.code().name] += 1
            else:
                self.ok += 1
                seconds.append(time.monotonic() - began)
            time.sleep(_PACE_SECONDS)
        return seconds

    def close(self) -> None:
        self._channel.close()


def attack(server: Server, site: Site, count: int, at_once: int, over: threading.Event) -> dict[str, Any]:
    """Have another process attack; what it says at its end."""
    orders = Orders(
        address=server.address, count=count, at_once=at_once, seed=0, folder=str(site.folder), tokens=site.bad_tokens
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.attacks"],
            input=json.dumps(dataclasses.asdict(orders)), capture_output=True, text=True, cwd=ROOT, check=False,
        )  # fmt: skip
    finally:
        over.set()
    if ended.returncode:
        raise RuntimeError(f"the attacks broke off:\n{ended.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(ended.stdout)
    return said


def settled_memory(server: Server, at_most: float, seconds: float = 90.0) -> int:
    """Bytes that the server holds once they are few enough, or after this time: connections linger for a while."""
    deadline = time.monotonic() + seconds
    while (held := server.memory_bytes()) > at_most and time.monotonic() < deadline:
        time.sleep(1)
    return held


def attacked(server: Server, site: Site, count: int, at_once: int) -> dict[str, Any]:
    """The attacks, with the probe before and meanwhile."""
    probe = Probe(server, site)
    over = threading.Event()
    threading.Timer(min(60.0, 5 + count / 100), over.set).start()
    before = probe.during(over)
    memory = server.memory_bytes()
    over = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        attacking = executor.submit(attack, server, site, count, at_once, over)
        meanwhile = probe.during(over)
        said = attacking.result()
    probe.close()
    after = settled_memory(server, memory + MOST_GROWTH_BYTES)
    delay = max(meanwhile) - statistics.median(before)
    answered = site.answered()
    return {
        "attacks": said["made"], "count": count, "inside": said["inside"], "answered, by tenant": dict(answered),
        "calls of the good caller": probe.ok, "lost": dict(probe.lost),
        "ms of a call, before": spread(before), "ms of a call, meanwhile": spread(meanwhile),
        "most delay, ms": round(1000 * delay, 1),
        "most delay before, ms": round(1000 * (max(before) - statistics.median(before)), 1),
        "memory, MiB": {"before": memory >> 20, "after": after >> 20},
        "bars": {
            "nobody in": not said["inside"] and set(answered) == {"good"} and answered["good"] == probe.ok,
            "every call of the good caller answered": not probe.lost,
            "no call later by more than 100 ms": delay <= MOST_DELAY_SECONDS,
            "memory back within 32 MiB": after - memory <= MOST_GROWTH_BYTES,
        },
    }  # fmt: skip


class _Callers:
    """Good callers on new connections and old ones, while what they show is replaced."""

    def __init__(self, server: Server, site: Site) -> None:
        self._server, self._site = server, site
        self.token = site.token
        self.ends = Counter[str]()
        self.over = False
        self.old: dict[int, str] = {}
        """The token of each call under way."""

    async def one(self, channel: grpc.aio.Channel, caller: int, tokens: int) -> str:
        """A call that generates so many tokens; its code."""
        self.old[caller] = token = self.token
        request = inference_pb2.GenerateRequest(token_ids={"ids": [1, 2, 3]})
        request.stopping.max_new_tokens = tokens
        request.stopping.ignore_eos = True
        stream = inference_pb2_grpc.InferenceStub(channel).GenerateStream(
            request, metadata=(("authorization", f"Bearer {token}"),), timeout=_CALL_SECONDS
        )
        try:
            count = sum([len(event.delta.token_ids) async for event in stream])
        except grpc.aio.AioRpcError as error:
            return error.code().name
        finally:
            self.old.pop(caller, None)
        return "OK" if count == tokens else "cut short"

    async def on_new_connections(self, caller: int) -> None:
        while not self.over:
            async with grpc.aio.secure_channel(self._server.address, self._site.credentials(), options=_ALONE) as channel:
                self.ends[await self.one(channel, caller, 8)] += 1

    async def on_one_connection(self, caller: int) -> None:
        async with grpc.aio.secure_channel(self._server.address, self._site.credentials(), options=_ALONE) as channel:
            while not self.over:
                self.ends[await self.one(channel, caller, 200)] += 1

    async def accepts(self, token: str) -> bool:
        """Whether a token counts by now."""
        async with grpc.aio.secure_channel(self._server.address, self._site.credentials(), options=_ALONE) as channel:
            try:
                await models_pb2_grpc.ModelsStub(channel).GetModel(
                    models_pb2.GetModelRequest(), metadata=(("authorization", f"Bearer {token}"),), timeout=_CALL_SECONDS
                )
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    return False
                raise
        return True


def served_serial(server: Server, site: Site) -> int:
    """The serial number of the certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(site.folder / "ca.pem")
    context.load_cert_chain(site.folder / "friend.pem", site.folder / "friend.key")
    context.set_alpn_protocols(["h2"])
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 30) as plain, context.wrap_socket(plain, server_hostname=host) as end:
        shown = end.getpeercert(binary_form=True)
    assert shown is not None, "a server shows a certificate"
    return x509.load_der_x509_certificate(shown).serial_number


async def _until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def replaced(server: Server, site: Site, times: int) -> dict[str, Any]:
    """Certificate, key and token replaced again and again; each is in use before the one before it goes."""
    callers = _Callers(server, site)
    tasks = [asyncio.create_task(callers.on_new_connections(number)) for number in range(4)]
    tasks += [asyncio.create_task(callers.on_one_connection(number)) for number in range(4, 8)]
    began = time.monotonic()
    for _ in range(times):
        new = await asyncio.to_thread(make_certificate, site.folder, "server", by="ca")
        serial = x509.load_pem_x509_certificate(new[0].read_bytes()).serial_number

        async def is_served(serial: int = serial) -> bool:
            return await asyncio.to_thread(served_serial, server, site) == serial

        await _until(is_served)
        old, token = callers.token, await asyncio.to_thread(site.new_token, "good")
        await _until(lambda token=token: callers.accepts(token))
        callers.token = token

        async def nobody_shows(old: str = old) -> bool:
            return old not in callers.old.values()

        await _until(nobody_shows)
        await asyncio.to_thread(site.keep_newest_token)

        async def is_refused(old: str = old) -> bool:
            return not await callers.accepts(old)

        await _until(is_refused)
    seconds = time.monotonic() - began
    callers.over = True
    await asyncio.gather(*tasks)
    lost = {code: count for code, count in callers.ends.items() if code != "OK"}
    return {
        "times": times, "seconds": round(seconds, 1), "calls": callers.ends.total(), "lost": lost,
        "bars": {"no call lost": not lost and callers.ends["OK"] > times},
    }  # fmt: skip


def main() -> int:
    """Print and record; 0 if every bar is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="attacks (5000)")
    parser.add_argument("--at-once", type=int, default=32, help="attacks under way (32)")
    parser.add_argument("--times", type=int, default=20, help="how often certificates and tokens are replaced (20)")
    parser.add_argument("--max-streams", type=int, default=100, help="rpc.max_streams of the server (100)")
    parser.add_argument("--out", type=Path, help="result file")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch) / "model")
        for name in ("attacked", "replaced"):
            folder = Path(scratch) / name
            folder.mkdir()
            site = Site(folder, options.max_streams)
            with serving(model, *site.options(), log=folder / "server.log") as server:
                if name == "attacked":
                    results[name] = attacked(server, site, options.count, options.at_once)
                else:
                    results[name] = asyncio.run(replaced(server, site, options.times))
            print(json.dumps({name: results[name]}, indent=1), flush=True)
    if options.out is not None:
        record = {"what": (__doc__ or "").split("\n")[0], "date": str(datetime.date.today()), "machine": machine()}
        record["rpc.max_streams"] = str(options.max_streams)
        options.out.write_text(json.dumps({**record, **results}, indent=2) + "\n")
    return int(not all(bar for result in results.values() for bar in result["bars"].values()))


if __name__ == "__main__":
    sys.exit(main())
