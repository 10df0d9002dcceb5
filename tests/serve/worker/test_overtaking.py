"""A plan that overtakes a step: both give what they give one after the other, wherever the step was given up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve.engine.plan import Span, Start, StepPlan, StepResult
from serve.types import BlockId, SamplingParams, SequenceId
from serve.worker import wire
from serve.worker.parallel import Ranks
from serve.worker.runner import Runner
from tests.serve.worker.recorded import load_recorded
from tests.support.kernels import cpu_kernels
from tests.support.models import save

ROWS = 3
PROMPT = (5, 9, 2, 7, 11)
LATE = SequenceId(9)


@pytest.fixture(autouse=True, params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    cpu_kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def start(sequence: int, prompt: tuple[int, ...]) -> Start:
    sampling = SamplingParams(temperature=0.8, seed=sequence)
    return Start(sequence=SequenceId(sequence), index=0, token_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)


def begin(step: int, sequences: tuple[int, ...]) -> StepPlan:
    """The prompts of these, two blocks for each."""
    blocks = {sequence: (BlockId(2 * sequence), BlockId(2 * sequence + 1)) for sequence in sequences}
    return StepPlan(
        step=step,
        starts=tuple(start(sequence, (*PROMPT, sequence)) for sequence in sequences),
        spans=tuple(
            Span(sequence=SequenceId(sequence), start=0, count=len(PROMPT) + 1, new_blocks=blocks[sequence], sample=True)
            for sequence in sequences
        ),
    )


def go_on(step: int, sequences: tuple[int, ...], position: int) -> StepPlan:
    """A token more of each."""
    spans = (Span(sequence=SequenceId(each), start=position, count=1, continues=True, sample=True) for each in sequences)
    return StepPlan(step=step, spans=tuple(spans))


class Overtaken:
    """A runner that may be overtaken, and who overtakes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runner = Runner(load_recorded(folder, Ranks(0, 1), "float32"), Ranks(0, 1))
        assert self.runner.graphs is not None
        self.runner.graphs.capture()
        self.ours, theirs = socket.socketpair()
        self.theirs = theirs
        self.answers: list[StepResult] = []
        """In the order in which they came."""
        assert self.runner.may_be_overtaken
        self.runner.overtaking.begin(theirs, self.compute_other)

    def compute_other(self) -> None:
        self.execute(wire.decode_plan(wire.receive(self.theirs)))

    def execute(self, plan: StepPlan) -> None:
        result = self.runner.execute(plan)
        assert result is not None
        self.answers.append(result)

    def close(self) -> None:
        self.ours.close()
        self.theirs.close()


@pytest.fixture
def overtaken(tmp_path: Path) -> Iterator[Overtaken]:
    made = Overtaken(save("llama", tmp_path / "model", with_tokenizer=False))
    yield made
    made.close()


def plans(steps: int) -> list[StepPlan]:
    """A flood's prompts and some steps of one token each: enough that those are replayed."""
    rows = tuple(range(ROWS))
    return [begin(0, rows), *(go_on(step, rows, len(PROMPT) + step) for step in range(1, steps))]


def expected(folder: Path, steps: int) -> list[StepResult]:
    """What they give one after the other, the late prompt behind them, and a token more of all."""
    alone = Overtaken(folder)
    for plan in plans(steps):
        alone.execute(plan)
    alone.execute(begin(steps, (LATE,)))
    alone.execute(go_on(steps + 1, tuple(range(ROWS)), len(PROMPT) + steps))
    alone.close()
    return alone.answers


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6])
def test_both_give_what_they_give_one_after_the_other(overtaken: Overtaken, tmp_path: Path, steps: int) -> None:
    """The step that is given up computes prompts, by torch's modules; or is replayed. The first of a size, one that is recorded
    and one that is compared with its replay are not given up for anything."""
    *before, last = plans(steps)
    for plan in before:
        overtaken.execute(plan)
    wire.send(overtaken.ours, wire.encode(begin(steps, (LATE,))), overtakes=True)
    overtaken.execute(last)
    if steps in (2, 3, 4):
        assert overtaken.answers[-1].step == steps - 1
        overtaken.compute_other()
    else:
        assert [answer.step for answer in overtaken.answers[-2:]] == [steps, steps - 1], "it did not overtake"
    overtaken.execute(go_on(steps + 1, tuple(range(ROWS)), len(PROMPT) + steps))
    assert sorted(overtaken.answers, key=lambda answer: answer.step) == expected(tmp_path / "model", steps)


@pytest.mark.parametrize("number", range(1, 5))
def test_steps_are_recorded_whichever_of_them_another_plan_wants_to_overtake(overtaken: Overtaken, number: int) -> None:
    for plan in plans(6):
        if plan.step == number:
            wire.send(overtaken.ours, wire.encode(begin(6, (LATE,))), overtakes=True)
        overtaken.execute(plan)
    assert overtaken.runner.recorded is not None
    assert overtaken.runner.recorded.sizes == (ROWS,)


@pytest.mark.parametrize("steps", [1, 6])
def test_a_plan_that_may_not_overtake_waits(overtaken: Overtaken, tmp_path: Path, steps: int) -> None:
    *before, last = plans(steps)
    for plan in before:
        overtaken.execute(plan)
    wire.send(overtaken.ours, wire.encode(begin(steps, (LATE,))))
    overtaken.execute(last)
    assert overtaken.answers[-1].step == steps - 1
    overtaken.compute_other()
    overtaken.execute(go_on(steps + 1, tuple(range(ROWS)), len(PROMPT) + steps))
    assert overtaken.answers == expected(tmp_path / "model", steps)


@pytest.mark.parametrize("steps", [1, 6])
def test_one_step_may_be_overtaken_by_several_plans(overtaken: Overtaken, steps: int) -> None:
    for plan in plans(steps)[:-1]:
        overtaken.execute(plan)
    for number in range(2):
        wire.send(overtaken.ours, wire.encode(begin(steps + number, (LATE + number,))), overtakes=True)
    overtaken.execute(plans(steps)[-1])
    assert [answer.step for answer in overtaken.answers[steps - 1 :]] == [steps, steps + 1, steps - 1]
    undisturbed = expected(overtaken.folder, steps)
    assert overtaken.answers[-1] == undisturbed[steps - 1]
    assert overtaken.answers[-3] == undisturbed[steps]


def test_of_several_ranks_none_gives_way(tmp_path: Path) -> None:
    model = load_recorded(save("llama", tmp_path / "model", with_tokenizer=False), Ranks(0, 1), "float32")
    runner = Runner(model, Ranks(0, 1))
    assert runner.may_be_overtaken
    runner._ranks = Ranks(0, 2)
    assert not runner.may_be_overtaken
