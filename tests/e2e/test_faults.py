"""Ranks that die or freeze under load: told at once, mended by the server itself, nothing left over."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from transformers import PreTrainedModel

from serve.v1 import inference_pb2
from tests.support import reference
from tests.support.sandbox import as_the_unit
from tests.support.server import Server, serving, until

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # With the sockets that the systemd unit allows: what ranks and their restarts need is known to be among them.
    with serving(folder, "--tensor-parallel-size", "2", under=as_the_unit()) as running:
        yield running


def _request(tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = tokens
    request.stopping.ignore_eos = True
    return request


class _Load:
    """Streams that are under way when the fault strikes."""

    def __init__(self, server: Server, count: int) -> None:
        self.codes: list[str] = []
        self._under_way = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._stream, args=(server,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._under_way.acquire(timeout=60)

    def _stream(self, server: Server) -> None:
        started = False
        try:
            for event in server.inference.GenerateStream(_request(500), timeout=120):
                if event.WhichOneof("event") == "delta" and not started:
                    started = True
                    self._under_way.release()
            self.codes.append("OK")
        except grpc.RpcError as error:
            self.codes.append(error.code().name)

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a call hangs"
        return self.codes


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("fault", "limit_seconds"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 15.0)])
def test_a_lost_rank(server: Server, model: PreTrainedModel, victim: int, fault: signal.Signals, limit_seconds: float) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    old = until(lambda: len(pids := server.rank_pids()) == 2 and pids)
    load = _Load(server, 20)

    os.kill(old[victim], fault)
    struck = time.monotonic()
    until(lambda: server.health() == "NOT_SERVING", seconds=limit_seconds)
    assert time.monotonic() - struck <= limit_seconds
    assert load.join() == ["UNAVAILABLE"] * 20

    until(lambda: server.health() == "SERVING", seconds=60)
    answer = server.inference.Generate(_request(40), timeout=60)
    assert list(answer.completions[0].token_ids) == reference.greedy(model, PROMPT, 40)
    until(lambda: server.metrics()["tessera_kv_blocks_used"] == 0, seconds=5)
    assert not any(psutil.pid_exists(pid) for pid in old)
    assert set(os.listdir("/dev/shm")) <= shared_memory


def test_ranks_do_not_outlive_a_killed_server(folder: Path) -> None:
    with serving(folder, "--tensor-parallel-size", "2", exit_code=-signal.SIGKILL) as server:
        ranks = server.rank_pids()
        assert len(ranks) == 2
        server.process.kill()
        until(lambda: not any(psutil.pid_exists(pid) for pid in ranks), seconds=5)


def test_sigterm_finishes_calls_in_flight_and_refuses_new_ones(folder: Path) -> None:
    with serving(folder) as server:
        call = server.inference.GenerateStream(_request(400), timeout=60)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.health() == "NOT_SERVING", seconds=5)
        with pytest.raises(grpc.RpcError) as refused:
            server.inference.Generate(_request(5), timeout=10)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert sum(len(event.delta.token_ids) for event in call) == 400
        assert server.process.wait(timeout=30) == 0
