"""Decoding steps of many sequences on a device, planned as the engine plans them: what they take, and what of it is waiting."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from serve.engine.plan import Span, Start, StepPlan, StepResult
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker.launched import LaunchedStep
from serve.worker.loader import RankModel
from serve.worker.runner import Runner

BLOCK_TOKENS: Final = 16
CHUNK_TOKENS: Final = 8192
"""Of a prompt's computation, at most so many tokens in one step."""
WARMING: Final = 3
"""Steps of a cell before those that are timed, each way."""
PROFILED: Final = 4
"""Steps of a cell of which the device's own time is taken, each way."""
WAYS: Final = ("eager", "graphs", "ahead")
OWN_GAP: Final = 5.0
"""Microseconds from one operation's end to the next one's start in which a device that has both in its queue begins the second:
one or two within a graph, some more under the profiler. In a longer gap it waits for the host."""


def prompts(batch: int, context: int, vocabulary: int) -> list[list[int]]:
    """Those of a cell."""
    source = torch.Generator().manual_seed(batch * context)
    return torch.randint(0, vocabulary, (batch, context), generator=source).tolist()


class Decoding:
    """Sequences that are decoded together, by plans like the engine's."""

    def __init__(self, runner: Runner, batch: int, context: int, vocabulary: int) -> None:
        self._runner, self._batch, self._length, self._step = runner, batch, context, 0
        self._launched: LaunchedStep | None = None
        self._prompts = prompts(batch, context, vocabulary)
        self._blocks = iter(range(1 << 30))
        self._held = [0] * batch

    @property
    def length(self) -> int:
        """Positions of each sequence behind the last step that was planned."""
        return self._length

    def start(self) -> None:
        """Compute the prompts."""
        for number, prompt in enumerate(self._prompts):
            begun = Start(
                sequence=SequenceId(number), index=0, token_ids=tuple(prompt), num_prompt_tokens=len(prompt),
                sampling=SamplingParams(),
            )  # fmt: skip
            for first in range(0, len(prompt), CHUNK_TOKENS):
                count = min(CHUNK_TOKENS, len(prompt) - first)
                span = self._span(number, first, count, sample=first + count == len(prompt))
                self._execute((begun,) if first == 0 else (), (span,))

    def step(self) -> None:
        """One more token of each."""
        self._check(self._runner.execute(self._next()))

    def step_ahead(self) -> None:
        """The tokens of the step that was launched last time, once the next one is launched."""
        before, plan = self._launched, self._next()
        assert self._runner.follows(plan)
        self._launched = self._runner.launch(plan, follows=True)
        if before is not None:
            self._check(self._runner.settle(before))

    def settle(self) -> None:
        """Read what was launched last."""
        if self._launched is not None:
            self._check(self._runner.settle(self._launched))
            self._launched = None

    def end(self) -> None:
        """Forget the sequences."""
        self._runner.execute(StepPlan(step=self._step, dropped=tuple(SequenceId(n) for n in range(self._batch))))

    def _span(self, number: int, start: int, count: int, *, sample: bool, continues: bool = False) -> Span:
        needed = -(-(start + count) // BLOCK_TOKENS) - self._held[number]
        self._held[number] += needed
        blocks = tuple(BlockId(next(self._blocks)) for _ in range(needed))
        return Span(
            sequence=SequenceId(number), start=start, count=count, sample=sample, continues=continues, new_blocks=blocks
        )

    def _next(self) -> StepPlan:
        spans = tuple(self._span(number, self._length, 1, sample=True, continues=True) for number in range(self._batch))
        self._length += 1
        self._step += 1
        return StepPlan(step=self._step, spans=spans)

    def _execute(self, starts: tuple[Start, ...], spans: tuple[Span, ...]) -> None:
        self._step += 1
        self._check(self._runner.execute(StepPlan(step=self._step, starts=starts, spans=spans)))

    @staticmethod
    def _check(result: StepResult | None) -> None:
        assert result is not None
        assert not result.faults, result.faults[0].message


class Ways:
    """The same sequences, decoded in each way in turn."""

    def __init__(self, runner: Runner, decoding: Decoding) -> None:
        self._runner, self._decoding, self._graphs = runner, decoding, runner.graphs

    def step(self, way: str) -> Callable[[], None]:
        """What computes a step: piece by piece (``eager``), replayed (``graphs``), or before the last is read (``ahead``)."""
        self._runner.graphs = None if way == "eager" else self._graphs
        return self._decoding.step_ahead if way == "ahead" else self._decoding.step

    def end(self) -> None:
        """Leave the runner as it was, without these sequences."""
        self._runner.graphs = self._graphs
        self._decoding.settle()
        self._decoding.end()


def nominal_bandwidth(device: str) -> float | None:
    """Bytes a second of a CUDA device's memory by its clock and the width of its bus; ``None`` of one that does not tell.

    Data is moved twice a clock. By data sheets an A100 has 2.04e12, an H100 3.35e12, an H200 4.8e12, an RTX 4090 1.01e12.
    """
    if device != "cuda":
        return None
    found = torch.cuda.get_device_properties(0)
    return 2 * found.memory_clock_rate * 1e3 * found.memory_bus_width / 8 or None


def busy_seconds(events: Iterable[FunctionEvent], device: str, gap: float = 0.0) -> float:
    """The time in which the device did anything: what it does at once counts once, and labels of spans not at all.

    Args:
        gap: microseconds between two operations that count as theirs.
    """
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name.lower() == device and not event.is_user_annotation
    )
    busy, until = 0.0, float("-inf")
    for begin, end in spans:
        if 0 < begin - until <= gap:
            begin = until
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    return busy / 1e6


def device_seconds(step: Callable[[], None], device: str) -> tuple[float, float]:
    """What a step takes the device itself, however long the host takes to launch it.

    Returns:
        Seconds with the gaps in which the device goes on by itself, and seconds without any.
    """
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    if device == "cuda":
        torch.cuda.synchronize()  # what was launched before is none of it
    with profile(activities=[activity]) as seen:
        for _ in range(PROFILED):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
    events = seen.events() or ()
    return busy_seconds(events, device, OWN_GAP) / PROFILED, busy_seconds(events, device) / PROFILED


def timed_steps(step: Callable[[], None], steps: int) -> float:
    """Seconds of a step, which ends with its tokens on the host: the median."""
    walls = []
    for _ in range(WARMING):
        step()
    for _ in range(steps):
        began = time.perf_counter()
        step()
        walls.append(time.perf_counter() - began)
    return statistics.median(walls)


def waits_of(step: Callable[[], None], steps: int, device: str) -> dict[str, Any]:
    """The share of a step's seconds in which the device waits for the host, and that in which it does nothing at all.

    The seconds are of as many steps right before those that are profiled: sequences, and so steps, become longer.
    """
    seconds = timed_steps(step, steps)
    own, busy = device_seconds(step, device)
    if not busy:
        return {"device_waits": "not told: the profiler saw nothing on the device"}
    return {"seconds": seconds, "device_waits": max(0.0, 1 - own / seconds), "device_idle": max(0.0, 1 - busy / seconds)}


def bytes_of_step(model: RankModel, sizes: dict[str, int], batch: int, context: int, itemsize: int) -> int:
    """What a step must read: the weights but the embedding, of which it reads rows, and all keys and values."""
    weights = model.filler.num_bytes - sizes["vocab_size"] * sizes["hidden_size"] * itemsize
    return weights + 2 * sizes["num_hidden_layers"] * sizes["hidden_size"] * itemsize * batch * context
