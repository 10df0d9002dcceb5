"""A stand-in for the picker of the Gateway API Inference Extension: ``picker.py --series NAME... --server GRPC,METRICS...``.

Run with the Python of ``make deploy-tools``, which has Envoy's messages. It does to a call what llm-d-router 0.9 does with its
``passthrough-parser``: keeps the request until it is whole, names a server, and keeps the answer until its trailers. What that
one learns from Kubernetes, whether a server is ready, this one asks the server. It prints its port, then a line for each piece
that it keeps.
"""

from __future__ import annotations

import argparse
import re
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc

DESTINATION: Final = "x-gateway-destination-endpoint"
"""What the gateway sends a call by."""
MOST_BYTES: Final = 62_000
"""Each piece that goes back has at most so many."""
MOST_CALLS: Final = 64
MOST_SECONDS: Final = 5.0
SERVING: Final = b"\x08\x01"
"""Of grpc.health.v1."""


class Servers:
    """Who could take a call, and who has the least to do.

    Args:
        addresses: (of gRPC, of the metrics) of each.
        series: names of gauges whose sum is a server's load, beside the calls that the picker sent there and that go on.
    """

    def __init__(self, addresses: list[tuple[str, str]], series: list[str]) -> None:
        self._addresses = addresses
        self._series = series
        self._sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._health = {
            address: grpc.insecure_channel(address).unary_unary("/grpc.health.v1.Health/Check") for address, _ in addresses
        }

    def take(self) -> str | None:
        """The server of a new call; None where none is ready."""
        with self._lock:
            loads = {address: self._load(address, metrics) for address, metrics in self._addresses if self._is_ready(address)}
            if not loads:
                return None
            chosen = min(loads, key=lambda address: loads[address])
            self._sent[chosen] += 1
            return chosen

    def leave(self, address: str) -> None:
        with self._lock:
            self._sent[address] -= 1

    def _is_ready(self, address: str) -> bool:
        try:
            return bool(self._health[address](b"", timeout=MOST_SECONDS) == SERVING)
        except grpc.RpcError:
            return False

    def _load(self, address: str, metrics: str) -> float:
        with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=MOST_SECONDS) as page:
            text = page.read().decode()
        values = [re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in self._series]
        return self._sent[address] + sum(float(value[1]) for value in values if value is not None)


class Call:
    """The messages about one call, and what is said to them."""

    def __init__(self, servers: Servers, messages: Any) -> None:
        self._servers = servers
        self._messages = messages
        self._request = b""
        self._answer = b""
        self._server: str | None = None

    def talk(self, incoming: Iterator[Any]) -> Iterator[Any]:
        """What the gateway is told, in its order: headers, body, trailers."""
        try:
            for message in incoming:
                kind = message.WhichOneof("request")
                yield from getattr(self, f"_{kind}")(getattr(message, kind))
        finally:
            if self._server is not None:
                self._servers.leave(self._server)

    def _request_headers(self, headers: Any) -> Iterator[Any]:
        if headers.end_of_stream:
            yield self._pick()

    def _request_body(self, body: Any) -> Iterator[Any]:
        self._request += body.body
        if not body.end_of_stream:
            print("request", flush=True)
            return
        yield self._pick()
        if self._server is not None:
            yield from self._pieces("request_body", self._request, ends=True)

    def _request_trailers(self, trailers: Any) -> Iterator[Any]:
        return iter(())

    def _response_headers(self, headers: Any) -> Iterator[Any]:
        yield self._messages.ProcessingResponse(response_headers={})

    def _response_body(self, body: Any) -> Iterator[Any]:
        self._answer += body.body
        if body.end_of_stream:
            yield from self._pieces("response_body", self._answer, ends=True)
        else:
            print("answer", flush=True)

    def _response_trailers(self, trailers: Any) -> Iterator[Any]:
        yield from self._pieces("response_body", self._answer, ends=False)
        yield self._messages.ProcessingResponse(response_trailers={})

    def _pick(self) -> Any:
        self._server = self._servers.take()
        if self._server is None:
            return self._messages.ProcessingResponse(immediate_response={"status": {"code": 503}})
        headers = {DESTINATION: self._server} | ({"content-length": str(len(self._request))} if self._request else {})
        changes = [{"header": {"key": key, "raw_value": value.encode()}} for key, value in headers.items()]
        named = {"envoy.lb": {DESTINATION: self._server}}
        answer = {"response": {"clear_route_cache": True, "header_mutation": {"set_headers": changes}}}
        return self._messages.ProcessingResponse(request_headers=answer, dynamic_metadata=named)

    def _pieces(self, kind: str, body: bytes, *, ends: bool) -> Iterator[Any]:
        starts = range(0, max(1, len(body)), MOST_BYTES)
        for start in starts:
            piece = {"body": body[start : start + MOST_BYTES], "end_of_stream": ends and start == starts[-1]}
            said = {"response": {"body_mutation": {"streamed_response": piece}}}
            yield self._messages.ProcessingResponse(**{kind: said})


def main() -> None:
    """Print the port, then a line for each piece that is kept, until somebody ends it."""
    from envoy.service.ext_proc.v3 import external_processor_pb2, external_processor_pb2_grpc

    parser = argparse.ArgumentParser()
    parser.add_argument("--series", nargs="+", required=True)
    parser.add_argument("--server", nargs="+", required=True)
    given = parser.parse_args()
    servers = Servers([tuple(pair.split(",")) for pair in given.server], given.series)

    class Picker(external_processor_pb2_grpc.ExternalProcessorServicer):  # type: ignore[misc]
        def Process(self, request_iterator: Iterator[Any], context: Any) -> Iterator[Any]:
            return Call(servers, external_processor_pb2).talk(request_iterator)

    server = grpc.server(ThreadPoolExecutor(MOST_CALLS))
    external_processor_pb2_grpc.add_ExternalProcessorServicer_to_server(Picker(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    main()
