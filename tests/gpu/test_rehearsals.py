"""The programs for a GPU, rehearsed on the CPU: the same code but for the device, with tiny shapes."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import sysconfig
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from transformers import ContinuousBatchingConfig

from benchmarks import gpu, gpu_peers, gpu_training
from benchmarks.gpu_record import Record
from benchmarks.pretrained import Generates
from tests.finetune.support import run_command
from tests.gpu import device, sanitized
from tests.support import warm

ROOT: Final = Path(__file__).resolve().parents[2]
OTHERS: Final = {"test_records", "test_rehearsals", "test_tiles", "test_training_record"}
FOR_A_DEVICE: Final = [path for path in Path(__file__).parent.glob("test_*.py") if path.stem not in OTHERS]


@pytest.mark.slow
def test_the_tests_for_a_device_pass_on_the_cpu(tmp_path: Path) -> None:
    """By the command of ``make test-gpu REHEARSE=1``; none is left out."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-n", "1", "--maxschedchunk", "1"]
    command += ["--max-worker-restart", "0", "--junit-xml", str(tmp_path / "told.xml")]
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
    assert {name: taken["sizes"] for name, taken in record["captured"].items()} == {"tiny": 3, "tiny, int8": 1}
    cells, smaller = record["shapes"]["tiny"], record["shapes"]["tiny, int8"]
    assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 8), (3, 8), (1, 40), (3, 40)]
    assert [(cell["batch"], cell["context"]) for cell in smaller] == [(1, 8)]
    for cell in [*cells, *smaller]:
        for way in ("eager", "graphs", "ahead"):
            assert cell[way]["tokens_per_second"] == pytest.approx(cell["batch"] / cell[way]["seconds"])
    for cell in cells:
        for told in cell["waiting"].values():
            assert 0 <= told["device_waits"] <= told["device_idle"] < 1
        assert set(cell["waiting"]) == {"eager", "graphs", "ahead"}
        assert set(cell["transformers"]) == {"generate", "continuous_batching", gpu_peers.BATCHING_IN_GRAPHS}
        assert not [told for told in cell["transformers"].values() if "failed" in str(told)]
    assert [told["met"] for told in record["bars"]["tiny"].values()][:2] == [None, None], "a CPU tells no bandwidth"


@pytest.mark.slow
def test_cells_that_come_too_late_are_recorded_as_not_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--minutes", "0", "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=True, timeout=900)
    record = json.loads(out.read_text())
    assert {name: [cell["not_run"] for cell in rows] for name, rows in record["shapes"].items()} == {
        "tiny": ["the time was over"] * 4,
        "tiny, int8": ["the time was over"],
    }
    assert record["captured"] == {}, "nothing was loaded for it"


@pytest.mark.parametrize("given", [[], [1]])
def test_answers_of_transformers_that_failed_are_no_speed(given: list[int]) -> None:
    """It counts them as answers, and logs that they failed."""

    class Failing:
        device = torch.device("cpu")

        def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: object) -> torch.Tensor:
            return torch.zeros(len(ids), ids.shape[1] + max_new_tokens)

        def generate_batch(self, inputs: list[list[int]], **_: object) -> dict[str, Any]:
            return {str(number): SimpleNamespace(generated_tokens=given) for number, _ in enumerate(inputs)}

    told = gpu_peers.by_transformers(cast("Generates", Failing()), [[1, 2], [3, 4]], 8, "cpu")
    assert told["continuous_batching"]["failed"].startswith("AssertionError: continuous batching gave [")
    assert "failed" not in str(told["generate"])


@pytest.mark.parametrize(("flash", "attention"), [((), "sdpa"), ((2,), "flash_attention_2"), ((2, 3), "flash_attention_3")])
def test_transformers_is_measured_by_its_fastest_attention_and_in_graphs_where_it_leaves_them_off(
    flash: tuple[int, ...], attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, bool] | None] = []

    class Peer:
        device = torch.device("cpu")

        def generate_batch(
            self, inputs: list[list[int]], continuous_batching_config: ContinuousBatchingConfig | None, **_: object
        ) -> dict[str, Any]:
            told = continuous_batching_config
            asked.append(None if told is None else (told.use_cuda_graph, told.use_async_batching))
            raise RuntimeError("no device")

    for version in (2, 3):
        monkeypatch.setattr(gpu_peers, f"is_flash_attn_{version}_available", lambda version=version: version in flash)
    assert gpu_peers.attention_of("cuda") == attention
    assert gpu_peers.attention_of("cpu") == "sdpa"
    told = gpu_peers.by_transformers(cast("Generates", Peer()), [[1]], 2, "cuda")
    assert told["continuous_batching"] == {"failed": "RuntimeError: no device"}
    assert (gpu_peers.BATCHING_IN_GRAPHS in told) == (not flash)
    assert asked == ([None] if flash else [None, (True, True)])


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


def benchmark(folder: Path, record: Record, **until: float) -> gpu.Benchmark:
    """The rehearsed one, of two steps a cell, with time without end but for what is named."""
    return gpu.Benchmark(gpu.REHEARSAL, folder, record, 2, dict.fromkeys(gpu.PARTS, float("inf")) | until)


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
    monkeypatch.setattr(gpu, "read_peer", without_room)
    record = Record({}, None, Console(file=io.StringIO()))
    with torch.no_grad():  # so that it is as before afterwards
        benchmark(tmp_path, record, smaller=0, waiting=0).run(("decoding", "peers"))
    assert len(held) == 2
    assert not alive
    rows = record.rows("tiny")
    assert [row["transformers"] for row in rows] == [{"failed": "OutOfMemoryError: there is no room"}] * 4


def test_a_model_that_a_device_has_no_room_for_and_a_cell_that_fails_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Record({}, tmp_path / "record.json", Console(file=io.StringIO()))
    monkeypatch.setattr(gpu, "make_model", lambda *_: None)
    loads: list[str] = []

    class Cells(gpu.Cells):
        def __init__(self, folder: Path, programme: gpu.Programme, model: gpu.Model) -> None:
            loads.append(model.name)
            if model.options:
                raise RuntimeError("ptxas failed")
            self.captured = {"sizes": 1}

        def decode(self, batch: int, context: int, steps: int) -> dict[str, Any]:
            if (batch, context) == (3, 8):
                return {"not_run": "it takes 9 blocks, and the cache holds 8"}
            if (batch, context) == (3, 40):
                raise AssertionError("the step has faults")
            return {way: {"seconds": 1.0, "tokens_per_second": 1.0} for way in gpu.WAYS}

        def wait(self, batch: int, context: int) -> Iterator[tuple[str, dict[str, Any]]]:
            if context == 40:
                raise RuntimeError("CUPTI is not there")
            yield from ((way, {"device_waits": 0.25}) for way in gpu.WAYS)

    monkeypatch.setattr(gpu, "Cells", Cells)
    benchmark(tmp_path, record).run(("decoding", "smaller", "waiting"))
    told = json.loads((tmp_path / "record.json").read_text())["shapes"]
    assert loads == ["tiny", "tiny, int8", "tiny"]
    first, small, second, failed = told["tiny"]
    assert first["waiting"] == {way: {"device_waits": 0.25} for way in gpu.WAYS}
    assert small == {"batch": 3, "context": 8, "not_run": "it takes 9 blocks, and the cache holds 8"}
    assert second["waiting"] == {"failed": "RuntimeError: CUPTI is not there"}
    assert failed == {"batch": 3, "context": 40, "failed": "AssertionError: the step has faults"}
    assert [row["failed"] for row in told["tiny, int8"]] == ["RuntimeError: ptxas failed"]


def test_a_run_that_takes_too_long_is_recorded_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limits: list[float] = []

    def too_long(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        limits.extend([timeout] * ("tune" in command))
        raise subprocess.TimeoutExpired(command, timeout)

    out = tmp_path / "training.json"
    words = ["gpu_training", "--rehearse", "--parts", "fits", "--minutes", "2", "--out", str(out), "--work", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(subprocess, "run", too_long)
    assert gpu_training.main() == 1, capsys.readouterr().out
    rows = json.loads(out.read_text())["cases"]
    assert len(rows) == len(limits) == 3
    assert all(limit <= row["limit_seconds"] for limit, row in zip(limits, rows, strict=True))
    assert {row["failed"].partition(" the ")[0] for row in rows} == {"it took longer than"}
    assert max(limits) <= 120
    assert limits == sorted(limits, reverse=True)


def test_a_case_may_have_a_part_of_the_device_and_others_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[str | None] = []

    def noted(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        shares.append(env.get("PYTORCH_ALLOC_CONF"))
        assert shares[-1] is None or "PYTORCH_CUDA_ALLOC_CONF" not in env, "which torch would read first"
        return subprocess.CompletedProcess(command, 1, "", "no device")

    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:native")
    monkeypatch.setattr(subprocess, "run", noted)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=96 << 30))
    fits = [case for case in gpu_training.cases() if case.part == "fits"]
    for number, case in enumerate(fits):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert gpu_training.run(case, folder, tmp_path / "text.txt", 60, rehearse=False) == {"failed": "no device"}
    assert shares == [None, "per_process_memory_fraction:0.2500", None]


def test_every_part_begins_its_cases_within_its_share_and_says_how_to_make_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]

    def takes_a_minute(case: gpu_training.Case, *_: object, **__: object) -> dict[str, Any]:
        clock[0] += 60
        return {"case": case.name}

    monkeypatch.setattr(gpu_training, "run", takes_a_minute)
    monkeypatch.setattr(gpu_training, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    wanted = list(gpu_training.cases())
    until = gpu_training.shared_out({case.part for case in wanted}, 0.0, 570.0)
    assert until == {"exact": 180.0, "ways": 300.0, "fits": 450.0, "rows": 510.0, "disk": 570.0}
    rows = list(gpu_training.measured(wanted, tmp_path, tmp_path / "text", 570.0, rehearse=False, until=until))
    ran = [row["part"] for row in rows if "not_run" not in row]
    assert ran == ["exact"] * 3 + ["ways"] * 2 + ["fits"] * 3 + ["rows", "disk"]
    left = [(row["part"], row["not_run"]) for row in rows if "not_run" in row]
    assert {why for part, why in left if part == "ways"} == {"its time was over: --parts ways"}
    of_two = gpu_training.shared_out({"rows", "ways"}, 10.0, 100.0)
    assert of_two == {"ways": 70.0, "rows": 100.0}, "nothing is kept for those that nobody asked for"


def test_a_run_that_leaves_no_figures_or_others_steps_leaves_the_other_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = iter([{"losses": [3.0, 2.0]}, KeyError("device_bytes"), {"losses": [3.0]}, {"losses": [3.0, 2.5]}])

    def runs(*_: object, **__: object) -> dict[str, Any]:
        found = next(ends)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(gpu_training, "run", runs)
    wanted = [case for case in gpu_training.cases() if case.part == "exact"][:4]
    rows = list(gpu_training.measured(wanted, tmp_path, tmp_path / "text", float("inf"), rehearse=False))
    assert [row.get("failed") for row in rows] == [
        None, "KeyError: 'device_bytes'", "it has the losses of 1 steps, and the other of 2", None,
    ]  # fmt: skip
    assert rows[3]["furthest_loss"] == 0.5


def test_no_run_has_more_than_a_quarter_of_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(command: list[str], *, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", too_long)
    case = next(case for case in gpu_training.cases() if case.part == "fits")
    (row,) = gpu_training.measured([case], tmp_path, tmp_path / "text", float("inf"), rehearse=True)
    assert row["limit_seconds"] == 900


def test_a_sanitizer_is_found_where_it_is_and_watches_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands for NVIDIA's, which says what it was asked for."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    monkeypatch.setattr(sanitized, "TOOLKIT", tmp_path / "none")
    assert sanitized.sanitizer() is None
    program = tmp_path / "nvidia/cu13/bin/compute-sanitizer"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\necho "$@"\necho "cached: $PYTORCH_NO_CUDA_MEMORY_CACHING"\nexit 99\n')
    program.chmod(0o755)
    assert sanitized.sanitizer() == str(program)
    ended = sanitized.watched(str(program), "--beyond")
    assert ended.returncode == sanitized.FOUND
    asked, cached = ended.stdout.splitlines()
    assert cached == "cached: 1"
    assert asked.endswith(f"{sys.executable} -m tests.gpu.sanitized --beyond")
    kernels = {"attend", "combine", "quantized_linear", "rms_norm", "sum_and_norm", "write_kv"}
    assert set(re.findall(r"--kernel-name kernel_substring=(\w+)", asked)) == kernels == set(sanitized.kernels_by_name())


@pytest.mark.slow
def test_the_benchmark_of_training_makes_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forked(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """The command without its imports, which take longer than these runs."""
        if command[0] != sys.executable:
            raise FileNotFoundError(command[0])
        if command[2] == "finetune":
            return run_command(*command[3:])
        program = warm.start(command[2], command[3:])
        out, err = program.communicate(600)
        return subprocess.CompletedProcess(command, program.wait(), out, err)

    out = tmp_path / "training.json"
    monkeypatch.setattr(sys, "argv", ["gpu_training", "--rehearse", "--out", str(out)])
    monkeypatch.setattr(subprocess, "run", forked)
    assert gpu_training.main() == 0, capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["machine"]["doctor"]["ok"]
    speeds = record["machine"]["speeds"]
    assert min(speeds["pinned_gb_s"]["to_device"], speeds["pinned_gb_s"]["from_device"], speeds["cpu_adam"]["gb_s"]) > 0
    rows = record["cases"]
    assert {row["part"] for row in rows} == {"exact", "ways", "fits", "rows", "disk"}
    assert [row["refused"]["exit_code"] for row in rows if "refused" in row] == [2]
    run = [row for row in rows if not {"left_out", "refused"} & set(row)]
    assert len(run) == 13
    assert [row["case"] for row in rows if row.get("left_out") == "it needs a CUDA device"] == [
        "SuperOffload, bf16",
        "1.4B, SuperOffload",
        "packed rows, by lengths",
        "packed rows, fused loss",
    ]
    assert [row["case"] for row in rows if "times_as_fast" in row] == [
        "1.4B, Twin-Flow",
        "1.4B, ZenFlow",
        "1.4B, optimizer on NVMe",
    ]
    for row in run:
        assert len(row["losses"]) == 4
        assert row["host_bytes"]["measured"] > 0
        assert row["device_busy"] == "not told: a rehearsal has no GPU"
    (disk,) = (row for row in run if row["part"] == "disk")
    assert min(disk["file_access"]["read_gb_s"], disk["file_access"]["write_gb_s"]) > 0
    assert "moved" in disk
    compared = [row for row in run if "furthest_loss" in row]
    assert len(compared) == 4
    assert [row["case"] for row in compared if row["furthest_loss"] > 0.01] == []
