"""Random messages against a running server: TESSERA_MESSAGES=10000 for a long run, TESSERA_SEED for another one."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from serve.v1 import inference_pb2, inference_pb2_grpc
from tests.serve.rpc.message_server import MessageServer, message_server
from tests.serve.rpc.random_messages import random_messages

MESSAGES = int(os.environ.get("TESSERA_MESSAGES", "400"))
SEED = int(os.environ.get("TESSERA_SEED", "1"))
STREAMS = ("GenerateBatch", "ServerReflectionInfo")
ANSWER_STREAMS = ("GenerateStream", "Profile")
WARM_UP = 100
MOST_HOLD_SECONDS = 0.1
MOST_KEPT_BYTES = 32 * 1024 * 1024


class HealthChecks:
    """Asks for the server's health again and again, from a thread of its own."""

    def __init__(self, address: str) -> None:
        self.longest_seconds = 0.0
        self.num_checks = 0
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> HealthChecks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
            while not self._stop.wait(0.01):
                began = time.monotonic()
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
                self.longest_seconds = max(self.longest_seconds, time.monotonic() - began)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
                self.num_checks += 1


def send(channel: grpc.Channel, path: str, data: bytes) -> str:
    """The code that the call ends with. Streams of answers are read to their end."""
    try:
        if path.endswith(STREAMS):
            method = channel.stream_stream(path, request_serializer=bytes, response_deserializer=bytes)
            for _ in method(iter([data, data]), timeout=60):
                pass
        elif path.endswith(ANSWER_STREAMS):
            for _ in channel.unary_stream(path, request_serializer=bytes, response_deserializer=bytes)(data, timeout=60):
                pass
        else:
            channel.unary_unary(path, request_serializer=bytes, response_deserializer=bytes)(data, timeout=60)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code.name
    return "OK"


def memory_when_quiet(server: MessageServer) -> int:
    """What the server holds once it has given back what it will."""
    held = [server.cost().held_bytes for _ in range(5)]
    return min(held)


def test_random_messages_leave_the_server_as_it_was() -> None:
    codes: Counter[str] = Counter()
    with message_server() as server:
        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        with grpc.insecure_channel(server.address, options) as channel, HealthChecks(server.address) as health:
            for path, data in random_messages(SEED - 1, WARM_UP):
                send(channel, path, data)
            before = memory_when_quiet(server)
            health.longest_seconds = hold = 0.0
            for number, (path, data) in enumerate(random_messages(SEED, MESSAGES)):
                codes[send(channel, path, data)] += 1
                if number % 100 == 99:
                    hold = max(hold, server.cost().hold_seconds)
            answer = inference_pb2_grpc.InferenceStub(channel).Generate(  # type: ignore[no-untyped-call]
                inference_pb2.GenerateRequest(token_ids={"ids": [5, 6, 7]}, stopping={"max_new_tokens": 2})
            )
        last = server.cost()
        kept = memory_when_quiet(server) - before
        hold = max(hold, last.hold_seconds)
    print(
        f"{MESSAGES} messages: {dict(codes)}; the loop was held {hold * 1000:.0f} ms of processor time at most; "
        f"{health.num_checks} health checks, the longest {health.longest_seconds * 1000:.0f} ms; {kept / 2**20:+.1f} MiB"
    )
    assert answer.completions[0].token_ids
    assert codes["OK"] > MESSAGES / 20, "some of them are good"
    assert codes["INVALID_ARGUMENT"] > MESSAGES / 4
    assert not codes.keys() & {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"}, codes
    assert last.num_internal == 0
    assert last.num_lives == 1
    assert hold < MOST_HOLD_SECONDS
    assert kept < MOST_KEPT_BYTES
