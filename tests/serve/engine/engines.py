"""Engines on a hand-computable executor, and requests for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from serve.engine.engine import Engine, EngineLimits
from serve.engine.executor import Executor, ModelFacts
from serve.engine.text import TextFactory
from serve.types import Event, Generation, RequestId, SamplingParams, StoppingParams, TokensOut
from tests.serve.fake_executor import FakeExecutor, fake_facts
from tests.serve.fake_text import open_letters

LIMITS = EngineLimits(
    max_num_seqs=8,
    max_step_tokens=64,
    max_queued_requests=100,
    max_queued_tokens=10_000,
    prefix_caching=True,
    async_scheduling=False,
)


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_engine(
    facts: ModelFacts | None = None,
    *,
    executor: Executor | None = None,
    clock: Callable[[], float] | None = None,
    open_text: TextFactory = open_letters,
    **limits: int,
) -> Engine:
    facts = facts or fake_facts()
    return Engine(
        facts=facts,
        limits=dataclasses.replace(LIMITS, **limits),
        executor=executor or FakeExecutor(facts),
        open_text=open_text,
        clock=clock or Clock(),
    )


def make_request(name: str = "a", prompt: tuple[int, ...] = (1, 2, 3), max_new: int = 4, **more: object) -> Generation:
    stopping = StoppingParams(max_new_tokens=max_new)
    generation = Generation(request_id=RequestId(name), prompt_ids=prompt, sampling=SamplingParams(), stopping=stopping)
    return dataclasses.replace(generation, **more)  # type: ignore[arg-type]


def run(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


def ids_of(events: list[Event], name: str = "a", index: int = 0) -> list[int]:
    outs = [e for e in events if isinstance(e, TokensOut) and (e.request_id, e.index) == (name, index)]
    return [token_id for out in outs for token_id in out.token_ids]
