"""A client that opens streams and reads none of them to the end: ``python -m tests.chaos.client ADDRESS COUNT [unreachable]``.

It says how many have begun and waits to be ended. ``unreachable``: from then on its machine drops whatever the server sends, so
that not even the arrival of a packet is confirmed.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import threading

import grpc

from serve.v1 import inference_pb2, inference_pb2_grpc

NUM_TOKENS = 400
_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A program of one instruction for the kernel's packet filter: keep nothing of a packet."""


def request() -> inference_pb2.GenerateRequest:
    """Whose answer is far larger than what is under way between a server and a client that does not read."""
    made = inference_pb2.GenerateRequest()
    made.token_ids.ids.extend((5, 6, 7, 8))
    made.sampling.temperature = 0.0
    made.response.logprobs = 20
    made.stopping.max_new_tokens = NUM_TOKENS
    made.stopping.ignore_eos = True
    return made


def drop_all_that_comes(address: str) -> int:
    """Have the kernel drop every packet for this process's connections to an address; returns how many there are."""
    _host, _, port = address.rpartition(":")
    found = 0
    program = ctypes.create_string_buffer(_DROP, len(_DROP))
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as mine:
                if mine.family in (socket.AF_INET, socket.AF_INET6) and mine.getpeername()[1] == int(port):
                    mine.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
                    found += 1
        except OSError:  # no socket, or not a connected one
            continue
    return found


def main(address: str, count: int, how: str = "") -> None:
    """Be that client."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.GenerateStream(request()) for _ in range(count)]
        for call in calls:
            next(call)
        if how == "unreachable":
            assert drop_all_that_comes(address), "no connection was found"
        print(f"{len(calls)} streams", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
