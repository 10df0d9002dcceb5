"""A rank is killed at a moment when its server does something else than serve: in a reload, a drain, a start."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import psutil

from serve.v1 import admin_pb2
from serve.worker.rank_loop import RANK_NAME
from tests.chaos.case import (
    RANKS,
    Case,
    Field,
    Report,
    at_a_random_moment,
    goes_on,
    ranks_of,
    streams_under_way,
    under_load,
)  # fmt: skip
from tests.chaos.history import Call, Load, Verdict, judge, run, was_refused, was_unavailable
from tests.chaos.leftovers import Leftovers
from tests.support.models import save_step
from tests.support.server import Server, serving, started, until

_PATIENT = ("--drain-seconds", "300")
"""What is in flight has time to end, however busy the machine is."""
_ENDS_OF_A_RELOAD = {"OK", "UNAVAILABLE", "FAILED_PRECONDITION"}
_POSITIONS = (512, 640)
"""Positions that ``config.json`` says in turn: another model to the server, which says the same to all that is asked here."""


class _Run:
    """A folder that a training run writes: the same weights, step after step."""

    def __init__(self, field: Field) -> None:
        self._folder = field.folder("run")
        self.root = self._folder / "run"
        self._step = 0

    def save(self, positions: int) -> None:
        """The next checkpoint."""
        self._step += 1
        source = self._folder / f"source-{self._step}"
        save_step(self.root, self._step, "gpt_neox", source, max_position_embeddings=positions)


def _reload(server: Server) -> str:
    """How ``Admin.Reload`` ends."""
    try:
        server.admin.Reload(admin_pb2.ReloadRequest(), timeout=400)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


class _Aside(threading.Thread):
    """A reload that goes on while something happens."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.code = ""
        self.start()

    def run(self) -> None:
        self.code = _reload(self._server)

    def end(self) -> str:
        """Wait for it; how it ended."""
        self.join()
        return self.code


def _kill_one(server: Server, draw: random.Random) -> list[int]:
    """Kill one of the ranks that there are, or will be in a moment; returns those that there were."""
    while True:
        there = until(server.rank_pids)
        with suppress(ProcessLookupError):  # it was due to end, and did
            os.kill(draw.choice(there), signal.SIGKILL)
            return there


def _reloads(fault: str, positions: tuple[int, ...], may_end: Callable[[Call], bool] | None, rounds: int) -> Case:
    """
    Args:
        positions: of the checkpoints that are saved in turn.
        may_end: how calls may end that come meanwhile.
    """

    def run_(field: Field, report: Report, rounds: int) -> None:
        draw, training = field.draw(fault), _Run(field)
        training.save(positions[-1])
        with (
            serving(training.root, *RANKS, *_PATIENT, program=field.program) as server,
            under_load(field, report, server, may_end) as (load, leftovers),
        ):
            streams_under_way(load)
            training.save(positions[0])
            began = time.monotonic()
            report.expect(_reload(server) == "OK", "a reload without a fault failed")
            takes = time.monotonic() - began
            for number in field.turns(report, rounds):
                goes_on(load)
                streams_under_way(load)
                training.save(positions[(number + 1) % len(positions)])
                leftovers.saw(ranks_of(server))
                reload = _Aside(server)
                at_a_random_moment(draw, takes)
                leftovers.saw(_kill_one(server, draw))
                code = reload.end()
                report.count(f"reloads that ended {code}")
                report.expect(code in _ENDS_OF_A_RELOAD, f"a reload ended {code}")
                until(lambda: server.health() == "SERVING")
            goes_on(load)

    return Case(fault, run_, rounds)


def _drain(field: Field, report: Report, rounds: int) -> None:
    draw, expected = field.draw("drain"), field.expected
    for _ in field.turns(report, rounds):
        leftovers = Leftovers()
        with serving(field.model, *RANKS, *_PATIENT, program=field.program) as server:
            leftovers.saw(ranks_of(server))
            load = Load(server, draw.randrange(1 << 30), expected)
            with load.going_on():
                streams_under_way(load)
                server.process.send_signal(signal.SIGTERM)
                at_a_random_moment(draw, 0.5)
                leftovers.saw(_kill_one(server, draw))
                load.stop()
            report.expect(server.process.wait(timeout=400) == 0, "a server that drained did not end with 0")
        report.judge(load, expected, was_unavailable)
        report.count("cut short", sum(was_unavailable(call) and not was_refused(call) for call in load.calls))
        left = leftovers.left()
        report.expect(not left, f"left over: {left}")


def _ranks_below(pid: int) -> list[int]:
    """Ranks among the processes that a server has started."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{child.pid}/comm").read_text().startswith(RANK_NAME):
                found.append(child.pid)
    return found


def _start(field: Field, report: Report, rounds: int) -> None:
    draw, expected = field.draw("start"), field.expected
    for _ in field.turns(report, rounds):
        leftovers = Leftovers()
        with started(field.model, *RANKS, program=field.program) as (process, log):
            victims = until(lambda: process.poll() is None and _ranks_below(process.pid), every=0.002)
            leftovers.saw(victims)
            at_a_random_moment(draw, 0.5)
            with suppress(ProcessLookupError):
                os.kill(draw.choice(victims), signal.SIGKILL)
            assert process.stdout is not None
            line = process.stdout.readline()
            if line.startswith("tessera ready "):  # it was too late to keep the server from serving
                report.count("served all the same")
                server = Server(process, dict(word.split("=", 1) for word in line.split()[2:]), log)
                call = Call(min(expected))
                run(server.inference, call)
                report.expect(
                    judge([call], expected) == Verdict(1, {}, 0, {}), f"an answer after the start is not well: {call.code}"
                )
                leftovers.saw(ranks_of(server))
                report.expect(server.stop() == 0, "a server that was started in spite of it did not end with 0")
            else:
                report.count("ended")
                report.expect(process.wait(timeout=400) == 1, "a server whose rank was killed in the start did not end with 1")
        told = next((number for number, entry in enumerate(log) if "Traceback" in entry), None)
        report.expect(told is None, f"a traceback in the log: {'; '.join(map(str.strip, log[told:]))}")
        left = leftovers.left()
        report.expect(not left, f"left over: {left}")
    with field.server() as server:
        call = Call(max(expected))
        run(server.inference, call)
        report.expect(judge([call], expected) == Verdict(1, {}, 0, {}), "the next start does not serve well")


CASES: dict[str, Case] = {
    "reload": _reloads("a rank is killed while other weights of the same model are taken", (512,), None, 5),
    "reload-model": _reloads("a rank is killed while another model is loaded", _POSITIONS, was_refused, 5),
    "drain": Case("a rank is killed after SIGTERM", _drain, 3),
    "start": Case("a rank is killed while the server starts", _start, 5),
}
