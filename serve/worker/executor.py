"""The ranks as the engine sees them: started, fed with plans, watched, ended."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from host import limits
from serve.config import ServerConfig
from serve.engine.executor import ExecutorDied, Loss, ModelFacts, Prepared, Unlike
from serve.engine.plan import StepPlan, StepResult
from serve.errors import RankStartError
from serve.worker import wire
from serve.worker.orders import Orders
from serve.worker.preparation import Preparation
from serve.worker.profiling import Profiling
from serve.worker.rank import Rank, connected
from serve.worker.rank_output import RankOutput
from serve.worker.rank_process import NewRank, ProgramStarter, RankStarter, rank_environment
from serve.worker.vitals import Vitals, furthest_behind, stalled

_REAP_SECONDS: Final = 10.0
_LOSS_SECONDS: Final = 1.0
"""After a connection is lost: for its rank's death to be seen."""
_BUFFERED_BYTES: Final = 1 << 16
"""A plan that an empty socket takes whole, on every Linux, while nobody reads."""
_LOOK_SECONDS: Final = 0.5
"""How often whoever waits for ranks that load looks whether they were stopped meanwhile."""

_log = logging.getLogger(__name__)


class RankExecutor:
    """A group of ranks that live and die together.

    ``start``, ``launch``, ``wait``, ``collect`` and ``execute`` belong to one thread, which must outlive the ranks: the kernel
    ends them with it. Everything else may be called from another.
    """

    def __init__(self, config: ServerConfig, starter: RankStarter | None = None) -> None:
        """Nothing is started yet.

        Args:
            starter: makes the processes; each a program of its own without it.
        """
        self._config = config
        self._starter = starter or ProgramStarter()
        self._ranks: list[Rank] = []
        self._answers = config.model.num_ranks - config.model.tensor_parallel_size
        """The rank that has the results: the first of the last stage."""
        self._under_way: deque[int] = deque()
        """Numbers of the steps that the ranks were given and have not answered."""
        self._overtaking: int | None = None
        """The one of them that may be answered before the oldest."""
        self._received: deque[StepResult] = deque()
        """Results that came before they were asked for."""
        self._closed = False
        self._ready = False
        self._on_device = False
        self._called: Callable[[int], str] = "rank {}".format  # with its GPU, too, once that is known
        self._orders: Orders | None = None
        self._prepares: Preparation | None = None
        self._kills_before = limits.memory_kills()
        self._lock = threading.Lock()

    def start(self) -> ModelFacts:
        """Start the ranks and wait until every one has loaded its part.

        Raises:
            ConfigError: the checkpoint or an option is at fault.
            RankStartError: a rank failed, took longer than ``supervisor.start_timeout_seconds``, or ``close`` was called.
        """
        model = self._config.model
        # The ranks meet through a file without a name: no port is opened for it, and nothing is left however they end.
        # The same of what they exchange activations through, those of each stage among themselves.
        files: list[int] = []
        try:
            files.append(rendezvous := os.memfd_create("tessera-rendezvous"))
            files += (shared := [os.memfd_create("tessera-shared") for _ in range(model.pipeline_parallel_size)])
            for number in range(model.num_ranks):
                self._unless_closed()
                rank = self._spawn(number, model.num_ranks, rendezvous, shared[number // model.tensor_parallel_size])
                with self._lock:
                    if not self._closed:
                        self._ranks.append(rank)
                if self._closed:  # meanwhile, by somebody who could not know of this rank
                    self._end([rank])
                self._unless_closed()
                try:
                    wire.send(rank.steps, wire.encode_config(self._config))
                except wire.ConnectionLost:
                    raise RankStartError(self._lost_while_it_started(rank)) from None
            facts = self._wait_until_ready()
            with self._lock:
                self._ready, self._called = True, facts.called
                self._on_device = facts.device != "cpu"
            return facts
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):  # no descriptors, no processes: that may pass
                raise RankStartError(f"the ranks could not be started: {error}") from error
            raise
        finally:
            for descriptor in files:
                os.close(descriptor)

    def _spawn(self, number: int, size: int, rendezvous: int, shared: int) -> Rank:
        # Whatever fails, no descriptor stays open while its error is remembered.
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as always:
            ours, theirs = connected(failed, always, socket.SOCK_STREAM)
            our_orders, their_orders = connected(failed, always, socket.SOCK_STREAM)
            our_pulse, their_pulse = connected(failed, always, socket.SOCK_SEQPACKET)
            output = RankOutput("serve.rank", number)
            always.callback(output.handed_over)
            process = self._starter.start(
                NewRank(
                    number=number,
                    environment=rank_environment(number, size, self._config.model.device, self._config.model.gpus),
                    sockets=(theirs.fileno(), their_orders.fileno(), their_pulse.fileno()),
                    rendezvous=rendezvous,
                    shared=shared,
                    log_level=logging.getLevelName(logging.getLogger("serve").getEffectiveLevel()),
                    output=output.writes,
                ),
                unless=self._unless_closed,
            )
            failed.pop_all()
        our_pulse.setblocking(False)
        now = time.monotonic()
        _log.info("rank %d started: process %d", number, process.pid)
        vitals = Vitals(number, process.pid, our_pulse, now)
        return Rank(number, process, ours, our_orders, our_pulse, now, vitals, output, self._kills_before)

    def _unless_closed(self) -> None:
        if self._closed:
            raise RankStartError("the ranks were stopped while they started")

    def _wait_until_ready(self) -> ModelFacts:
        deadline = time.monotonic() + self._config.supervisor.start_timeout_seconds
        facts: dict[int, ModelFacts] = {}
        failures: list[wire.Failed] = []
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.steps, selectors.EVENT_READ, rank)
            while len(facts) + len(failures) < len(self._ranks) and all(failure.by_others for failure in failures):
                left = deadline - time.monotonic()
                ready = selector.select(timeout=max(0.0, min(left, _LOOK_SECONDS)))
                self._unless_closed()
                if not ready and left <= 0.0:
                    if failures:
                        break
                    limit = self._config.supervisor.start_timeout_seconds
                    raise RankStartError(f"the ranks were not ready within {limit:.0f} s")
                for key, _ in ready:
                    rank = key.data
                    selector.unregister(rank.steps)
                    report = self._first_report(rank)
                    if isinstance(report, wire.Ready):
                        facts[rank.number] = report.facts
                    elif isinstance(report, wire.Failed):
                        failures.append(report)
                        # Another rank's end, which would explain it, is seen in a moment.
                        deadline = min(deadline, time.monotonic() + _LOSS_SECONDS)
        if failures:
            # A configuration error explains the others' deaths, not the other way round; an exchange that failed explains none.
            raise min(failures, key=lambda failure: (not failure.configured, failure.by_others)).error()
        return dataclasses.replace(facts[0], gpus=tuple(gpu for number in sorted(facts) for gpu in facts[number].gpus))

    def _first_report(self, rank: Rank) -> wire.Report:
        try:
            return wire.decode_report(wire.receive(rank.steps))
        except wire.ConnectionLost:
            return wire.Failed(self._lost_while_it_started(rank), configured=False)
        except wire.Malformed as error:
            return wire.Failed(f"rank {rank.number} started with {error}", configured=False)

    def _lost_while_it_started(self, rank: Rank) -> str:
        """What became of a rank whose connection has gone: the kernel closes that a moment before the dead can be collected."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(_LOSS_SECONDS)
        return f"rank {rank.number} ended while it started: {rank.how_it_ended()}"

    def launch(self, plan: StepPlan, *, overtakes: bool = False) -> None:
        """Send one plan to every rank.

        Ranks read it when they have computed what they were sent before. A large one waits for that here: it would not fit
        into the socket, nor would perhaps the result that a rank tries to send meanwhile.

        Args:
            overtakes: whether the rank may compute it before what it was sent last; several ranks never do.

        Raises:
            ExecutorDied: a rank is gone, or ``close`` was called meanwhile.
        """
        payload, overtakes = wire.encode(plan), overtakes and len(self._ranks) == 1
        if self._under_way and len(payload) > _BUFFERED_BYTES:
            self._received.append(self._receive())
        try:
            for rank in self._ranks:
                wire.send(rank.steps, payload, overtakes=overtakes)
        except wire.ConnectionLost as error:
            raise self._died(error) from error
        self._under_way.append(plan.step)
        if overtakes:
            self._overtaking = plan.step

    def wait(self, seconds: float, bell: int | None = None) -> bool:
        """Wait until a result that is under way arrives, or its rank is lost; at most so many seconds.

        Args:
            bell: a descriptor that ends the wait as well when there is something to read from it.

        Returns:
            Whether ``collect`` would answer at once.
        """
        if self._received or not self._under_way:
            return bool(self._received)
        return wire.await_message(self._ranks[self._answers].steps, seconds, bell)

    def collect(self) -> StepResult:
        """Wait for the result of the oldest plan that was sent, or of one that overtook it.

        Raises:
            ExecutorDied: a rank is gone, or ``close`` was called meanwhile.
        """
        return self._received.popleft() if self._received else self._receive()

    def _receive(self) -> StepResult:
        step, number = self._under_way[0], self._answers
        try:
            result = wire.decode_result(wire.receive(self._ranks[number].steps))
        except (wire.ConnectionLost, IndexError) as error:
            raise self._died(error) from error
        except wire.Malformed as error:
            raise ExecutorDied(f"rank {number} answered step {step} with {error}") from None
        if result.step not in (step, self._overtaking):
            raise ExecutorDied(f"step {step} was answered by step {result.step}")
        self._under_way.remove(result.step)
        if self._overtaking not in self._under_way:
            self._overtaking = None
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        """Send one plan while nothing is under way, and wait for its result.

        Raises:
            ExecutorDied: a rank is gone, or ``close`` was called meanwhile.
        """
        self.launch(plan)
        return self.collect()

    def _died(self, error: Exception) -> ExecutorDied:
        return ExecutorDied(self._cause_of_loss() or Loss(f"the ranks' connection was lost: {error}", "died"))

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike:
        """Have the ranks make the checkpoint of ``config`` ready to be taken by a plan with ``swap``, while steps go on.

        Raises:
            ConfigError: the checkpoint is at fault.
            RankStartError: a rank could not do it.
            ExecutorDied: the ranks are gone, or do not answer.
        """
        return self._preparation().prepare(config, number)

    def forget_prepared(self) -> None:
        """Have the ranks give back the memory of what was prepared and not taken, or of what was served before."""
        self._preparation().forget()

    def profiling(self) -> Profiling:
        """What the ranks record of their steps. ``ExecutorDied`` once ``close`` was called."""
        return Profiling(self._orders_to_ranks())

    def _preparation(self) -> Preparation:
        orders = self._orders_to_ranks()
        with self._lock:
            self._prepares = self._prepares or Preparation(orders, shared_memory=not self._on_device)
            return self._prepares

    def _orders_to_ranks(self) -> Orders:
        with self._lock:
            if self._closed:
                raise ExecutorDied("the ranks were stopped")
            if self._orders is None:
                self._orders = Orders([rank.orders for rank in self._ranks], self._config.supervisor.start_timeout_seconds)
            return self._orders

    def _cause_of_loss(self) -> str | None:
        """What ``dead_rank`` says of a loss, a moment after the connection has gone; ``None`` if it says nothing."""
        deadline = time.monotonic() + _LOSS_SECONDS
        while (cause := self.dead_rank()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return cause

    def heartbeat_ages(self) -> tuple[float, ...]:
        """Seconds since each rank was last heard of."""
        with self._lock:
            now = self._listen()
            return tuple(now - rank.vitals.heard for rank in self._ranks)

    def dead_rank(self) -> str | None:
        """A sentence about a rank that is gone or frozen, or hangs while it loads; ``None`` while all are well.

        A rank that ends while it loads says why, and ``start`` with it.
        """
        with self._lock:
            if not self._ready:
                return None if self._closed else self._stalled()
            if self._closed:
                return "the ranks were stopped"
            dead = [(code, rank) for rank in self._ranks if (code := rank.process.poll()) is not None]
            self._listen()
        if dead:
            _, first = min(dead, key=lambda each: (each[1].comes_behind(each[0]), each[1].number))
            words = first.vitals.last_words
            for_memory = first.killed_for_memory() or (words is not None and words.kind == "memory")
            return Loss(f"rank {first.number} died: {first.how_it_ended()}", "memory" if for_memory else "died")
        limit = self._config.supervisor.heartbeat_timeout_seconds
        for number, age in enumerate(self.heartbeat_ages()):
            if age > limit:
                return Loss(f"{self._called(number)} is frozen: no heartbeat for {age:.1f} s", "frozen")
        return None

    def memory(self) -> tuple[tuple[int, int], ...]:
        """Bytes that each rank has resident, pages that ranks share counted for each; and of its device, by its own word."""
        with self._lock:
            self._listen()
            return tuple((rank.vitals.resident_bytes(), rank.vitals.device_bytes) for rank in self._ranks)

    def hanging_rank(self) -> int | None:
        """The rank that the others wait for in a step; ``None`` where that cannot be told."""
        with self._lock:
            self._listen()
            return furthest_behind([rank.vitals for rank in self._ranks])

    def _listen(self) -> float:
        now = time.monotonic()
        for rank in self._ranks:
            rank.vitals.listen(now)
        return now

    def _stalled(self) -> str | None:
        now = self._listen()
        for rank in self._ranks:
            rank.vitals.look(now)
        living = [rank.vitals for rank in self._ranks if rank.process.poll() is None]
        sentence = stalled(living, now, self._config.supervisor.load_stall_seconds)
        return None if sentence is None else Loss(sentence, "start")

    def dump_stacks(self) -> None:
        """Ask every rank to print the stacks of its threads on stderr."""
        with self._lock:
            for rank in self._ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """Kill what lives, collect it, and give everything back. Once is enough, twice does no harm."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._end(self._ranks)

    def _end(self, ranks: list[Rank]) -> None:
        ended = {rank.number: rank.how_it_ended() for rank in ranks if rank.process.poll() is not None}
        for rank in ranks:
            if rank.process.poll() is None:
                rank.process.kill()  # also ends a frozen one
        for rank in ranks:
            # shutdown, not only close: a thread that waits in ``collect`` must wake up, whatever becomes of the ranks.
            for end in (rank.steps, rank.orders, rank.pulse):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for rank in ranks:
            self._collect(rank, ended.get(rank.number, "by the server"))
            for end in (rank.steps, rank.orders, rank.pulse):
                end.close()

    @staticmethod
    def _collect(rank: Rank, how: str) -> None:
        """Wait for a killed process. One that waits in the kernel, for a device or a file system, may not die for long."""
        try:
            rank.process.wait(timeout=_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            _log.error("rank %d was killed and does not end: process %d hangs in the kernel", rank.number, rank.process.pid)
            return
        rank.output.wait()
        lived = time.monotonic() - rank.started
        _log.info("rank %d ended after %.1f s: %s (process %d)", rank.number, lived, how, rank.process.pid)
