"""Ranks without processes: a hand-computable model that can be held, frozen, broken and killed, behind a real gateway."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from serve.config import AdmissionConfig, ModelConfig, RpcConfig, SchedulerConfig, ServerConfig, SupervisorConfig
from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import Executor, ExecutorDied, ModelFacts, Prepared, Unlike
from serve.engine.plan import Sampled, StepPlan, StepResult
from serve.engine.text import TextDelta
from serve.metrics import Metrics
from serve.runtime import supervisor
from serve.runtime.edition import Edition
from serve.runtime.gateway import Gateway
from serve.runtime.state import State
from serve.runtime.stream import Stream, StreamEvent
from serve.types import (
    Generation,
    RequestId,
    ResponseOptions,
    SamplingParams,
    SequenceFinished,
    SequenceId,
    StoppingParams,
    TokensOut,
)
from tests.serve.fake_executor import Deferred
from tests.serve.fake_profiling import FakeProfiling

PATIENCE_SECONDS = 60.0
"""For what other threads do; a test that works never waits so long, however busy the machine is."""
LOSING = {"requeue": False, "resume_streams": False}
"""Options of the supervisor with which calls in flight end when the ranks do."""
VOCABULARY = 97
FIRST_STEP = 7
FACTS = ModelFacts(
    family="fake",
    vocab_size=VOCABULARY,
    max_model_len=10_000,
    eos_ids=(0,),
    dtype="float32",
    device="cpu",
    num_blocks=2_000,
    block_tokens=16,
    num_parameters=1,
    checkpoint_step=FIRST_STEP,
    load_seconds=(("weights", 0.25),),
)


def next_token(token_ids: list[int], weights: int = 0) -> int:
    """The model: never the EOS id."""
    return 1 + (7 * token_ids[-1] + len(token_ids) + weights) % (VOCABULARY - 1)


def expected_ids(prompt_ids: tuple[int, ...], count: int, weights: int = 0) -> tuple[int, ...]:
    known = list(prompt_ids)
    for _ in range(count):
        known.append(next_token(known, weights))
    return tuple(known[len(prompt_ids) :])


class FakeRanks(Deferred):
    """A RankGroup. Tests reach in from the event loop's thread."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.started_on: threading.Thread | None = None
        self.facts = FACTS
        self.start_error: Exception | None = None
        self.step_error: Exception | None = None
        self.ready = threading.Event()
        self.ready.set()
        """Cleared: ``start`` waits."""
        self.open = threading.Event()
        self.open.set()
        """Cleared: steps wait."""
        self.in_step = threading.Event()
        """Set while a step waits."""
        self.hold_after: int | None = None
        """After so many steps ``open`` is cleared."""
        self.step_seconds = 0.0
        """How long each step takes."""
        self.cause: str | None = None
        self.behind: int | None = None
        """The rank that a step that hangs waits for."""
        self.num_steps = 0
        self.num_closes = 0
        self.num_looks = 0
        """How often it was asked whether a rank is dead."""
        self.num_dumps = 0
        self.alike = False
        """Whether what a reload finds differs in its weights alone."""
        self.prepare_error: Exception | None = None
        self.refused = ""
        """Why prepared weights are refused when they are to be taken."""
        self.num_forgets = 0
        self.recorded = FakeProfiling()
        self._weights = 0
        self._closed = threading.Event()
        self._num_ranks = num_ranks
        self._known: dict[SequenceId, list[int]] = {}
        self._drawn: dict[SequenceId, int] = {}

    def start(self) -> ModelFacts:
        self.started_on = threading.current_thread()
        while not self.ready.wait(0.001):
            if self._closed.is_set():
                raise ExecutorDied("closed while it started")
        if self.start_error is not None:
            raise self.start_error
        return self.facts

    def execute(self, plan: StepPlan) -> StepResult:
        self.in_step.set()
        while not self.open.wait(0.001):
            if self._closed.is_set():
                break
        self.in_step.clear()
        if self.step_seconds:
            self._closed.wait(self.step_seconds)
        if self._closed.is_set() or self.cause is not None:
            raise ExecutorDied(self.cause or "closed")
        if self.step_error is not None:
            raise self.step_error
        self.num_steps += 1
        if self.num_steps == self.hold_after:
            self.open.clear()
        return self._compute(plan)

    def _compute(self, plan: StepPlan) -> StepResult:
        for sequence in plan.dropped:
            self._known.pop(sequence, None)
        for start in plan.starts:
            self._known[start.sequence] = list(start.token_ids)
        sampled = []
        for span in plan.spans:
            known = self._known[span.sequence]
            if span.continues:
                known.append(self._drawn[span.sequence])
            known.extend(span.new_tokens)
            if span.sample:
                self._drawn[span.sequence] = next_token(known, self._weights)
                sampled.append(Sampled(sequence=span.sequence, token_id=self._drawn[span.sequence]))
        if plan.swap is not None and not self.refused:
            self._weights = plan.swap
        return StepResult(step=plan.step, sampled=tuple(sampled), refused=self.refused if plan.swap is not None else "")

    def prepare(self, config: ServerConfig, number: int) -> Prepared | Unlike:
        if self.prepare_error is not None:
            raise self.prepare_error
        return Prepared(checkpoint_step=FIRST_STEP + number, beside=True) if self.alike else Unlike("it is of another shape")

    def forget_prepared(self) -> None:
        self.num_forgets += 1

    def profiling(self) -> FakeProfiling:
        return self.recorded

    def heartbeat_ages(self) -> tuple[float, ...]:
        return (0.01,) * self._num_ranks

    def memory(self) -> tuple[tuple[int, int], ...]:
        return tuple((1000 + rank, 2000 + rank) for rank in range(self._num_ranks))

    def dead_rank(self) -> str | None:
        self.num_looks += 1
        return self.cause

    def hanging_rank(self) -> int | None:
        return self.behind

    def dump_stacks(self) -> None:
        self.num_dumps += 1

    def close(self) -> None:
        self.num_closes += 1
        self._closed.set()

    def kill(self, sentence: str = "rank 1 died: signal SIGKILL") -> None:
        self.cause = sentence


class IdText:
    """Text of a token: its id and a space."""

    def push(self, token_id: int) -> TextDelta:
        return TextDelta(f"{token_id} ")

    def finish(self) -> str:
        return ""


class Clock:
    """Monotonic seconds, with a hand on it."""

    def __init__(self) -> None:
        self.ahead_seconds = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_seconds


@dataclass
class Bench:
    """A gateway on fake ranks, and everything a test wants to see of it."""

    gateway: Gateway
    metrics: Metrics
    groups: list[FakeRanks]
    clock: Clock
    states: list[State] = field(default_factory=list)

    @property
    def ranks(self) -> FakeRanks:
        return self.groups[-1]

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"tessera_{name}", labels)
        assert found is not None, f"no series tessera_{name}{labels}"
        return found

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until a condition of other threads holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not condition():  # noqa: ASYNC110 (another thread brings it about)
                await asyncio.sleep(0.001)

    async def until_held(self) -> None:
        """Wait until ``hold_after`` steps were computed and the next one waits: nothing live can end by itself from now on."""
        await self.until(lambda: self.ranks.num_steps == self.ranks.hold_after and self.ranks.in_step.is_set())

    async def until_told(self, commands: int) -> None:
        """Wait until so many commands lie in the engine's queue: it obeys them all before its next step."""
        await self.until(lambda: self.gateway._bridge.backlog >= commands)

    async def pass_time(self, seconds: float) -> None:
        """Let the clock run ahead as if so long passed while the server runs: in leaps that it does not take for a pause."""
        ranks, leap_seconds = self.ranks, supervisor.PAUSE_SECONDS / 2
        for _ in range(math.ceil(seconds / leap_seconds)):
            looks = ranks.num_looks
            self.clock.ahead_seconds += leap_seconds
            await self.until(lambda looks=looks: ranks.num_looks > looks + 1 or ranks.num_closes)  # type: ignore[misc]

    async def until_life(self, number: int) -> None:
        """Wait until the engine has come up ``number`` times after the first."""
        await self.until(lambda: self.states.count(State.SERVING) == number + 1)

    async def until_state(self, state: State) -> None:
        await self.until(lambda: self.gateway.state is state)


def request(name: str = "r", *, prompt_ids: tuple[int, ...] = (5, 6, 7), tokens: int = 4, **changed: Any) -> Generation:
    return Generation(
        **{
            "request_id": RequestId(name),
            "prompt_ids": prompt_ids,
            "sampling": SamplingParams(),
            "stopping": StoppingParams(max_new_tokens=tokens, ignore_eos=True),
            "response": ResponseOptions(),
            "arrival_seconds": time.monotonic(),
            **changed,
        }
    )


async def read(stream: Stream) -> tuple[list[StreamEvent], Exception | None]:
    """Everything a stream gives, and how it failed."""
    events: list[StreamEvent] = []
    try:
        async for event in stream:
            events.append(event)
    except Exception as error:
        return events, error
    return events, None


def ids_of(events: list[StreamEvent], index: int = 0) -> tuple[int, ...]:
    return tuple(id_ for event in events if isinstance(event, TokensOut) and event.index == index for id_ in event.token_ids)


def finish_of(events: list[StreamEvent]) -> SequenceFinished:
    last = events[-1]
    assert isinstance(last, SequenceFinished)
    return last


def options(**sections: dict[str, Any]) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(**{"path": "/models/fake", "tensor_parallel_size": 2, **sections.get("model", {})}),
        scheduler=SchedulerConfig(**sections.get("scheduler", {})),
        admission=AdmissionConfig(**sections.get("admission", {})),
        rpc=RpcConfig(**sections.get("rpc", {})),
        supervisor=SupervisorConfig(**sections.get("supervisor", {})),
    )


@contextlib.asynccontextmanager
async def bench(
    prepare: Callable[[FakeRanks, int], None] = lambda ranks, life: None,
    *,
    wait: bool = True,
    reopen: Callable[[Edition], Edition] = lambda edition: Edition(edition.config, edition.tokenizer),
    **sections: dict[str, Any],
) -> AsyncIterator[Bench]:
    """A gateway that has been launched, and is stopped at the end.

    Args:
        prepare: called with the ranks of each life, and its number from 0, before they start.
        wait: whether to wait until the first life serves, or only until it starts.
        reopen: what a reload finds, given the first edition.
        sections: options by section.
    """
    config = options(**sections)
    metrics = Metrics(version="0", num_ranks=config.model.tensor_parallel_size)
    groups: list[FakeRanks] = []
    clock = Clock()

    def make_group(edition: Edition) -> FakeRanks:
        ranks = FakeRanks(config.model.tensor_parallel_size)
        prepare(ranks, len(groups))
        groups.append(ranks)
        return ranks

    def make_engine(edition: Edition, facts: ModelFacts, executor: Executor) -> Engine:
        limits = EngineLimits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_step_tokens=config.scheduler.max_step_tokens,
            max_queued_requests=config.admission.max_queued_requests,
            max_queued_tokens=config.admission.max_queued_tokens,
            prefix_caching=True,
        )
        return Engine(facts=facts, limits=limits, executor=executor, open_text=lambda *_: IdText(), clock=clock)

    async def reopened() -> Edition:
        return reopen(edition)

    edition = Edition(config, None)
    gateway = Gateway(
        edition=edition,
        reopen=reopened,
        make_group=make_group,
        make_engine=make_engine,
        metrics=metrics,
        clock=clock,
    )
    made = Bench(gateway, metrics, groups, clock)
    gateway.on_state_change(made.states.append)
    gateway.launch()
    try:
        if wait:
            await gateway.until_serving()
        else:
            await made.until(lambda: groups)
        yield made
    finally:
        await gateway.stop()
