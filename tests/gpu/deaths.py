"""Servers whose ranks are lost under load, and what became of every call: for the tests of one device and of several."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from serve.config import SupervisorConfig
from tests.chaos import history
from tests.chaos.history import CALL_SECONDS, Call, Load, Verdict, judge, undisturbed
from tests.gpu.device import DEVICE, REHEARSED
from tests.support.server import START_SECONDS, Server, lives, serving, until

LEAST_STREAMS: Final = 4 if REHEARSED else 8
NOTICED_SECONDS: Final = SupervisorConfig().step_timeout_seconds
"""Within which a fault is known for what it is, whatever it is."""
OTHERWISE: Final = 0.0 if REHEARSED else 0.1
"""The share of calls that may say something else than undisturbed: the order of a device's sums depends on what is computed
beside, so that a choice between two tokens that are equally likely may fall otherwise. What a death spoils is every stream."""


@dataclass(frozen=True)
class Fault:
    """What befalls a rank."""

    signal: signal.Signals
    noticed: str
    """What the log says of it."""


KILLED: Final = Fault(signal.SIGKILL, "died: signal SIGKILL")
FROZEN: Final = Fault(signal.SIGSTOP, "is frozen")


def say_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer callers, and less that they ask for, in a rehearsal: the CPU does that in seconds."""
    if REHEARSED:
        monkeypatch.setattr(history, "NUM_STREAMS", 6)
        monkeypatch.setattr(history, "NUM_SCRIPTS", 4)


@dataclass(frozen=True)
class Survived:
    """What a server and its calls have behind them."""

    verdict: Verdict
    calls: list[Call]
    expected: dict[int, list[int]]
    """What each script says when nothing happens."""
    restarts: float

    def prove(self, deaths: int) -> None:
        """Every call was answered once and whole, and nothing but these deaths had ranks started again."""
        assert self.restarts == deaths
        assert self.verdict.lost == {}
        expected = self.expected
        assert [call for call in self.calls if call.num_ends != 1 or len(call.ids) != len(expected[call.script])] == []
        assert self.verdict.wrong <= OTHERWISE * self.verdict.calls


def strike(server: Server, load: Load, victim: int, fault: Fault, ranks: int) -> None:
    """Have a fault befall one of so many ranks while streams go on; return when they go on again.

    It is noticed, and its rank named, within the longest that a step may take; others are there within a start's time then.
    """
    met = until(lambda: len(calls := load.under_way()) >= LEAST_STREAMS and calls)
    old = until(lambda: len(pids := server.rank_pids()) == ranks and pids)
    restarts, known = server.metrics()["tessera_engine_restarts_total"], len(_down(server))
    os.kill(old[victim], fault.signal)
    down = until(lambda: _down(server)[known:], seconds=NOTICED_SECONDS)
    named = re.compile(rf"rank {victim}(?: \([^)]*\))? {re.escape(fault.noticed)}")  # on a device with its name
    assert [line for line in down if named.search(line)] != [], down
    until(
        lambda: server.metrics()["tessera_engine_restarts_total"] > restarts and server.health() == "SERVING",
        seconds=START_SECONDS,
    )
    restarted = time.monotonic()
    until(lambda: any(call.last_seconds > restarted or call.code is not None for call in met))
    until(lambda: not any(lives(pid) for pid in old))


def _down(server: Server) -> list[str]:
    return [line for line in server.log if "engine down: " in line]


def serve_and_strike(folder: Path, seed: int, victims: Iterable[int], fault: Fault = KILLED, ranks: int = 1) -> Survived:
    """One server of so many ranks, of which these are lost one after the other under load, and the history of its calls."""
    options = ("--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-gib", "0.05", "--cuda-graph-max-batch", "16")
    with serving(folder, *options, "--tensor-parallel-size", str(ranks), device=DEVICE) as server:
        expected = undisturbed(server, folder)
        load = Load(server, seed, expected)
        with load.going_on():
            for victim in victims:
                strike(server, load, victim, fault, ranks)
            ended = load.num_ended
            until(lambda: load.num_ended >= ended + LEAST_STREAMS, seconds=CALL_SECONDS)
        until(lambda: server.metrics()["tessera_kv_blocks_used"] == 0)
        restarts = server.metrics()["tessera_engine_restarts_total"]
        return Survived(judge(load.calls, expected), load.calls, expected, restarts)
