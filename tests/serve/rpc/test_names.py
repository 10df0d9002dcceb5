"""Names that clients choose are words to the server, never places."""

from __future__ import annotations

import random
import sys

import grpc

from serve.v1 import models_pb2
from tests.serve.rpc.running import request, serving

_NUM_NAMES = 1000
_MARK = "intruder"
_PIECES = ("../", "/", "..\\", "%2e%2e/", "\0", "~", "file://", "/proc/self/", "‮", "é", "⁄", " ", "\n", "a" * 40, "$HOME", "C:")
_opened: list[str] = []
_is_listening = False


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _is_listening and event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove"):
        _opened.extend(str(each) for each in arguments if _MARK in str(each))


def _name(draw: random.Random) -> str:
    pieces = [draw.choice(_PIECES) for _ in range(draw.randint(0, 6))]
    pieces.insert(draw.randrange(len(pieces) + 1), _MARK)
    return "".join(pieces)


async def test_no_name_of_a_client_is_ever_opened() -> None:
    global _is_listening
    sys.addaudithook(_note)  # which stays for good, so it listens only here
    draw = random.Random(3)
    codes = set()
    async with serving() as server:
        _is_listening = True
        try:
            open(f"/nonexistent/{_MARK}")  # noqa: ASYNC230, SIM115
        except OSError:
            assert _opened == [f"/nonexistent/{_MARK}"]  # it does hear
        _opened.clear()
        try:
            for number in range(_NUM_NAMES):
                name = _name(draw)
                fields = [{"model": name}, {"request_id": name}, {"model": "fake", "cache_salt": name}][number % 3]
                try:
                    await server.inference.Generate(request(tokens=1, **fields))
                except grpc.RpcError as error:
                    codes.add(error.code())
            try:
                await server.models.GetModel(models_pb2.GetModelRequest(name=f"../{_MARK}"))
            except grpc.RpcError as error:
                codes.add(error.code())
        finally:
            _is_listening = False
    assert _opened == []
    assert codes <= {grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT}
