"""Ranks that die or freeze under load: mended by the server itself, no call lost, nothing left over."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from transformers import PreTrainedModel

from serve.config import SupervisorConfig
from serve.v1 import inference_pb2
from tests.support import reference
from tests.support.decisive import is_answer_decisive
from tests.support.sandbox import as_the_unit
from tests.support.server import Server, lives, serving, until
from tests.support.shared_memory import abandoned, in_shared_memory

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # With the sockets that the systemd unit allows: what ranks and their restarts need is known to be among them.
    with serving(folder, "--tensor-parallel-size", "2", under=as_the_unit()) as running:
        yield running


@pytest.fixture(scope="module")
def losing(folder: Path) -> Iterator[Server]:
    with serving(folder, "--tensor-parallel-size", "2", "--no-requeue", "--no-resume-streams") as running:
        yield running


def _request(tokens: int) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(PROMPT)
    request.sampling.temperature = 0.0
    request.stopping.max_new_tokens = tokens
    request.stopping.ignore_eos = True
    return request


def _sampled(number: int) -> inference_pb2.GenerateRequest:
    """One of many requests of which no two are alike."""
    request = _request(300)
    request.token_ids.ids.append(number)
    if number % 2:
        request.sampling.temperature = 1.0
        request.sampling.seed = number
        request.sampling.top_p = 0.9
        request.sampling.repetition_penalty = 1.1
    return request


class _Load:
    """Callers of one stream each, under way whenever the fault strikes."""

    def __init__(self, server: Server, requests: Mapping[int, inference_pb2.GenerateRequest]) -> None:
        self.codes: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self._under_way = threading.Semaphore(0)
        self._threads = [
            threading.Thread(target=self._stream, args=(server, number, request)) for number, request in requests.items()
        ]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._under_way.acquire(timeout=400)

    def _stream(self, server: Server, number: int, request: inference_pb2.GenerateRequest) -> None:
        ids = self.ids[number] = []
        try:
            for event in server.inference.GenerateStream(request, timeout=400):
                if event.WhichOneof("event") == "delta" and not ids:
                    self._under_way.release()
                ids.extend(event.delta.token_ids)
        except grpc.RpcError as error:
            self.codes[number] = error.code().name
        else:
            self.codes[number] = "OK"

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(timeout=400)
            assert not thread.is_alive(), "a call hangs"
        return list(self.codes.values())


@pytest.fixture(scope="module")
def undisturbed(server: Server, model: PreTrainedModel) -> dict[int, list[int]]:
    """What 32 streams say when nothing happens, none of which says what rounding decides."""
    load = _Load(server, {number: _sampled(number) for number in range(64)})
    assert load.join() == ["OK"] * 64
    decisive = [number for number, ids in load.ids.items() if is_answer_decisive(model, _sampled(number), ids)]
    return {number: load.ids[number] for number in decisive[:32]}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("fault", "noticed"), [(signal.SIGKILL, "died: signal SIGKILL"), (signal.SIGSTOP, "is frozen")])
def test_a_lost_rank_costs_time_and_no_call(
    server: Server, undisturbed: dict[int, list[int]], victim: int, fault: signal.Signals, noticed: str
) -> None:
    before_shared = in_shared_memory()
    old = until(lambda: len(pids := server.rank_pids()) == 2 and pids)
    before = server.metrics()
    load = _Load(server, {number: _sampled(number) for number in undisturbed})

    os.kill(old[victim], fault)
    again = max(undisturbed)
    late = server.inference.Generate(_sampled(again), timeout=400)  # whether it comes before the fault is noticed or after
    assert load.join() == ["OK"] * 32
    assert load.ids == undisturbed
    assert list(late.completions[0].token_ids) == undisturbed[again]
    # A death is known for what it is: at once, and not for want of a heartbeat.
    assert f"engine down: rank {victim} {noticed}" in [line for line in server.log if "engine down" in line][-1]
    after = server.metrics()
    assert after["tessera_engine_restarts_total"] == before["tessera_engine_restarts_total"] + 1
    assert after["tessera_requests_kept_total"] > before["tessera_requests_kept_total"]
    assert server.health() == "SERVING"
    until(lambda: server.metrics()["tessera_kv_blocks_used"] == 0)
    assert not any(psutil.pid_exists(pid) for pid in old)
    assert not abandoned(before_shared)


def test_told_not_to_wait_calls_end_when_their_ranks_do(losing: Server, model: PreTrainedModel) -> None:
    kept = losing.metrics()["tessera_requests_kept_total"]

    def lost() -> int:
        """How many calls ended with their ranks; none, if all had their answers before."""
        ranks = until(lambda: len(pids := losing.rank_pids()) == 2 and pids)
        load = _Load(losing, dict.fromkeys(range(20), _request(500)))
        os.kill(ranks[1], signal.SIGKILL)
        load.join()
        until(lambda: losing.health() == "SERVING")
        answered = [number for number, code in load.codes.items() if code == "OK"]
        assert [len(load.ids[number]) for number in answered] == [500] * len(answered)
        ended = [code for code in load.codes.values() if code != "OK"]
        assert ended == ["UNAVAILABLE"] * len(ended)
        return len(ended)

    assert until(lost)
    assert losing.metrics()["tessera_requests_kept_total"] == kept
    answer = losing.inference.Generate(_request(40), timeout=400)
    assert list(answer.completions[0].token_ids) == reference.greedy(model, PROMPT, 40)


def test_a_server_that_was_stopped_goes_on_with_its_calls_and_its_ranks(server: Server, model: PreTrainedModel) -> None:
    ranks = until(lambda: len(pids := server.rank_pids()) == 2 and pids)
    restarts = server.metrics()["tessera_engine_restarts_total"]
    call = server.inference.GenerateStream(_request(400), timeout=400)
    ids = list(next(call).delta.token_ids)
    server.process.send_signal(signal.SIGSTOP)
    try:
        # For longer than the silence after which a rank counts as frozen.
        with pytest.raises(grpc.RpcError) as caught:
            server.health_stub.Check(health_pb2.HealthCheckRequest(), timeout=SupervisorConfig().heartbeat_timeout_seconds + 1)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        server.process.send_signal(signal.SIGCONT)
    for event in call:
        ids.extend(event.delta.token_ids)
    assert len(ids) == 400
    assert ids == reference.chosen(model, PROMPT, ids)
    until(lambda: any("stood still" in line for line in server.log))
    assert server.rank_pids() == ranks
    assert server.metrics()["tessera_engine_restarts_total"] == restarts


def test_ranks_do_not_outlive_a_killed_server(folder: Path) -> None:
    with serving(folder, "--tensor-parallel-size", "2", exit_code=-signal.SIGKILL) as server:
        ranks = server.rank_pids()
        assert len(ranks) == 2
        server.process.kill()
        until(lambda: not any(lives(pid) for pid in ranks))


def test_sigterm_finishes_calls_in_flight_and_refuses_new_ones(folder: Path) -> None:
    with serving(folder, "--drain-seconds", "120") as server:
        # A watch, not a question: the server may have ended before a question is asked.
        health = server.health_stub.Watch(health_pb2.HealthCheckRequest(service="serve.v1.Inference"))
        assert next(health).status == health_pb2.HealthCheckResponse.SERVING
        call = server.inference.GenerateStream(_request(400), timeout=400)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        assert next(health).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as refused:
            server.inference.Generate(_request(5), timeout=240)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert sum(len(event.delta.token_ids) for event in call) == 400
        assert server.process.wait(timeout=400) == 0
