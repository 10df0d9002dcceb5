"""In which order a rank takes plans, launches steps and answers them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from serve.engine.plan import Span, StepPlan, StepResult
from serve.types import SequenceId
from serve.worker import wire
from serve.worker.device_faults import fault
from serve.worker.progress import Progress
from serve.worker.step_loop import StepLoop
from serve.worker.vitals import LastWords, Vitals

ALONE = 900
"""Plans from this number on may not be launched before what is under way is settled."""
SPANS = (Span(sequence=SequenceId(1), start=0, count=1),)


class _Runner:
    """A rank whose device has computed as much as a test says."""

    may_be_overtaken, goes_ahead = False, True

    def __init__(self) -> None:
        self.did: list[str] = []
        self.done: set[int] = set()
        self.looked: Callable[[], object] = lambda: None
        """Called where somebody looks whether a step is done."""
        self.fails = ""

    def _do(self, what: str) -> None:
        if what == self.fails:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        self.did.append(what)

    def follows(self, plan: StepPlan) -> bool:
        return plan.step < ALONE and plan.swap is None

    def launch(self, plan: StepPlan, *, follows: bool) -> Any:
        assert follows == self.follows(plan)
        self._do(f"launch {plan.step}")

        def is_done() -> bool:
            self.looked()
            if self.fails == f"look {plan.step}":
                raise torch.AcceleratorError("CUDA error: unspecified launch failure")
            return plan.step in self.done

        return SimpleNamespace(step=plan.step, is_done=is_done)

    def settle(self, launched: Any) -> StepResult:
        self._do(f"settle {launched.step}")
        return StepResult(step=launched.step)

    def execute(self, plan: StepPlan) -> StepResult:
        self._do(f"execute {plan.step}")
        return StepResult(step=plan.step)

    def take(self, plan: StepPlan) -> StepResult:
        self._do(f"take {plan.step}")
        return StepResult(step=plan.step)


class _Profiler:
    def __init__(self, did: list[str]) -> None:
        self._did = did
        self.turns_on: Iterator[bool] = itertools.repeat(False)
        """What whoever looks finds, look by look."""

    @property
    def is_on(self) -> bool:
        return next(self.turns_on)

    def attend(self, steps: socket.socket) -> None:
        self._did.append("attend")

    def record(self, plan: StepPlan, execute: Callable[[StepPlan], StepResult]) -> StepResult:
        self._did.append("record")
        return execute(plan)


class _Rank:
    def __init__(self, server: socket.socket, steps: socket.socket, pulse: socket.socket) -> None:
        self._server = server
        self.runner = _Runner()
        self.did, self.progress, self.profiler = self.runner.did, Progress(), _Profiler(self.runner.did)
        orders: Any = SimpleNamespace(exchange=self.runner, profiler=self.profiler)
        runner: Any = self.runner
        self.loop = StepLoop(
            runner, orders, steps, self.progress, pulse, lambda error, plan: fault(error, "cuda:0", f"in step {plan.step}")
        )

    def send(self, *numbers: int, swap: int | None = None) -> None:
        for number in numbers:
            wire.send(self._server, wire.encode(StepPlan(step=number, spans=() if swap else SPANS, swap=swap)))

    def turns(self, count: int) -> list[str]:
        """What it does in so many turns."""
        before = len(self.did)
        for _ in range(count):
            self.loop.turn()
        return self.did[before:]

    def answered(self) -> int:
        return wire.decode_result(wire.receive(self._server)).step


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, ...]]:
    (server, steps), (heard, pulse) = socket.socketpair(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server, steps, heard, pulse:
        for end in (server, steps):
            end.settimeout(60.0)
        yield server, steps, heard, pulse


@pytest.fixture
def rank(ends: tuple[socket.socket, ...]) -> _Rank:
    server, steps, _, pulse = ends
    return _Rank(server, steps, pulse)


def test_a_plan_that_is_there_is_launched_before_the_step_is_answered(rank: _Rank) -> None:
    rank.send(1, 2, 3)
    assert rank.turns(3) == ["launch 1", "launch 2", "settle 1", "launch 3", "settle 2"]
    assert [rank.answered(), rank.answered()] == [1, 2]
    rank.runner.done |= {3}
    assert rank.turns(1) == ["settle 3"]
    assert rank.answered() == 3
    assert rank.progress.count == 6, "each plan, when it came and when it was done"


def test_a_step_that_is_done_is_answered_where_no_plan_came(rank: _Rank) -> None:
    rank.runner.done |= {1}
    rank.send(1)
    assert rank.turns(2) == ["launch 1", "settle 1"]
    assert rank.answered() == 1


def test_a_plan_that_comes_while_the_device_computes_is_launched_at_once(rank: _Rank) -> None:
    """It looks again and again, for the plan and at the device."""
    looks: list[int] = []

    def looked() -> None:
        looks.append(1)
        if len(looks) == 5:
            rank.send(2)

    rank.runner.looked = looked
    rank.send(1)
    assert rank.turns(2) == ["launch 1", "launch 2", "settle 1"]
    assert len(looks) == 5


def test_a_plan_that_needs_the_tokens_waits_for_them_and_lets_the_next_one_follow(rank: _Rank) -> None:
    rank.send(1, ALONE, 3)
    assert rank.turns(2) == ["launch 1", "settle 1", f"launch {ALONE}"]
    assert rank.turns(1) == ["launch 3", f"settle {ALONE}"]
    assert [rank.answered(), rank.answered()] == [1, ALONE]


def test_weights_are_exchanged_with_nothing_under_way(rank: _Rank) -> None:
    rank.send(1)
    rank.send(2, swap=7)
    assert rank.turns(2) == ["launch 1", "settle 1", "take 2"]
    assert [rank.answered(), rank.answered()] == [1, 2]


def test_steps_are_recorded_one_by_one(rank: _Rank) -> None:
    rank.send(1, 2)
    rank.turns(1)
    rank.profiler.turns_on = itertools.repeat(True)
    assert rank.turns(1) == ["settle 1", "attend", "record", "execute 2"]
    rank.profiler.turns_on = itertools.repeat(False)
    rank.send(3)
    assert rank.turns(1) == ["launch 3"]
    assert [rank.answered(), rank.answered()] == [1, 2]


def test_a_recording_that_begins_while_a_plan_is_waited_for_has_it(rank: _Rank) -> None:
    def looked() -> None:
        rank.profiler.turns_on = itertools.repeat(True)
        rank.send(2)

    rank.runner.looked = looked
    rank.send(1)
    assert rank.turns(2) == ["launch 1", "settle 1", "record", "execute 2"]


@pytest.mark.parametrize("looks", range(5))
def test_a_recording_may_begin_at_any_moment(looks: int, rank: _Rank) -> None:
    """Another thread begins it: steps are answered in their order."""
    rank.send(1, 2, 3)
    rank.turns(1)
    rank.profiler.turns_on = itertools.chain(itertools.repeat(False, looks), itertools.repeat(True))
    rank.runner.done |= {1, 2, 3}
    while not {"settle 2", "execute 2"} & set(rank.did):
        rank.turns(1)
    assert [rank.answered(), rank.answered()] == [1, 2]


def test_a_plan_goes_before_an_answer_where_both_are_there(rank: _Rank) -> None:
    """The device has nothing to do meanwhile."""
    rank.send(1, 2)
    rank.runner.done |= {1}
    assert rank.turns(2) == ["launch 1", "launch 2", "settle 1"]


def test_who_is_not_ahead_of_what_it_computes_takes_a_plan_when_it_has_answered(rank: _Rank) -> None:
    rank.runner.goes_ahead = False  # type: ignore[misc]
    rank.send(1, 2)
    assert rank.turns(2) == ["execute 1", "execute 2"]


@pytest.mark.parametrize(("fails", "step"), [("launch 2", 2), ("settle 1", 1), ("look 1", 1)])
def test_a_device_that_fails_is_told_with_the_step_that_met_it(
    fails: str, step: int, rank: _Rank, ends: tuple[socket.socket, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", end)
    rank.runner.fails = fails
    rank.send(*((1,) if fails.startswith("look") else (1, 2)))
    with pytest.raises(SystemExit):
        rank.turns(2)
    ends[2].setblocking(False)
    vitals = Vitals(1, 0, ends[2], 0.0)
    vitals.listen(1.0)
    assert vitals.last_words == LastWords("device", f"cuda:0 failed in step {step}: CUDA error: unspecified launch failure")


def test_it_ends_with_the_server(rank: _Rank, ends: tuple[socket.socket, ...]) -> None:
    rank.send(1)
    rank.turns(1)
    ends[0].close()
    with pytest.raises(wire.ConnectionLost):
        rank.loop.run()
