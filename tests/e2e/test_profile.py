"""``Admin.Profile`` on a real server of two ranks: traces of steps that were computed for somebody, who notices nothing."""

from __future__ import annotations

import gzip
import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from serve.client import Client, TesseraError
from serve.v1 import admin_pb2
from tests.support.server import Server, serving, until

PROMPT = "def the_secret_of_somebody(who):"
TOKENS = 100


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--tensor-parallel-size", "2") as running:
        yield running


def answer(client: Client) -> tuple[int, ...]:
    return client.generate(PROMPT, max_new_tokens=TOKENS, ignore_eos=True).completions[0].token_ids


@contextmanager
def asked(client: Client) -> Iterator[list[tuple[int, ...]]]:
    """Somebody asks the same again and again meanwhile; what was answered."""
    answers, over = [answer(client)], threading.Event()

    def ask() -> None:
        while not over.is_set():
            answers.append(answer(client))

    load = threading.Thread(target=ask)
    load.start()
    try:
        yield answers
    finally:
        over.set()
        load.join()


def test_each_rank_sends_a_trace_of_the_steps_with_the_models_operations_and_nothing_of_the_prompt(server: Server) -> None:
    traces: dict[int, bytes] = {}
    with Client(server.address) as client, asked(client) as answers:
        for part in server.admin.Profile(admin_pb2.ProfileRequest(steps=20), timeout=240):
            assert part.steps == 20
            traces[part.rank] = traces.get(part.rank, b"") + part.data
    assert len(answers) > 1
    assert set(answers) == {answers[0]}, "a request whose steps are recorded says the same"
    assert sorted(traces) == [0, 1]
    for trace in traces.values():
        text = gzip.decompress(trace).decode()
        assert "secret" not in text
        names = [event["name"] for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]
        assert sum(name.startswith("step ") for name in names) == 20
        assert sum(name == "GPTNeoXLayer layers.0" for name in names) == 20
        assert sum(name.endswith(" layers.2.mlp.dense_4h_to_h") for name in names) == 20
        assert any(name.startswith("aten::") for name in names)
        assert len(trace) < 1 << 20


def test_an_idle_server_records_nothing_and_says_so(server: Server) -> None:
    with Client(server.address) as client, pytest.raises(TesseraError, match="no step was computed within 1 s") as caught:
        client.profile(seconds=1)
    assert caught.value.code == "DEADLINE_EXCEEDED"


def test_a_rank_that_is_lost_in_a_step_ends_the_recording_and_no_call(server: Server) -> None:
    with Client(server.address) as client, ThreadPoolExecutor(1) as pool:
        expected = answer(client)
        call = server.admin.Profile(admin_pb2.ProfileRequest(steps=100, seconds=600), timeout=240)
        until(lambda: any("recording 100 steps" in line for line in server.log))
        os.kill(server.rank_pids()[1], signal.SIGSTOP)
        answering = pool.submit(answer, client)  # the first of the steps that are recorded waits for it until it is found out
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert answering.result() == expected
        with asked(client):
            assert set(client.profile(3, ranks=(1,))) == {1}, "the new ranks record as those before"
