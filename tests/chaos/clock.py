"""The clock that tells the date is stepped while the server serves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.chaos.case import RANKS, Case, Field, Report, goes_on, ranks_of, restarts, streams_under_way, under_load
from tests.chaos.mutant import STEPPED
from tests.support.server import serving, until

_HOUR = 3600


def _stepped(field: Field, report: Report, rounds: int) -> None:
    draw, expected = field.draw("clock"), field.expected
    assert expected
    place = field.folder("clock") / "offset"
    place.write_text("0")

    def step(seconds: int) -> None:
        after = Path(f"{place}.new")
        after.write_text(str(seconds))
        after.replace(place)  # at no moment is it empty

    with serving(field.model, *RANKS, program=("tests.chaos.mutant", STEPPED, str(place))) as server:
        with under_load(field, report, server) as (load, leftovers):
            ranks, before = ranks_of(server), restarts(server)
            for _ in range(rounds):
                for seconds in (_HOUR, -_HOUR, 0):
                    streams_under_way(load)
                    step(seconds)
                    goes_on(load)
            report.expect(restarts(server) == before and ranks_of(server) == ranks, "ranks were started again")
            step(-24 * _HOUR)
            leftovers.saw(ranks)
            os.kill(draw.choice(ranks), signal.SIGKILL)
            until(lambda: restarts(server) > before)
            goes_on(load)
        days = {line.split("T")[0] for line in server.log if "T" in line[:11]}
        report.expect(len(days) > 1, "the server's clock was not stepped")


CASES: dict[str, Case] = {
    "clock": Case("the clock is stepped to and fro by an hour, and by a day before a rank is killed", _stepped, 2)
}
