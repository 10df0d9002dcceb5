"""The whole server is killed, and another one started in its place."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Collection

import psutil

from serve.client import Client
from tests.chaos.case import (
    RANKS,
    Case,
    Field,
    Report,
    at_a_random_moment,
    goes_on,
    ranks_of,
    streams_under_way,
)  # fmt: skip
from tests.chaos.history import CALL_SECONDS, Call, Load, judge, script, was_refused, was_unavailable
from tests.chaos.leftovers import Leftovers
from tests.support.server import serving, until

_CALLERS = 8
_AGAIN_AND_AGAIN = 100_000
"""Attempts of a client: until there is a server again."""


class _Callers:
    """The Python client's calls, which it makes again by itself as often as it must."""

    def __init__(self, address: str, draw: random.Random, scripts: Collection[int]) -> None:
        self.calls = [Call(number) for number in draw.choices(sorted(scripts), k=_CALLERS)]
        self._address = address
        self._threads = [threading.Thread(target=self._run, args=(call,), daemon=True) for call in self.calls]
        for thread in self._threads:
            thread.start()

    def _run(self, call: Call) -> None:
        request = script(call.script)
        options = {"temperature": request.sampling.temperature, "max_new_tokens": request.stopping.max_new_tokens}
        if request.sampling.temperature:
            options |= {
                "seed": request.sampling.seed,
                "top_p": request.sampling.top_p,
                "repetition_penalty": request.sampling.repetition_penalty,
            }
        with Client(self._address, retries=_AGAIN_AND_AGAIN) as client:
            answer = client.generate(list(request.token_ids.ids), timeout=CALL_SECONDS, ignore_eos=True, **options)  # type: ignore[arg-type]  # a table of options
        call.ids, call.code, call.num_ends = list(answer.token_ids), "OK", 1

    def end(self) -> list[Call]:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join(CALL_SECONDS)
        return self.calls


def _killed(field: Field, report: Report, rounds: int) -> None:
    draw, expected = field.draw("killed"), field.expected
    field.close()
    port: tuple[str, ...] = ()
    for _ in field.turns(report, rounds):
        leftovers = Leftovers()
        with serving(field.model, *RANKS, *port, exit_code=-signal.SIGKILL, program=field.program) as server:
            load = Load(server, draw.randrange(1 << 30), expected)
            with load.going_on():
                streams_under_way(load)
                callers = _Callers(server.address, draw, expected)
                until(lambda server=server: server.metrics()["tessera_num_requests_running"] > 0)  # type: ignore[misc]
                at_a_random_moment(draw, 0.5)
                ranks_of(server)
                leftovers.saw([child.pid for child in psutil.Process(server.process.pid).children(recursive=True)])
                server.process.kill()
                load.stop()
        report.judge(load, expected, was_unavailable)
        report.count("cut short", sum(was_unavailable(call) and not was_refused(call) for call in load.calls))
        port = ("--port", server.address.rpartition(":")[2])
        with serving(field.model, *RANKS, *port, program=field.program) as server:
            left = leftovers.left(still_used=ranks_of(server))
            report.expect(not left, f"left over: {left}")
            again = judge(callers.end(), expected)
            report.count("calls that the client made again", again.calls)
            report.expect(not again.lost and not again.wrong, f"calls that were made again: {again.lost}, {again.wrong} wrong")
            load = Load(server, draw.randrange(1 << 30), expected)
            with load.going_on():
                goes_on(load)
            report.judge(load, expected)


CASES: dict[str, Case] = {"server": Case("the server is killed, and another one started at its port", _killed, 2)}
