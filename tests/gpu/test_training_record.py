"""What the benchmark of fine-tuning records beside losses and seconds: the machine, the device's busy share, the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_machine, gpu_tiles, gpu_training, gpu_watch
from benchmarks.gpu_watch import NO_STEPS, Watch
from finetune.machine import ops
from tests.serve.runtime.test_gpu_figures import ONE, SLICE, Pynvml


def until(condition: Callable[[], object]) -> None:
    """Wait for it, at most a minute."""
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def told_steps(log: Path, *steps: int) -> None:
    log.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in steps))


def test_the_busy_share_is_of_the_steps_between_the_first_ones_and_the_last(tmp_path: Path) -> None:
    log, shares = tmp_path / "log.jsonl", iter([0.25, 0.75, 0.5])
    asked = threading.Semaphore(0)

    def use() -> float | None:
        asked.release()
        return next(shares, None)  # as of a GPU that tells nothing any more

    watch = Watch(log, range(2, 4), use, with_disk=False)
    with watch.looking():
        for steps in ((), (1,), (1, 2, 3, 4)):  # before, too early, too late
            told_steps(log, *steps)
            time.sleep(3 * gpu_watch._PERIOD_SECONDS)
        assert not asked.acquire(blocking=False), "nothing of a start or an end is looked at"
        told_steps(log, 1, 2)
        for _ in range(5):
            assert asked.acquire(timeout=60)
    assert watch.busy() == {"device_busy": {"share": 0.5, "looks": 3}}


def test_a_busy_share_that_nobody_can_tell_is_recorded_with_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = gpu_watch.use_of(ONE)
    assert missing == "not told: nvidia-ml-py is not installed, which the extra gpu brings"
    assert Watch(tmp_path / "none", range(2), missing, with_disk=False).busy() == {"device_busy": missing}
    nvml = Pynvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    of_gpu, of_slice = gpu_watch.use_of(ONE), gpu_watch.use_of(SLICE)
    assert not isinstance(of_gpu, str)
    assert not isinstance(of_slice, str)
    assert (of_gpu(), of_slice()) == (0.75, None)
    assert Watch(tmp_path / "none", range(2), of_gpu, with_disk=False).busy() == {"device_busy": NO_STEPS}

    def without_driver() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(nvml, "nvmlInit", without_driver)
    assert gpu_watch.use_of(ONE) == "not told: RuntimeError: Driver Not Loaded"


def test_a_look_that_fails_ends_no_run_and_is_told(tmp_path: Path) -> None:
    def broken() -> float:
        raise OSError("the GPU fell off the bus")

    told_steps(tmp_path / "log.jsonl", 1)
    watch = Watch(tmp_path / "log.jsonl", range(1, 2), broken, with_disk=True)
    with watch.looking():
        until(lambda: watch._fault)
    assert watch.busy() == {"device_busy": "not told: OSError: the GPU fell off the bus"}
    assert watch.moved() == {"moved": "not told: OSError: the GPU fell off the bus"}


def test_bytes_of_a_disk_are_told_by_step_and_by_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they were when a step was first seen to be taken, whenever the run was looked at besides."""
    log = tmp_path / "log.jsonl"
    watch = Watch(log, range(1, 4), "not told", with_disk=True)
    clock = iter((100.0, 102.0, 104.0))
    monkeypatch.setattr(gpu_watch, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    counted = iter(((10**9, 5 * 10**9), (2 * 10**9, 8 * 10**9), (5 * 10**9, 9 * 10**9)))
    monkeypatch.setattr(gpu_watch, "moved_bytes", lambda _: next(counted))
    assert watch.moved() == {"moved": NO_STEPS}
    for taken in (1, 1, 2, 2, 3):
        told_steps(log, *range(1, taken + 1))
        watch._look_once()
    read, written = {"bytes_per_step": 2e9, "gb_s": 1.0}, {"bytes_per_step": 2e9, "gb_s": 1.0}
    assert watch.moved() == {"moved": {"steps": 2, "seconds": 4.0, "read": read, "written": written}}


def test_bytes_are_those_of_the_processes_below_one(tmp_path: Path) -> None:
    """Written by a child of a child, which then waits; of a folder in memory the system counts none."""
    (tmp_path / "write.py").write_text(
        "import os, sys\n"
        "file = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)\n"
        "os.write(file, bytes(1 << 20))\n"
        "os.fsync(file)\n"
        "print(os.getpid(), flush=True)\n"
        "input()\n"
    )
    child = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", child, str(tmp_path / "write.py"), str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        writer = int(program.stdout.readline())
        counted = dict(line.split(": ") for line in Path(f"/proc/{writer}/io").read_text().splitlines())
        assert gpu_watch.moved_bytes(program.pid) == (int(counted["read_bytes"]), int(counted["write_bytes"]))
        assert gpu_watch.moved_bytes(os.getpid())[1] >= int(counted["write_bytes"])
        assert gpu_watch.moved_bytes(writer) == (0, 0), "nothing is below it"
        program.communicate("\n")


@pytest.mark.parametrize(
    ("code", "said", "refused"),
    [(2, "error: run.json, line 1: unknown key aio (allowed …)", True), (1, "unknown key aio", False), (0, "", False),
     (2, "Traceback\n  …\nunknown key aio", False), (2, "error: no such folder", False)],
)  # fmt: skip
def test_a_run_is_refused_cleanly_or_the_case_failed(code: int, said: str, refused: bool) -> None:
    case = next(case for case in gpu_training.cases() if case.refused)
    told = gpu_training.refusal(case, code, said)
    assert ("refused" in told, "failed" in told) == (refused, not refused)
    assert told["refused" if refused else "ended"] == {"exit_code": code, "message": said}


def test_a_file_that_asks_for_gpudirect_storage_is_refused_by_its_key(tmp_path: Path) -> None:
    case = next(case for case in gpu_training.cases() if case.refused)
    tree = gpu_training.tree_of(case, tmp_path, tmp_path / "text.txt", rehearse=True)
    assert tree["aio"] == {"use_gds": True}
    (tmp_path / "run.json").write_text(json.dumps(tree))
    command = [sys.executable, "-m", "finetune", "tune", str(tmp_path / "run.json")]
    done = subprocess.run(command, cwd=gpu_training.ROOT, capture_output=True, text=True, timeout=300)
    assert "refused" in gpu_training.refusal(case, done.returncode, done.stderr), done.stderr


def test_the_speed_of_the_disk_is_what_the_run_has_kept_of_it(tmp_path: Path) -> None:
    kept = {"block_bytes": 1 << 20, "queue_depth": 8, "threads": 2, "read_gib_s": 1.0, "write_gib_s": 0.5}
    (tmp_path / "disk.json").write_text(json.dumps(kept))
    told = gpu_training.file_access(tmp_path / "disk.json")["file_access"]
    assert (told.pop("read_gb_s"), told.pop("write_gb_s")) == (1.073741824, 0.536870912)
    assert told == {"block_bytes": 1 << 20, "queue_depth": 8, "threads": 2}
    assert gpu_training.file_access(tmp_path / "none.json") == {"failed": "the run left no none.json"}


def test_speeds_of_a_machine_are_measured_each_and_one_that_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "ensure", lambda *_: ops.Built(False, "no C++ compiler found to build it"))
    told = gpu_machine.speeds("cpu", copied=1 << 16, parameters=1 << 12)
    assert min(told["pinned_gb_s"][way] for way in ("to_device", "from_device")) > 0
    assert told["cpu_adam"] == {"failed": "RuntimeError: no C++ compiler found to build it"}
    assert told["failed"] == "cpu_adam: RuntimeError: no C++ compiler found to build it"


def test_what_a_machine_is_ends_in_time_and_says_what_could_not_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def slow(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        limits.append(timeout)
        if "doctor" in command:
            return subprocess.CompletedProcess(command, 1, 'a library speaks\n{"ok": false}\n', "")
        if command[0] == "nvidia-smi":
            return subprocess.CompletedProcess(command, 0, "580.65.06\n580.65.06\n", "")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    told = gpu_machine.machine(30.0, rehearse=True)
    assert told["versions"]["driver"] == "580.65.06"
    assert told["versions"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert told["doctor"] == {"ok": False}
    assert told["speeds"] == {"failed": "it took longer than the 30 s it had"}
    assert max(limits[1:]) <= 30
    assert gpu_machine.machine(0.0, rehearse=True)["speeds"] == {"failed": "the time was over before it began"}


def test_a_command_that_breaks_is_recorded_with_its_last_words() -> None:
    told = gpu_machine._told([sys.executable, "-c", "raise SystemExit('no room')"], {}, 60.0)
    assert told == {"failed": "exit code 1: no room"}


@pytest.mark.parametrize("benchmark", [gpu_training, gpu_tiles])
def test_a_record_that_can_go_nowhere_is_refused_before_anything_is_measured(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", "--rehearse", "--out", str(tmp_path / "none" / "record.json")])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
    assert f"--out: {tmp_path / 'none'} is no folder" in capsys.readouterr().err
