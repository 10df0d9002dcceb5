"""A client that opens streams and reads none of them to the end: ``python -m tests.chaos.client ADDRESS COUNT``.

It says how many have begun and waits to be ended.
"""

from __future__ import annotations

import sys
import threading

import grpc

from serve.v1 import inference_pb2, inference_pb2_grpc

NUM_TOKENS = 400


def request() -> inference_pb2.GenerateRequest:
    """Whose answer is far larger than what is under way between a server and a client that does not read."""
    made = inference_pb2.GenerateRequest()
    made.token_ids.ids.extend((5, 6, 7, 8))
    made.sampling.temperature = 0.0
    made.response.logprobs = 20
    made.stopping.max_new_tokens = NUM_TOKENS
    made.stopping.ignore_eos = True
    return made


def main(address: str, count: int) -> None:
    """Be that client."""
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.GenerateStream(request()) for _ in range(count)]
        for call in calls:
            next(call)
        print(f"{len(calls)} streams", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
