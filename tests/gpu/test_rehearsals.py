"""The programs for a GPU, rehearsed on the CPU: the same code but for the device, with tiny shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import gpu, gpu_training
from benchmarks.pretrained import Generates
from tests.finetune.support import run_command
from tests.gpu import device

ROOT: Final = Path(__file__).resolve().parents[2]
FOR_A_DEVICE: Final = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]


@pytest.mark.slow
def test_the_tests_for_a_device_pass_on_the_cpu(tmp_path: Path) -> None:
    """By the command of ``make test-gpu REHEARSE=1``; none is left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "--junit-xml", str(tmp_path / "told.xml")]
    environment = os.environ | {"TESSERA_REHEARSE_GPU": "1", "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    cases = list(ElementTree.parse(tmp_path / "told.xml").iter("testcase"))
    assert {case.get("classname") for case in cases} == {f"tests.gpu.{path.stem}" for path in FOR_A_DEVICE}
    assert [case.get("name") for case in cases if case.find("skipped") is not None] == []


@pytest.mark.slow
def test_the_benchmark_of_decoding_measures_every_cell(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--steps", "3", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads(out.read_text())
    assert record["rehearsal"]
    captured, *cells = record["shapes"]["tiny"]
    assert captured["captured"]["sizes"] == 3
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 8), (3, 8), (1, 40), (3, 40)]
    for cell in cells:
        for way in ("eager", "graphs", "ahead"):
            assert cell[way]["tokens_per_second"] == pytest.approx(cell["batch"] / cell[way]["seconds"])
            assert 0 <= cell[way]["device_waits"] < 1
        assert set(cell["transformers"]) == {"generate", "continuous_batching"}
        assert not [told for told in cell["transformers"].values() if "failed" in str(told)]


@pytest.mark.slow
def test_cells_that_come_too_late_are_recorded_as_not_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--minutes", "0", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=900)
    assert {cell["not_run"] for cell in json.loads(out.read_text())["shapes"]["tiny"][1:]} == {"the time was over"}


def event(begin: int, end: int, kind: str = "CUDA", *, label: bool = False) -> Any:
    """What a profiler saw, in microseconds."""
    return SimpleNamespace(
        device_type=SimpleNamespace(name=kind), is_user_annotation=label, time_range=SimpleNamespace(start=begin, end=end)
    )


def test_a_device_is_busy_while_it_does_anything() -> None:
    seen = [event(30, 40), event(0, 10), event(5, 20), event(6, 8), event(0, 100, "CPU"), event(0, 100, label=True)]
    assert gpu.busy_seconds(seen, "cuda") == pytest.approx(30e-6)
    assert gpu.busy_seconds([], "cuda") == 0


@pytest.mark.parametrize(("busy", "waits"), [(0.002, 0.8), (0.0095, 0.05), (0.011, 0)])
def test_a_device_waits_for_what_is_left_of_a_step(monkeypatch: pytest.MonkeyPatch, busy: float, waits: float) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 100))
    monkeypatch.setattr(gpu, "device_seconds", lambda *_: busy)
    told = gpu.timed_steps(lambda: None, 5, "cpu")
    assert told == {"seconds": pytest.approx(0.01), "device_waits": pytest.approx(waits)}


def test_a_device_of_which_nothing_was_seen_is_not_said_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_seconds", lambda *_: 0.0)
    assert gpu.timed_steps(lambda: None, 2, "cpu")["device_waits"] == "not told: the profiler saw nothing on the device"


def test_a_step_is_profiled_without_what_the_host_does_beside() -> None:
    numbers = torch.ones(8)
    assert gpu.device_seconds(lambda: None, "cpu") == 0
    assert gpu.device_seconds(lambda: numbers.add_(1), "cpu") > 0


@pytest.mark.parametrize("given", [[], [1]])
def test_answers_of_transformers_that_failed_are_no_speed(given: list[int]) -> None:
    """It counts them as answers, and logs that they failed."""

    class Failing:
        device = torch.device("cpu")

        def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: object) -> torch.Tensor:
            return torch.zeros(len(ids), ids.shape[1] + max_new_tokens)

        def generate_batch(self, inputs: list[list[int]], **_: object) -> dict[str, Any]:
            return {str(number): SimpleNamespace(generated_tokens=given) for number, _ in enumerate(inputs)}

    told = gpu.by_transformers(cast("Generates", Failing()), [[1, 2], [3, 4]], 8, "cpu")
    assert str(told["continuous_batching"]).startswith("failed: AssertionError: continuous batching gave [")
    assert "failed" not in str(told["generate"])


def test_superoffload_is_timed_where_it_overlaps_and_compared_where_gradients_are_clipped() -> None:
    """As DeepSpeed has it, nothing overlaps where they are clipped."""
    clips = {
        case.part: case.way["optimizer"].get("clip", 1.0)
        for case in gpu_training.cases()
        if case.way.get("optimizer") is not None
    }
    assert clips == {"exact": 1.0, "ways": 0.0}


def test_the_watch_for_waits_is_no_wait_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch warns of the mode that has it warn."""

    def set_mode(mode: str) -> None:
        if mode == "warn":
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(device, "REHEARSED", False)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with device.waits_of_host() as found:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=2)
        warnings.warn("of something else", stacklevel=2)
    assert found == ["called a synchronizing CUDA operation"]


@pytest.mark.slow
def test_transformers_is_loaded_into_a_free_device_and_may_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[Any]] = []
    alive: list[Any] = []
    given = gpu.loaded

    def noted(*args: Any) -> Any:
        found = given(*args)
        held.extend(weakref.ref(part) for part in (found[0].body, found[1]))
        return found

    def without_room(*_: object) -> Any:
        alive.extend(ref for ref in held if ref() is not None)
        raise torch.OutOfMemoryError("there is no room")

    monkeypatch.setattr(gpu, "loaded", noted)
    monkeypatch.setattr(gpu, "read_model", without_room)
    sizes, rows = gpu.REHEARSAL.shapes["tiny"], list[dict[str, Any]]()
    with torch.no_grad():  # so that it is as before afterwards
        gpu.make_model(tmp_path, sizes, "cpu", gpu.REHEARSAL.dtype)
        told = [dict(row) for row in gpu.of_shape(rows, gpu.REHEARSAL, tmp_path, sizes, 2, float("inf"))]
    assert len(held) == 2
    assert not alive
    assert len(rows) == 5
    assert ["transformers" in row for row in told] == [False] * 5 + [True] * 4
    assert [row["transformers"] for row in rows[1:]] == [{"failed": "OutOfMemoryError: there is no room"}] * 4


def test_a_run_that_takes_too_long_is_recorded_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def too_long(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    out = tmp_path / "training.json"
    words = ["gpu_training", "--rehearse", "--parts", "fits", "--minutes", "2", "--out", str(out), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(subprocess, "run", too_long)
    assert gpu_training.main() == 1, capsys.readouterr().out
    rows = json.loads(out.read_text())["cases"]
    assert len(rows) == len(limits) == 3
    assert [row["limit_seconds"] for row in rows] == limits
    assert {row["failed"].partition(" the ")[0] for row in rows} == {"it took longer than"}
    assert max(limits) <= 120
    assert limits == sorted(limits, reverse=True)


def test_no_run_has_more_than_a_quarter_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", too_long)
    case = next(case for case in gpu_training.cases() if case.part == "fits")
    (row,) = gpu_training.measured([case], tmp_path, tmp_path / "text", float("inf"), rehearse=True)
    assert row["limit_seconds"] == 900


@pytest.mark.slow
def test_the_benchmark_of_training_makes_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forked(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """The command without its imports, which take longer than these runs."""
        assert command[:3] == [sys.executable, "-m", "finetune"]
        return run_command(*command[3:])

    out = tmp_path / "training.json"
    monkeypatch.setattr(sys, "argv", ["gpu_training", "--rehearse", "--out", str(out)])
    monkeypatch.setattr(gpu_training, "subprocess", SimpleNamespace(run=forked, TimeoutExpired=subprocess.TimeoutExpired))
    assert gpu_training.main() == 0, capsys.readouterr().out
    rows = json.loads(out.read_text())["cases"]
    assert {row["part"] for row in rows} == {"exact", "fits", "disk", "ways"}
    run = [row for row in rows if "left_out" not in row]
    assert len(run) == 12
    assert [row["case"] for row in rows if row.get("left_out") == "it needs a CUDA device"] == [
        "SuperOffload, bf16",
        "1.4B, SuperOffload",
    ]
    for row in run:
        assert len(row["losses"]) == 4
        assert row["host_bytes"]["measured"] > 0
    compared = [row for row in run if "furthest_loss" in row]
    assert len(compared) == 4
    assert [row["case"] for row in compared if row["furthest_loss"] > 0.01] == []
