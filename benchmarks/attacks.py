"""What somebody without a token, or without a certificate, may throw at a server: ``python -m benchmarks.attacks``.

A process of its own, so that what it costs to attack is not taken for what it costs to be attacked. A JSON object with the
fields of ``Orders`` comes by standard input; how many attacks of each kind there were, and who got in, goes to standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import ssl
import struct
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from serve.v1 import inference_pb2, inference_pb2_grpc

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 8, 9
END_STREAM, END_HEADERS = 1, 4
_HOLD_SECONDS: Final = 12.0
"""Longer than the server lets a handshake take."""
_LISTEN_SECONDS: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Whom to attack, and with what in hand."""

    address: str
    count: int
    at_once: int
    seed: int
    folder: str
    """Has ``ca.pem`` and, with their keys, the client certificates ``friend``, ``expired`` and ``stranger``."""
    tokens: list[str]
    """Such as count no longer, or have another scope."""


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame of HTTP/2 (RFC 9113, section 4.1)."""
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _text(value: bytes) -> bytes:
    """A string literal of HPACK (RFC 7541, section 5.2), not compressed."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    left, sized = len(value) - 127, bytearray([127])
    while left >= 128:
        sized.append(left % 128 + 128)
        left //= 128
    return bytes(sized) + bytes([left]) + value


def fields(*pairs: tuple[str, str]) -> bytes:
    """Header fields as literals without an index."""
    return b"".join(b"\x00" + _text(name.encode()) + _text(value.encode()) for name, value in pairs)


def call(method: str, *more: tuple[str, str]) -> bytes:
    """Header fields of a gRPC call."""
    start = ((":method", "POST"), (":scheme", "https"), (":path", method), (":authority", "localhost"))
    return fields(*start, ("te", "trailers"), ("content-type", "application/grpc"), *more)


HEALTH: Final = "/grpc.health.v1.Health/Check"
GENERATE: Final = "/serve.v1.Inference/Generate"


class Attacker:
    """Draws attacks and makes them."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._host, _, port = orders.address.rpartition(":")
        self._port = int(port)
        self._draw = random.Random(orders.seed)
        self._files = Path(orders.folder)
        self._friend = self._context("friend")
        self.made = Counter[str]()
        self.inside: list[str] = []
        """Attacks after which somebody was answered who should not have been."""
        self._kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "no TLS: random bytes": self._noise, "no TLS: HTTP/2": self._plain, "TLS half done": self._half_open,
            "no client certificate": lambda: self._stranger(None),
            "a stranger's certificate": lambda: self._stranger("stranger"),
            "an expired certificate": lambda: self._stranger("expired"), "TLS without HTTP/2": self._no_alpn,
            "bad preface": self._bad_preface, "settings": self._settings, "pings": self._pings, "rapid resets": self._resets,
            "header bomb": self._header_bomb, "continuations": self._continuations, "windows": self._windows,
            "random frames": self._frames, "streams without end": self._hanging, "tokens": self._tokens,
            "headers of tokens": self._token_headers, "a large message": self._large,
        }  # fmt: skip

    async def run(self) -> None:
        """Make all attacks, some at once."""
        names = list(self._kinds)
        queue = [names[number % len(names)] for number in range(self._orders.count)]
        self._draw.shuffle(queue)

        async def work() -> None:
            while queue:
                name = queue.pop()
                try:
                    async with asyncio.timeout(60):
                        await self._kinds[name]()
                except (OSError, ssl.SSLError, TimeoutError, EOFError):
                    pass  # the server hung up, as it may
                self.made[name] += 1

        await asyncio.gather(*(work() for _ in range(self._orders.at_once)))

    def _context(self, name: str | None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self._files / "ca.pem")
        context.set_alpn_protocols(["h2"])
        if name is not None:
            context.load_cert_chain(self._files / f"{name}.pem", self._files / f"{name}.key")
        return context

    async def _connect(self, context: ssl.SSLContext | None) -> Ends:
        name = "localhost" if context is not None else None
        return await asyncio.open_connection(self._host, self._port, ssl=context, server_hostname=name)

    async def _send(self, context: ssl.SSLContext | None, data: bytes, *, hold: float = _LISTEN_SECONDS) -> bytes:
        """What comes back until the server hangs up, or nothing more comes for a while."""
        reader, writer = await self._connect(context)
        try:
            writer.write(data)
            await writer.drain()
            heard = b""
            while len(heard) < 1 << 20:
                try:
                    async with asyncio.timeout(hold):
                        more = await reader.read(65536)
                except TimeoutError:
                    break
                if not more:
                    break
                heard += more
            return heard
        finally:
            writer.transport.abort()

    async def _spoken(self, *frames: bytes, hold: float = _LISTEN_SECONDS) -> bytes:
        """Frames over TLS with a certificate that is let in."""
        return await self._send(self._friend, PREFACE + frame(SETTINGS, 0, 0) + b"".join(frames), hold=hold)

    async def _noise(self) -> None:
        await self._send(None, self._draw.randbytes(self._draw.randrange(1, 4096)))

    async def _plain(self) -> None:
        heard = await self._send(None, PREFACE + frame(SETTINGS, 0, 0) + _ask(HEALTH))
        self._look(heard, "no TLS: HTTP/2")

    async def _half_open(self) -> None:
        hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._draw.randbytes(40)
        await self._send(None, hello[: self._draw.randrange(1, len(hello))], hold=_HOLD_SECONDS)

    async def _stranger(self, name: str | None) -> None:
        heard = await self._send(self._context(name), PREFACE + frame(SETTINGS, 0, 0) + _ask(HEALTH))
        self._look(heard, f"with the certificate {name}")

    async def _no_alpn(self) -> None:
        context = self._context("friend")
        context.set_alpn_protocols(["http/1.1"])
        heard = await self._send(context, PREFACE + frame(SETTINGS, 0, 0) + _ask(HEALTH))
        self._look(heard, "TLS without HTTP/2")

    async def _bad_preface(self) -> None:
        await self._send(self._friend, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * self._draw.randrange(1, 50))

    async def _settings(self) -> None:
        one = frame(SETTINGS, 0, 0, struct.pack("!HI", self._draw.randrange(1, 8), self._draw.randrange(1 << 32)))
        await self._spoken(one * 2000)

    async def _pings(self) -> None:
        await self._spoken(frame(PING, 0, 0, b"12345678") * 2000)

    async def _resets(self) -> None:
        asked = call(GENERATE)
        pairs = (
            frame(HEADERS, END_HEADERS, stream, asked) + frame(RESET, 0, stream, struct.pack("!I", 8))
            for stream in range(1, 1000, 2)
        )
        await self._spoken(*pairs)

    async def _header_bomb(self) -> None:
        # One entry of the table, named again and again: a kilobyte on the wire is a megabyte of header fields.
        entry = b"\x40" + _text(b"x") + _text(b"y" * 3000)
        await self._spoken(frame(HEADERS, END_HEADERS | END_STREAM, 1, call(GENERATE) + entry + b"\xbe" * 8000))

    async def _continuations(self) -> None:
        more = frame(CONTINUATION, 0, 1, fields(("x" * 100, "y" * 8000)))
        await self._spoken(frame(HEADERS, 0, 1, call(GENERATE)), more * 100)

    async def _windows(self) -> None:
        most = struct.pack("!I", (1 << 31) - 1)
        await self._spoken(
            frame(HEADERS, END_HEADERS, 1, call(GENERATE)), frame(WINDOW, 0, self._draw.choice((0, 1)), most) * 50
        )

    async def _frames(self) -> None:
        def one() -> bytes:
            kind, flags, stream = self._draw.randrange(12), self._draw.randrange(256), self._draw.randrange(8)
            return frame(kind, flags, stream, self._draw.randbytes(self._draw.randrange(64)))

        await self._spoken(*(one() for _ in range(self._draw.randrange(1, 100))))

    async def _hanging(self) -> None:
        await self._spoken(*(frame(HEADERS, END_HEADERS, stream, call(GENERATE)) for stream in range(1, 100, 2)))

    async def _token_headers(self) -> None:
        """Many headers, long ones, strange ones; answered with an error at best, which is no answer of a service."""
        wrong = [("authorization", self._draw.choice(("", "Bearer", "Basic Og==", "Bearer " + "x" * 600))) for _ in range(20)]
        await self._spoken(_ask(GENERATE, *wrong))

    async def _large(self) -> None:
        most = frame(DATA, 0, 1, self._draw.randbytes(16000))
        await self._spoken(frame(HEADERS, END_HEADERS, 1, call(GENERATE)), most * 100)

    async def _tokens(self) -> None:
        """Calls by gRPC itself, with tokens that are no good."""
        pem = [(self._files / name).read_bytes() for name in ("ca.pem", "friend.key", "friend.pem")]
        token = self._draw.choice([*self._orders.tokens, "", "tessera_" + "A" * 43, "x" * 500])
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        alone = [("grpc.use_local_subchannel_pool", 1)]
        address = f"localhost:{self._port}"
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pem), options=alone) as channel:
            request = inference_pb2.GenerateRequest(token_ids={"ids": [1, 2, 3]}, stopping={"max_new_tokens": 1})
            try:
                await inference_pb2_grpc.InferenceStub(channel).Generate(request, metadata=metadata, timeout=30)
            except grpc.aio.AioRpcError as error:
                refusals = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
                if error.code() not in refusals:
                    self.made[f"tokens: {error.code().name}"] += 1
            else:
                self.inside.append("a token that is no good")

    def _look(self, heard: bytes, what: str) -> None:
        """A frame with header fields is the answer to a call."""
        while len(heard) >= 9:
            size = int.from_bytes(heard[:3], "big")
            if heard[3] == HEADERS:
                self.inside.append(what)
                return
            heard = heard[9 + size :]


def _ask(method: str, *more: tuple[str, str]) -> bytes:
    """A whole call with an empty message."""
    return frame(HEADERS, END_HEADERS, 1, call(method, *more)) + frame(DATA, END_STREAM, 1, b"\x00\x00\x00\x00\x00")


async def main() -> None:
    """Attack as ordered."""
    os.nice(19)
    attacker = Attacker(Orders(**json.load(sys.stdin)))
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # of connections that the server cut
    await attacker.run()
    json.dump({"made": attacker.made, "inside": attacker.inside}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
