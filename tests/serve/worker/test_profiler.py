"""A rank records steps when it is told to, for as long as it is told, and computes the same."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from serve.engine.executor import Profiled
from serve.engine.plan import Span, StepPlan, StepResult
from serve.errors import RankStartError
from serve.types import SequenceId
from serve.worker import profiler as profilers
from serve.worker import wire
from serve.worker.exchange import Exchange
from serve.worker.order_loop import OrderLoop
from serve.worker.packing import Packing
from serve.worker.parallel import Ranks
from serve.worker.profiler import Profiler
from serve.worker.runner import Runner
from tests.serve.worker.family_worker import generate, load, settings
from tests.support.models import save


class Served:
    """A model on one rank, of which steps are recorded as the rank's loop does it."""

    def __init__(self, folder: Path) -> None:
        self.ranks = Ranks(0, 1)
        self.model = load(folder, 1, self.ranks)
        self.runner = Runner(self.model, self.ranks)
        if self.runner.graphs is not None:
            self.runner.graphs.capture()
        self.profiler = Profiler(self.model, self.runner.recorded)
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepResult | None:
        self.plans.append(plan)
        return self.profiler.record(plan, self.runner.execute) if self.profiler.is_on else self.runner.execute(plan)

    def tokens(self) -> list[list[int]]:
        return generate(self, self.ranks)  # type: ignore[arg-type]  # all that is asked of a runner is ``execute``

    def trace(self) -> dict[str, Any]:
        data = b""
        while part := self.profiler.part(len(data)):
            data += part
        found: dict[str, Any] = json.loads(gzip.decompress(data))
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(save("gpt_neox", tmp_path_factory.mktemp("model") / "neox", with_tokenizer=False))


@pytest.fixture(autouse=True)
def forgotten(served: Served) -> Iterator[None]:
    yield
    served.profiler.forget()


def in_the_dicts(served: Served) -> list[tuple[str, object]]:
    return [
        (f"{path}.{name}", value)
        for path, module in served.model.body.named_modules()
        for name, value in module.__dict__.items()
        if callable(value)
    ]


def test_the_next_steps_are_recorded_and_those_after_them_are_not(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profilers, "_PIECE_BYTES", 1000)
    plain, before = served.tokens(), in_the_dicts(served)
    served.profiler.begin(4, 60.0)
    assert served.profiler.told() == Profiled(0, is_over=False)
    served.plans.clear()
    assert served.tokens() == plain
    assert not served.profiler.is_on
    assert in_the_dicts(served) == before, "no module keeps what names it"
    told = served.profiler.told()
    assert (told.num_steps, told.is_over, told.failure) == (4, True, "")
    assert told.num_bytes > 1000
    names = [event["name"] for event in served.trace()["traceEvents"] if event.get("ph") == "X"]
    steps = [name for name in names if name.startswith("step ")]
    assert steps == [f"step {p.step}: {p.num_tokens} positions of {len(p.spans)} sequences" for p in served.plans[:4]]
    assert sum(name == "GPTNeoXLayer layers.1" for name in names) == 4
    assert sum(name.endswith(" layers.1.attention.query_key_value") for name in names) == 4, "also of what is called directly"
    assert any(name.startswith("aten::") for name in names)


def test_steps_that_are_replayed_stand_with_their_operations_and_are_replayed_again_afterwards(served: Served) -> None:
    plain = [served.tokens() for _ in range(4)]
    recorded = served.runner.recorded
    assert recorded is not None
    replayed = recorded.sizes
    assert replayed, "some steps are replayed by now"
    served.profiler.begin(10_000, 60.0)
    assert served.tokens() == plain[0]
    served.profiler.forget()  # ends the recording with the next step
    assert served.tokens() == plain[0]
    assert (recorded.aside, recorded.sizes) == (False, replayed)


def test_every_step_of_a_trace_has_the_models_modules(served: Served) -> None:
    for _ in range(4):
        served.tokens()
    served.profiler.begin(16, 60.0)
    served.tokens()
    assert served.profiler.told().num_steps == 16, "prompts, and tokens after them"
    names = [event["name"] for event in served.trace()["traceEvents"] if event.get("ph") == "X"]
    assert sum(name == "GPTNeoXLayer layers.1" for name in names) == 16


def test_a_trace_holds_nothing_of_a_prompt(served: Served) -> None:
    served.profiler.begin(2, 60.0)
    served.tokens()
    served.profiler.told()
    for event in served.trace()["traceEvents"]:
        unknown = set(event.get("args", {})) - {
            "External id", "Record function id", "Ev Idx", "name", "labels", "sort_index", "Op count",
            "Fwd thread id", "Sequence number",
        }  # fmt: skip
        assert not unknown, f"{event['name']} tells {unknown}: shapes, values or stacks"


def test_a_recording_without_a_step_is_over_when_its_time_is(served: Served) -> None:
    served.profiler.begin(4, 0.0)
    assert served.profiler.told() == Profiled(0, is_over=True)
    assert not served.profiler.is_on
    served.tokens()
    assert served.profiler.told() == Profiled(0, is_over=True)


def one_step(served: Served) -> None:
    """A step of one position, of which nothing is computed."""
    served.profiler.record(StepPlan(step=1, spans=(Span(sequence=SequenceId(0), start=0, count=1),)), lambda plan: None)


def test_a_plan_that_computes_nothing_is_no_step_of_those_that_were_asked_for(served: Served) -> None:
    served.profiler.begin(2, 60.0)
    for number in range(3):
        one_step(served)
        served.execute(StepPlan(step=number))
    told = served.profiler.told()
    assert (told.num_steps, told.is_over) == (2, True)
    names = [event["name"] for event in served.trace()["traceEvents"] if event.get("ph") == "X"]
    assert [name for name in names if name.startswith("step ")] == ["step 1: 1 positions of 1 sequences"] * 2


def test_a_recording_that_waits_for_a_step_in_vain_ends_with_what_it_has(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet, other = socket.socketpair()
    with quiet, other:
        served.profiler.begin(4, 600.0)
        one_step(served)
        with monkeypatch.context() as patch:  # so many seconds later
            patch.setattr(profilers, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 599.8))
            served.profiler.attend(quiet)
        told = served.profiler.told()
        assert (told.num_steps, told.is_over) == (1, True)
        assert told.num_bytes > 0


def test_one_that_is_given_up_ends_at_once_and_until_then_there_is_no_other(served: Served) -> None:
    quiet, other = socket.socketpair()
    with quiet, other:
        served.profiler.begin(4, 600.0)
        one_step(served)
        with pytest.raises(RankStartError, match="not ended yet"):
            served.profiler.begin(1, 60.0)
        served.profiler.forget()
        served.profiler.attend(quiet)
        assert not served.profiler.is_on
        assert served.profiler.part(0) == b""
        served.profiler.begin(1, 60.0)
        one_step(served)
        assert served.profiler.told().num_steps == 1


def test_a_plan_that_comes_is_not_waited_for_longer(served: Served) -> None:
    steps, other = socket.socketpair()
    with steps, other:
        served.profiler.begin(2, 600.0)
        one_step(served)
        other.sendall(b"a plan")
        served.profiler.attend(steps)
        assert served.profiler.is_on
        one_step(served)
        assert served.profiler.told().num_steps == 2


def test_a_trace_that_is_too_large_is_not_sent(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_TRACE_BYTES", "_MAX_FILE_BYTES"):
        with monkeypatch.context() as patch:
            patch.setattr(profilers, limit, 100)
            served.profiler.begin(1, 60.0)
            one_step(served)
            told = served.profiler.told()
        assert (told.is_over, told.num_bytes) == (True, 0)
        assert "ask for fewer steps" in told.failure


def test_a_profiler_that_fails_ends_the_recording_and_no_step(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = served.tokens()
    for method in ("start_trace", "stop_trace"):
        real = getattr(torch.profiler.profile, method)

        def fail(profiler: torch.profiler.profile, ends: bool = method == "stop_trace", real: Any = real) -> None:
            if ends:
                real(profiler)  # or it would go on for the tests that follow
            raise RuntimeError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(torch.profiler.profile, method, fail)
            served.profiler.begin(2, 60.0)
            assert served.tokens() == plain
            told = served.profiler.told()
        assert (told.is_over, told.failure) == (True, "torch's profiler failed (RuntimeError)")
        assert not served.profiler.is_on


def test_orders_begin_tell_fetch_and_forget(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.worker.order_loop.give_way", lambda niceness: None)
    monkeypatch.setattr("serve.worker.order_loop.sys.setswitchinterval", lambda seconds: None)
    folder = Path(served.model.facts.family)
    packing = Packing([], served.runner.rest)
    exchange = Exchange(settings(folder, 1, "float32"), served.model, served.ranks, served.runner, packing)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ask = partial(_ask, ours)
        OrderLoop(exchange, served.profiler, torch.device("cpu")).start(theirs)
        assert ask(wire.Profile(1, 60.0)) == wire.Fine()
        one_step(served)
        told = ask(wire.TellProfiled())
        assert isinstance(told, wire.Told)
        assert told.recorded.is_over
        assert isinstance(part := ask(wire.SendPart(0)), wire.Part)
        assert len(part.data) == told.recorded.num_bytes
        assert ask(wire.ForgetProfiled()) == wire.Fine()
        assert ask(wire.SendPart(0)) == wire.Part(b"")
        ours.shutdown(socket.SHUT_RDWR)
        for thread in threading.enumerate():
            if thread.name == "orders":
                thread.join()


def test_on_a_device_orders_are_followed_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they copy there waits for no step."""
    seen, device = list[str](), torch.device("cuda:1")

    @contextmanager
    def entered(stream: str) -> Iterator[None]:
        seen.append(f"on {stream}")
        yield
        seen.append(f"off {stream}")

    class Answering:
        def answer(self, order: wire.Order) -> wire.Report:
            seen.append(type(order).__name__)
            return wire.Fine()

    monkeypatch.setattr("serve.worker.order_loop.give_way", lambda niceness: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: seen.append(f"{device}"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    ours, theirs = socket.socketpair()
    loop = OrderLoop(cast("Exchange", Answering()), cast("Profiler", None), device)
    with ours, theirs:
        follower = threading.Thread(target=loop._follow, args=(theirs,))
        follower.start()
        assert _ask(ours, wire.Forget()) == wire.Fine()
        ours.shutdown(socket.SHUT_RDWR)
        follower.join()
    assert seen == ["cuda:1", "on a stream of cuda:1", "Forget", "off a stream of cuda:1"]


def _ask(orders: socket.socket, order: wire.Order) -> wire.Report:
    wire.send(orders, wire.encode(order))
    return wire.decode_report(wire.receive(orders))
