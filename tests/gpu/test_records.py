"""What the benchmarks for a GPU make of what they measured: seconds, waiting, shares of a limit, bars, and records in time."""

from __future__ import annotations

import argparse
import datetime
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks import gpu, gpu_decoding, gpu_record
from benchmarks.gpu_peers import BATCHING_IN_GRAPHS
from benchmarks.gpu_record import Record, bars_of, result_file


def event(begin: int, end: int, kind: str = "CUDA", *, label: bool = False) -> Any:
    """What a profiler saw, in microseconds."""
    return SimpleNamespace(
        device_type=SimpleNamespace(name=kind), is_user_annotation=label, time_range=SimpleNamespace(start=begin, end=end)
    )


def test_a_device_is_busy_while_it_does_anything() -> None:
    seen = [event(30, 40), event(0, 10), event(5, 20), event(6, 8), event(0, 100, "CPU"), event(0, 100, label=True)]
    assert gpu_decoding.busy_seconds(seen, "cuda") == pytest.approx(30e-6)
    assert gpu_decoding.busy_seconds([], "cuda") == 0


def test_what_a_device_needs_from_one_operation_to_the_next_is_no_waiting() -> None:
    seen = [event(0, 10), event(12, 20), event(25, 30), event(36, 40)]
    assert gpu_decoding.busy_seconds(seen, "cuda") == pytest.approx(27e-6)
    assert gpu_decoding.busy_seconds(seen, "cuda", 5.0) == pytest.approx(34e-6), "from 30 to 36 it waited"


@pytest.mark.parametrize(
    ("own", "busy", "waits", "idle"), [(0.003, 0.002, 0.7, 0.8), (0.0095, 0.0095, 0.05, 0.05), (0.011, 0.009, 0, 0.1)]
)
def test_a_device_waits_for_what_is_left_of_a_step(
    monkeypatch: pytest.MonkeyPatch, own: float, busy: float, waits: float, idle: float
) -> None:
    monkeypatch.setattr(gpu_decoding, "device_seconds", lambda *_: (own, busy))
    monkeypatch.setattr(gpu_decoding, "timed_steps", lambda *_: 0.01)
    told = gpu_decoding.waits_of(lambda: None, 4, "cpu")
    assert told == {"seconds": 0.01, "device_waits": pytest.approx(waits), "device_idle": pytest.approx(idle)}


def test_a_step_takes_the_median_of_those_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0, 1, 10, 13, 20, 22))
    monkeypatch.setattr(gpu_decoding, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    done: list[None] = []
    assert gpu_decoding.timed_steps(lambda: done.append(None), 3) == 2
    assert len(done) == gpu_decoding.WARMING + 3


def test_a_device_of_which_nothing_was_seen_is_not_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decoding, "device_seconds", lambda *_: (0.0, 0.0))
    told = gpu_decoding.waits_of(lambda: None, 4, "cpu")
    assert told == {"device_waits": "not told: the profiler saw nothing on the device"}


def test_a_step_is_profiled_without_what_the_host_does_beside() -> None:
    numbers = torch.ones(8)
    assert gpu_decoding.device_seconds(lambda: None, "cpu") == (0, 0)
    assert min(gpu_decoding.device_seconds(lambda: numbers.add_(1), "cpu")) > 0


def test_a_step_is_held_to_the_bytes_of_its_own_length_and_to_its_own_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences grow from one way to the next: of a device that reads at its full speed and never waits, just that is said."""
    cells = object.__new__(gpu.Cells)
    decoding = SimpleNamespace(length=0)

    def seconds_of(length: int) -> float:
        return (1000 + 100 * length) / 1e6

    def ways(batch: int, context: int) -> Iterator[Any]:
        decoding.length = context
        for way in gpu.WAYS:
            yield way, lambda: None, decoding

    def timed(step: object, steps: int) -> float:
        decoding.length += gpu.WARMING + steps
        return seconds_of(decoding.length - steps // 2)

    def profiled(*_: object) -> tuple[float, float]:
        decoding.length += gpu.PROFILED
        own = seconds_of(decoding.length - gpu.PROFILED // 2)
        return own, own

    sizes = {"num_hidden_layers": 1, "hidden_size": 25, "vocab_size": 0}
    rank = SimpleNamespace(filler=SimpleNamespace(num_bytes=1000), facts=SimpleNamespace(num_blocks=1 << 20))
    for name, value in {"_model": gpu.Model("x", sizes, (1,), (8,)), "_rank": rank, "_device": "cpu", "_itemsize": 2}.items():
        setattr(cells, name, value)
    cells._bandwidth, cells._ways = 1e6, ways  # type: ignore[method-assign]  # a stand-in of this test
    monkeypatch.setattr(gpu, "timed_steps", timed)
    monkeypatch.setattr(gpu_decoding, "timed_steps", timed)
    monkeypatch.setattr(gpu_decoding, "device_seconds", profiled)
    for told in cells.decode(1, 8, 32).values():
        assert told["share_of_memory_limit"] == pytest.approx(1.0)
    for _, told in cells.wait(1, 8):
        assert told["device_waits"] < 0.03, "but for the few steps that lie between"


def test_a_benchmark_is_ended_by_the_clock_with_what_it_has(tmp_path: Path) -> None:
    out, ended = tmp_path / "record.json", threading.Event()
    codes: list[int] = []
    record = Record({"what": "a test"}, out, Console(file=io.StringIO()))
    record.add("tiny", {"batch": 1})
    scratch = tmp_path / "models"
    scratch.mkdir()
    record.end_at(time.monotonic(), scratch, lambda code: (codes.append(code), ended.set()))
    assert ended.wait(60)
    assert codes == [3]
    told = json.loads(out.read_text())
    assert told["shapes"] == {"tiny": [{"batch": 1}]}
    assert told["ended"].startswith("by the clock")
    assert told["bars"]["tiny"]["batch 1: least share of the memory's limit"]["met"] is None
    assert not scratch.exists()


def test_a_record_of_today_is_kept_beside_what_is_measured_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_record, "RESULTS", tmp_path)
    names = []
    for _ in range(3):
        out = result_file(argparse.ArgumentParser(), argparse.Namespace(out=None, rehearse=False), "gpu")
        assert out is not None
        assert out.parent == tmp_path
        gpu_record.write(out, {"what": len(names)})
        names.append(out.name)
    today = datetime.date.today()
    assert names == [f"gpu-{today}.json", f"gpu-{today}-2.json", f"gpu-{today}-3.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert json.loads((tmp_path / names[0]).read_text()) == {"what": 0}


def test_bars_are_held_to_the_worst_context_and_to_nothing_that_was_not_measured() -> None:
    def row(
        batch: int, context: int, share: float, waits: float | None, theirs: float | dict[str, str], in_graphs: object = None
    ) -> dict[str, Any]:
        told: dict[str, Any] = {"batch": batch, "context": context}
        told["ahead"] = {"tokens_per_second": 300.0, "share_of_memory_limit": share}
        told["transformers"] = {"generate": 500.0, "continuous_batching": theirs, BATCHING_IN_GRAPHS: in_graphs}
        return told | ({"waiting": {"ahead": {"device_waits": waits}}} if waits is not None else {"waiting": {"failed": "x"}})

    rows = [
        row(1, 8, 0.7, 0.05, 50.0, 60.0),
        row(1, 64, 0.66, None, {"failed": "x"}, {"failed": "x"}),
        row(256, 8, 0.49, 0.2, 50.0, 100.0),
        {"batch": 1, "context": 99, "not_run": "x"},
    ]
    bars = bars_of({"one": rows, "none": [], "one, int8": rows})
    assert bars.keys() == {"one", "none"}, "smaller weights read fewer bytes, and are held to none"
    assert [(bar["measured"], bar["met"]) for bar in bars["one"].values()] == [
        (0.66, True), (0.49, False), (3.0, True), (0.2, False),
    ]  # fmt: skip
    not_run, failed = "batch 1, context 99", "batch 1, context 64"
    assert [bar["not_measured"] for bar in bars["one"].values()] == [[not_run], [], [failed, not_run], [failed, not_run]]
    assert {(bar["measured"], bar["met"]) for bar in bars["none"].values()} == {(None, None)}


def test_bandwidth_is_that_of_the_memory_s_clock_and_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_decoding.nominal_bandwidth("cpu") is None
    for clock, width, expected in ((1_593_000, 5120, 2.04e12), (10_501_000, 384, 1.01e12), (0, 384, None)):
        found = SimpleNamespace(memory_clock_rate=clock, memory_bus_width=width)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        assert gpu_decoding.nominal_bandwidth("cuda") == (expected and pytest.approx(expected, rel=0.01))
