"""A rank's thread that computes: one plan after another, until the server closes its end."""

from __future__ import annotations

import logging
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from serve.engine.plan import StepPlan, StepResult
from serve.worker import wire
from serve.worker.launched import LaunchedStep
from serve.worker.order_loop import OrderLoop
from serve.worker.progress import Progress
from serve.worker.runner import Runner
from serve.worker.vitals import LastWords

FaultOf = Callable[[Exception, StepPlan], LastWords | None]
"""What is to be said of a step that failed, where the device is to blame."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


class StepLoop:
    """Computes plans in the order in which they come, and sends what they gave.

    Where a device replays steps, the next plan is launched while one is computed, if it is there by then and may be.
    """

    def __init__(
        self,
        runner: Runner,
        order_loop: OrderLoop,
        steps: socket.socket,
        progress: Progress,
        pulse: socket.socket,
        fault_of: FaultOf,
    ) -> None:
        """
        Args:
            steps: where plans come from, and results go to.
            progress: counts what comes, and what is done.
            pulse: where last words go to.
        """
        self._runner = runner
        self._exchange = order_loop.exchange
        self._profiler = order_loop.profiler
        self._steps = steps
        self._progress = progress
        self._pulse = pulse
        self._fault_of = fault_of
        self._under_way: deque[tuple[StepPlan, LaunchedStep]] = deque()
        """What was launched and not answered: two at most, and one while anything is waited for."""
        self._looks = select.poll()
        self._looks.register(steps, select.POLLIN)

    def run(self) -> None:
        """Compute for as long as there is a server.

        Raises:
            ConnectionLost: it is gone.
        """
        if self._runner.may_be_overtaken:
            self._runner.overtaking.begin(self._steps, partial(self._compute_next, self._runner.execute))
        while True:
            self.turn()

    def turn(self) -> None:
        """Wait for what is next, and do it: take a plan, or answer the one that was computed."""
        if self._profiler.is_on:
            self._answer_all()
            self._profiler.attend(self._steps)
        if self._under_way and not self._plan_comes_first():
            self._answer_oldest()
        elif self._runner.goes_ahead:
            self._launch_next()
        else:
            self._compute_next(self._execute)

    def _plan_comes_first(self) -> bool:
        """Wait for the next plan, or the end of what is computed; whether there is a plan.

        It looks without a pause, as whoever waits for a device does: a pause is a good part of a short step.
        """
        plan, launched = self._under_way[0]
        while not self._looks.poll(0):
            if self._carefully(plan, launched.is_done):
                return False
        return True

    def _launch_next(self) -> None:
        plan = self._receive()
        is_recorded = self._profiler.is_on  # which another thread may change
        follows = self._runner.follows(plan)
        if is_recorded or not follows:
            self._answer_all()
        if is_recorded or plan.swap is not None:
            self._answer(plan, self._execute)
            return
        self._under_way.append((plan, self._carefully(plan, partial(self._runner.launch, plan, follows=follows))))
        if len(self._under_way) > 1:
            self._answer_oldest()

    def _answer_all(self) -> None:
        while self._under_way:
            self._answer_oldest()

    def _answer_oldest(self) -> None:
        plan, launched = self._under_way.popleft()
        self._answer(plan, lambda _: self._runner.settle(launched))

    def _compute_next(self, execute: Callable[[StepPlan], StepResult | None]) -> None:
        self._answer(self._receive(), execute)

    def _receive(self) -> StepPlan:
        plan = wire.decode_plan(wire.receive(self._steps))
        self._progress.mark()
        return plan

    def _execute(self, plan: StepPlan) -> StepResult | None:
        this = self._runner.execute if plan.swap is None else self._exchange.take
        return self._profiler.record(plan, this) if self._profiler.is_on else this(plan)

    def _answer(self, plan: StepPlan, execute: Callable[[StepPlan], StepResult | None]) -> None:
        result = self._carefully(plan, partial(execute, plan))
        self._progress.mark()
        if result is not None:
            wire.send(self._steps, wire.encode(result))

    def _carefully(self, plan: StepPlan, act: Callable[[], T]) -> T:
        """Do a part of a step; the rank ends where its device fails in it."""
        try:
            return act()
        except Exception as error:
            if (words := self._fault_of(error, plan)) is None:
                raise
            _log.error("%s", words.sentence, exc_info=True)
            self._pulse.send(words.encode())
            logging.shutdown()
            os._exit(1)  # a device that failed may keep a process from ending in any other way
