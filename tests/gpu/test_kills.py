"""Ranks on a CUDA device that are killed under load: ``make test-gpu``. Elsewhere these tests are skipped, and say so.

A rank on a device is back after its imports, its device and its captured steps, which takes many seconds; so a hundred deaths
are those of several servers side by side on one device.
"""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.chaos import history
from tests.chaos.history import CALL_SECONDS, Call, Load, Verdict, judge, undisturbed
from tests.gpu.device import DEVICE, ON_DEVICE, REHEARSED
from tests.support.models import save
from tests.support.server import Server, serving, until

pytestmark = ON_DEVICE
SERVERS: Final = 1 if REHEARSED else 8
DEATHS: Final = 1 if REHEARSED else 104
LEAST_STREAMS: Final = 4 if REHEARSED else 8
OTHERWISE: Final = 0.0 if REHEARSED else 0.1
"""The share of calls that may say something else than undisturbed: the order of a device's sums depends on what is computed
beside, so that a choice between two tokens that are equally likely may fall otherwise. What a death spoils is every stream."""


def _die(server: Server, load: Load) -> None:
    """Kill the rank while streams go on; return when they go on again."""
    met = until(lambda: len(calls := load.under_way()) >= LEAST_STREAMS and calls)
    restarts = server.metrics()["tessera_engine_restarts_total"]
    for pid in server.rank_pids():
        os.kill(pid, signal.SIGKILL)
    until(lambda: server.metrics()["tessera_engine_restarts_total"] > restarts)
    until(lambda: server.health() == "SERVING")
    restarted = time.monotonic()
    until(lambda: any(call.last_seconds > restarted or call.code is not None for call in met))


def _serve_and_die(folder: Path, number: int) -> tuple[Verdict, list[Call], dict[int, list[int]], float]:
    """One server, its share of the deaths, and the history of its calls."""
    options = ("--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-gib", "0.05", "--cuda-graph-max-batch", "16")
    with serving(folder, *options, device=DEVICE) as server:
        expected = undisturbed(server, folder)
        load = Load(server, number, expected)
        with load.going_on():
            for _ in range(DEATHS // SERVERS):
                _die(server, load)
            ended = load.num_ended
            until(lambda: load.num_ended >= ended + LEAST_STREAMS, seconds=CALL_SECONDS)
        until(lambda: server.metrics()["tessera_kv_blocks_used"] == 0)
        return judge(load.calls, expected), load.calls, expected, server.metrics()["tessera_engine_restarts_total"]


def test_every_call_is_answered_once_and_whole_whatever_ranks_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if REHEARSED:  # fewer and less to say, which the CPU does as well in seconds
        monkeypatch.setattr(history, "NUM_STREAMS", 6)
        monkeypatch.setattr(history, "NUM_SCRIPTS", 4)
    folder = save("llama", tmp_path / "llama")
    with ThreadPoolExecutor(SERVERS) as pool:
        served = list(pool.map(lambda number: _serve_and_die(folder, number), range(SERVERS)))
    for verdict, calls, expected, restarts in served:
        assert restarts == DEATHS // SERVERS
        assert verdict.lost == {}
        assert [call for call in calls if call.num_ends != 1 or len(call.ids) != len(expected[call.script])] == []
        assert verdict.wrong <= OTHERWISE * verdict.calls
