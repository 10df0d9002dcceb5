"""Faults of a rank while its server serves: killed, frozen, hung, slow."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable

from tests.chaos.case import (
    Case,
    Field,
    Report,
    at_a_random_moment,
    goes_on,
    ranks_of,
    restarts,
    streams_under_way,
    under_load,
)  # fmt: skip
from tests.chaos.history import Load
from tests.chaos.processes import hang, slowed
from tests.support.server import Server, until

_SOON = ("--step-margin-seconds", "3", "--step-timeout-seconds", "15")
"""A step that hangs is noticed sooner than by default. On a busy machine one that does not hang may be, too."""

Strike = Callable[[Server, random.Random], None]


def _signal(number: signal.Signals) -> Strike:
    def strike(server: Server, draw: random.Random) -> None:
        os.kill(draw.choice(ranks_of(server)), number)

    return strike


def _hang(server: Server, draw: random.Random) -> None:
    hang(draw.choice(ranks_of(server)))


def _kill_again(server: Server, draw: random.Random) -> None:
    """Ranks that come to replace dead ones are killed while they start."""
    old = ranks_of(server)
    os.kill(draw.choice(old), signal.SIGKILL)
    new = until(lambda: [pid for pid in server.rank_pids() if pid not in old], every=0.001)
    os.kill(new[0], signal.SIGKILL)


def _once(server: Server, load: Load, strike: Strike, draw: random.Random) -> float:
    """One fault. Returns the seconds until a stream that it met says something again."""
    met = streams_under_way(load)
    at_a_random_moment(draw, 0.25)
    before = restarts(server)
    began = time.monotonic()
    strike(server, draw)
    until(lambda: restarts(server) > before)
    restarted = time.monotonic()
    until(lambda: any(call.last_seconds > restarted or call.code is not None for call in met))
    until(lambda: server.health() == "SERVING")
    return min((call.last_seconds for call in met if call.last_seconds > restarted), default=time.monotonic()) - began


def _case(fault: str, strike: Strike, rounds: int, *options: str) -> Case:
    def run(field: Field, report: Report, rounds: int) -> None:
        draw, seconds = field.draw(fault), []
        with field.server(*options) as server, under_load(field, report, server) as (load, leftovers):
            for _ in range(rounds):
                leftovers.saw(ranks_of(server))
                seconds.append(_once(server, load, strike, draw))
                goes_on(load)
        report.tell_seconds("seconds to the next token", seconds)

    return Case(fault, run, rounds)


def _slow(field: Field, report: Report, rounds: int) -> None:
    draw = field.draw("slow")
    with field.server() as server:
        with under_load(field, report, server) as (load, _):
            before, ranks = restarts(server), ranks_of(server)
            for _ in range(rounds):
                streams_under_way(load)
                with slowed(draw.choice(ranks)):
                    goes_on(load)
        report.expect(restarts(server) == before, "ranks were started again")
        report.expect(ranks_of(server) == ranks, "ranks were replaced")


CASES: dict[str, Case] = {
    "kill": _case("a rank is killed", _signal(signal.SIGKILL), 10),
    "freeze": _case("a rank is stopped and stays so", _signal(signal.SIGSTOP), 5),
    "kill-again": _case("a rank is killed, and one of those that come while it starts", _kill_again, 5),
    "slow": Case("a rank has a third of its time: no fault, and nothing is started again", _slow, 2),
    "hang": _case("a rank hangs in a step, though its heart beats", _hang, 5, *_SOON),
}
