"""No message within the size limit keeps a server from its other calls or takes much memory, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
import pytest

from serve.config import RpcConfig
from tests.serve.rpc.message_server import MessageServer, message_server

LIMIT_BYTES = RpcConfig().max_message_bytes
MOST_HOLD_SECONDS = 0.1
MOST_BYTES = 64 * 1024 * 1024


@pytest.fixture(scope="module")
def server() -> Iterator[MessageServer]:
    with message_server() as running:
        yield running


def varint(value: int) -> bytes:
    """As protobuf writes numbers."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def inside(number: int, payload: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def filled(number: int, unit: bytes, *, among: tuple[int, ...] = (), tail: bytes = b"") -> bytes:
    """A message as large as the limit allows, of ``unit`` again and again as field ``number`` inside the fields ``among``."""
    one = inside(number, unit)
    payload = one * ((LIMIT_BYTES - 64 - len(tail)) // len(one)) + tail
    for outer in reversed(among):
        payload = inside(outer, payload)
    return payload


ONE_BYTE_TURN = inside(1, b"u")
NO_TEXT = inside(1, b"\xff")
EMOJI = "🙂".encode()
SHORT = inside(4, inside(1, b"\x05")) + inside(8, b"\x08\x02")
"""A prompt of one token, and two to generate."""
ALL_BUT_ONE = inside(11, b"\x07" * 65_536)

GENERATE, SCORE = "Inference/Generate", "Inference/Score"
MESSAGES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a chat of one-byte messages": (GENERATE, lambda: filled(1, ONE_BYTE_TURN, among=(5,))),
    "the same with a byte that is not UTF-8": (GENERATE, lambda: filled(1, ONE_BYTE_TURN, among=(5,), tail=inside(1, NO_TEXT))),
    "a chat of empty messages": (GENERATE, lambda: filled(1, b"", among=(5,))),
    "ids": (GENERATE, lambda: inside(4, inside(1, b"\x05" * (LIMIT_BYTES - 64)))),
    "ids one by one": (GENERATE, lambda: inside(4, b"\x08\x05" * (LIMIT_BYTES // 2 - 32))),
    "id lists that add up": (GENERATE, lambda: filled(4, inside(1, b"\x05" * 6))),
    "a long text": (GENERATE, lambda: inside(3, b"x" * (LIMIT_BYTES - 64))),
    "a text at its limit": (GENERATE, lambda: inside(3, b"x 1~" * 1024 * 1024)),
    "a text at its limit with a wide character": (GENERATE, lambda: inside(3, EMOJI + b"x 1~" * (1024 * 1024 - 1))),
    "a text at its limit that is not UTF-8": (GENERATE, lambda: inside(3, b"x 1~" * (1024 * 1024 - 1) + b"\xff")),
    "a long name": (GENERATE, lambda: inside(1, EMOJI * (LIMIT_BYTES // 4 - 16))),
    "stop strings": (GENERATE, lambda: filled(3, b"x", among=(8,))),
    "long stop strings": (GENERATE, lambda: inside(8, inside(3, EMOJI * (LIMIT_BYTES // 4 - 16)))),
    "biases": (GENERATE, lambda: filled(10, b"\x08\x05", among=(7,))),
    "allowed ids": (GENERATE, lambda: inside(7, inside(11, b"\x05" * (LIMIT_BYTES - 64)))),
    "id lists at their limits": (GENERATE, lambda: SHORT + inside(7, ALL_BUT_ONE + inside(12, b"\x06" * 65_536))),
    "a small chat of empty messages": (GENERATE, lambda: inside(5, inside(1, b"") * 8_000)),
    "a small chat that is not UTF-8": (GENERATE, lambda: inside(5, inside(1, b"") * 8_000 + inside(1, NO_TEXT))),
    "unknown fields": (GENERATE, lambda: b"\xf8\x01\x05" * (LIMIT_BYTES // 3)),
    "an unknown group": (GENERATE, lambda: b"\xfb\x01" * (LIMIT_BYTES // 4) + b"\xfc\x01" * (LIMIT_BYTES // 4)),
    "nothing that is a message": (GENERATE, lambda: b"\xff" * LIMIT_BYTES),
    "items": (SCORE, lambda: filled(3, inside(3, b"x"))),
    "items of ids": (SCORE, lambda: filled(3, inside(4, inside(1, b"\x05" * 200)))),
    "items of text": (SCORE, lambda: inside(3, inside(3, b"x 1~" * 64)) * 200),
    "items with all log probabilities": (SCORE, lambda: inside(3, inside(4, inside(1, b"\x05" * 250))) * 1000 + b"\x20\x14"),
    "a text to tokenise": ("Tokenizer/Tokenize", lambda: inside(2, b"x 1~" * 1024 * 1024)),
    "ids to read": ("Tokenizer/Detokenize", lambda: inside(2, b"\x05" * (LIMIT_BYTES - 64))),
    "a chat to render": ("Tokenizer/RenderChat", lambda: filled(1, ONE_BYTE_TURN, among=(2,))),
    "a chat to render at its limits": (
        "Tokenizer/RenderChat",
        lambda: inside(2, inside(1, ONE_BYTE_TURN + inside(2, b"x 1~" * 250)) * 4096),
    ),
    "the name of a request to end": ("Admin/Abort", lambda: inside(1, b"x" * (LIMIT_BYTES - 64))),
}
SERVED = {"items of text", "id lists at their limits"}


def status_of(channel: grpc.Channel, method: str, data: bytes) -> grpc.StatusCode:
    """How the call ends that sends these bytes."""
    call = channel.unary_unary(f"/serve.v1.{method}", request_serializer=bytes, response_deserializer=bytes)
    try:
        call(data, timeout=120)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
        return code
    return grpc.StatusCode.OK


@pytest.mark.parametrize("name", MESSAGES)
def test_no_message_keeps_the_loop_or_takes_much_memory(server: MessageServer, name: str) -> None:
    method, make = MESSAGES[name]
    data = make()
    assert len(data) <= LIMIT_BYTES
    with grpc.insecure_channel(server.address, [("grpc.max_send_message_length", -1)]) as channel:
        server.cost()
        code = status_of(channel, method, data)
        cost = server.cost()
    assert code is (grpc.StatusCode.OK if name in SERVED else grpc.StatusCode.INVALID_ARGUMENT)
    assert cost.hold_seconds < MOST_HOLD_SECONDS, cost
    assert cost.peak_bytes < MOST_BYTES, cost
    assert cost.num_lives == 1
