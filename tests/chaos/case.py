"""What all faults have in common: a server with load on it, and what must hold when it is over."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tests.chaos.history import CALL_SECONDS, Call, Load, judge, run, undisturbed
from tests.chaos.leftovers import Held, Leftovers
from tests.support.models import save
from tests.support.server import Server, serving, until

LEAST_STREAMS = 20
"""Under way and well before a fault, or it does not count."""
MORE_CALLS = 8
"""End well after each fault, before the next one."""
RANKS = ("--tensor-parallel-size", "2", "--max-num-seqs", "64")
LOOKS = 20
"""So often a server without requests must be seen to hold blocks, before they count as leaked."""


@dataclass
class Report:
    """What became of a case."""

    fault: str
    found: list[str] = field(default_factory=list)
    """What is not well; empty if all is."""
    figures: dict[str, object] = field(default_factory=dict)
    not_run: str = ""
    """Why the case cannot be tried here; empty where it was."""

    def expect(self, holds: bool, otherwise: str) -> None:
        """Note what is not well, unless it is."""
        if not holds and otherwise not in self.found:
            self.found.append(otherwise)

    def count(self, name: str, number: float = 1) -> None:
        """Add to a figure."""
        before = self.figures.get(name, 0)
        assert isinstance(before, (int, float))
        self.figures[name] = before + number

    def tell_seconds(self, name: str, seconds: Sequence[float]) -> None:
        """Note how long something took, over all rounds."""
        if seconds:
            self.figures[name] = {"median": round(statistics.median(seconds), 2), "most": round(max(seconds), 2)}

    def judge(self, load: Load, expected: dict[int, list[int]], may_end: Callable[[Call], bool] | None = None) -> None:
        """Note what the history of a load says."""
        verdict = judge(load.calls, expected) if may_end is None else judge(load.calls, expected, may_end)
        self.count("calls", verdict.calls)
        self.count("lost", sum(verdict.lost.values()))
        self.count("wrong", verdict.wrong)
        for code, number in verdict.excused.items():
            self.count(f"ended {code} as they may", number)
        self.expect(not verdict.lost, f"lost calls: {verdict.lost}")
        self.expect(not verdict.wrong, "wrong answers")

    def to_json(self) -> dict[str, object]:
        """As it is written down."""
        well: dict[str, object] = {"not run": self.not_run} if self.not_run else {"found": self.found}
        return {"fault": self.fault, **self.figures, **well}


class Field:
    """What all cases of a run share: a model, what it says, and a folder for what they write."""

    def __init__(self, scratch: Path, seed: int, program: Sequence[str] = ("serve",)) -> None:
        """
        Args:
            program: see ``tests.support.server.started``.
        """
        self.scratch = scratch
        self.seed = seed
        self.program = program
        self.until = math.inf
        """Monotonic time after which a case begins no further round; its first one it always has."""
        self._servers = ExitStack()
        self._kept: tuple[tuple[str, ...], Server] | None = None

    def of(self, program: Sequence[str]) -> Field:
        """The same with another program, which must say what this one says."""
        other = Field(self.scratch, self.seed, program)
        other.until = self.until
        other.__dict__ |= {"model": self.model, "expected": self.expected}  # where cached properties are kept
        return other

    @cached_property
    def model(self) -> Path:
        return save("gpt_neox", self.scratch / "neox")

    @cached_property
    def expected(self) -> dict[int, list[int]]:
        """What each script says when nothing happens."""
        with self.server() as server:
            return undisturbed(server, self.model)

    @contextmanager
    def server(self, *options: str) -> Iterator[Server]:
        """A server that outlives the faults of a case: the one before, if it was asked for with these options and is well."""
        if options:  # what scripts say another server tells, which would take this one's place
            _ = self.expected
        if self._kept is None or self._kept[0] != options:
            self.close()
            self._kept = options, self._servers.enter_context(serving(self.model, *RANKS, *options, program=self.program))
        try:
            yield self._kept[1]
        except BaseException:
            kept, self._kept = self._kept, None
            if kept is not None:
                kept[1].process.kill()
            with suppress(AssertionError):  # it ended otherwise than by SIGTERM
                self._servers.close()
            raise

    @property
    def kept(self) -> Server | None:
        """The server that goes on, for the next case."""
        return None if self._kept is None else self._kept[1]

    def close(self) -> None:
        """Stop the server that was kept.

        Raises:
            AssertionError: it ended badly.
        """
        self._kept = None
        self._servers.close()

    def turns(self, report: Report, rounds: int) -> Iterator[int]:
        """The numbers of a case's rounds, for as long as it has time; they are counted."""
        for number in range(rounds):
            if number and time.monotonic() >= self.until:
                return
            report.count("rounds")
            yield number

    def draw(self, name: str) -> random.Random:
        """Random numbers of one case."""
        return random.Random(f"{self.seed}/{name}")

    def folder(self, name: str) -> Path:
        """A new empty folder."""
        number = 0
        while (made := self.scratch / f"{name}-{number}").exists():
            number += 1
        made.mkdir()
        return made


@dataclass(frozen=True)
class Case:
    """One kind of fault."""

    fault: str
    run: Callable[[Field, Report, int], None]
    """Strikes so often and notes what is not well."""
    rounds: int
    """How often, where nothing else is asked for."""


def ranks_of(server: Server) -> list[int]:
    """The ranks' processes, once both are there."""
    return until(lambda: len(pids := server.rank_pids()) == 2 and pids)


def streams_under_way(load: Load) -> list[Call]:
    """The calls that a fault will meet, once there are enough."""
    return until(lambda: len(calls := load.under_way()) >= LEAST_STREAMS and calls)


def goes_on(load: Load) -> None:
    """Wait until calls have ended well since now."""
    before = load.num_ended
    until(lambda: load.num_ended >= before + MORE_CALLS, seconds=CALL_SECONDS)


def at_a_random_moment(draw: random.Random, within_seconds: float) -> None:
    """Let some time pass: what is tried is that it does not matter when."""
    time.sleep(draw.random() * within_seconds)


def restarts(server: Server) -> float:
    """How often the ranks were started again."""
    return server.metrics()["tessera_engine_restarts_total"]


def is_leaking(server: Server) -> bool:
    """Whether blocks of the KV cache are held though there is no request, and stay so."""
    held = 0
    while held < LOOKS:
        now = server.metrics()
        if now["tessera_num_requests_running"] or now["tessera_num_requests_waiting"]:
            held = 0
        elif now["tessera_kv_blocks_used"] == 0:
            return False
        else:
            held += 1
        time.sleep(0.02)
    return True


ENDED = 'tessera_request_finished_total{reason="length"}'


@contextmanager
def under_load(
    field: Field, report: Report, server: Server, may_end: Callable[[Call], bool] | None = None, others: int = 0
) -> Iterator[tuple[Load, Leftovers]]:
    """Within, calls are made of a server that outlives them all; afterwards their history and what is left are looked at.

    Args:
        others: requests beside those that may end well meanwhile.
    """
    expected = field.expected
    run(server.inference, Call(0))  # what a server makes for its first call is there from then on
    leftovers, load, held = Leftovers(), Load(server, field.seed, expected), Held(server.process.pid)
    before = server.metrics()
    leftovers.saw(ranks_of(server))
    with load.going_on():
        yield load, leftovers
    report.judge(load, expected, may_end)
    report.expect(not is_leaking(server), "KV blocks leaked")
    after = server.metrics()
    ended = after[ENDED] - before[ENDED]
    agree = load.num_ended <= ended <= load.num_ended + others
    report.expect(agree, f"counters disagree: {ended:g} requests ended well, {load.num_ended} of the clients'")
    report.count("kept over restarts", after["tessera_requests_kept_total"] - before["tessera_requests_kept_total"])
    report.expect(server.health() == "SERVING", "the server does not serve")
    left = leftovers.left(still_used=ranks_of(server)) + held.more()
    report.expect(not left, f"left over: {left}")
