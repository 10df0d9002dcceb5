"""What a run leaves for the next one and for its reader: the log line by line, records whole or absent, saves whole or not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointWriter
from finetune.output.folder import CHECKPOINTS, RESUME, SNAPSHOTS, run_of
from finetune.output.log import forget_after, last_step, read_log, tokens_at
from finetune.output.records import FORECAST, MEASURED, beside, read_json, write_json
from finetune.output.saves import is_whole, manifest_of, newest_first, newest_manifest, newest_whole

GIB = 1 << 30


def write_log(log: Path, entries: list[Any], tail: str = "") -> Path:
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries) + tail, encoding="utf-8")
    return log


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_are_taken_again_are_forgotten_and_all_else_stays_as_it_was(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    entries = [{"step": draw.randint(0, 30), "loss": draw.random(), "n": number} for number in range(40)]
    log = write_log(tmp_path / "log.jsonl", entries, tail='{"step": 3, "lo')
    before = log.read_text().splitlines()
    step = draw.randint(0, 30)
    forget_after(log, step)
    kept = [line for line, entry in zip(before, entries, strict=False) if entry["step"] <= step]
    assert log.read_text().splitlines() == kept, "byte for byte, and without the line that a kill cut short"
    assert last_step(log) == max((entry["step"] for entry in entries if entry["step"] <= step), default=0)
    forget_after(log, step)
    assert log.read_text().splitlines() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_log_is_read_whatever_stands_between_its_lines(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [{"step": 1, "tokens": 10}, {"step": 1, "eval_loss": 2.0}, {"note": "é"}])
    log.write_bytes(log.read_bytes() + b'[1]\n"word"\n\xff\xfe\n{"step": 4, "tokens": 25.0}\n{"step": 9, "tok')
    assert last_step(log) == 4
    assert (tokens_at(log, 1), tokens_at(log, 4), tokens_at(log, 9), tokens_at(log, 2)) == (10, 25, None, None)
    forget_after(log, 0)
    assert [json.loads(line) for line in log.read_text().splitlines()] == [{"note": "é"}], "what has no step is of no step"
    assert (last_step(tmp_path / "no"), tokens_at(tmp_path / "no", 1)) == (0, None)
    forget_after(tmp_path / "no", 3)
    assert not (tmp_path / "no").exists()


def test_a_reader_of_the_whole_log_takes_whole_lines_alone(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", [{"step": 1}, {"step": 2}], tail='{"step": 3}')
    assert [entry["step"] for entry in read_log(log)] == [1, 2], "one without its end may be cut short"


def test_a_record_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert read_json(path) is None
    write_json(path, {"where": Path("x"), "n": 1})
    assert read_json(path) == {"where": "x", "n": 1}

    class Unspeakable:
        def __str__(self) -> str:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        write_json(path, {"n": Unspeakable()})
    assert read_json(path) == {"where": "x", "n": 1}, "the one before counts until the new one is whole"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    for damaged in (b"", b"{", b"[1]", b"3", b"\xff"):
        path.write_bytes(damaged)
        assert read_json(path) is None


@pytest.mark.parametrize(
    ("said", "seen", "line"),
    [
        (None, {"host_bytes": GIB}, None),
        ({"host_bytes": GIB}, None, None),
        ({"host_bytes": GIB}, {"host_bytes": 0}, None),
        ({"host_bytes": 3 * GIB}, {"host_bytes": 2 * GIB}, "peaks: host memory 2.00 GiB (forecast 3.00, +50 %)"),
        (
            {"host_bytes": 9 * GIB, "device_bytes": 20 * GIB, "disk_bytes": 4 * GIB},
            {"host_bytes": 10 * GIB, "device_bytes": 40 * GIB, "disk_bytes": GIB},
            "peaks: host memory 10.0 GiB (forecast 9.00, -10 %); device memory a rank 40.0 GiB (forecast 20.0, -50 %); "
            "disk 1.00 GiB (forecast at most 4.00)",
        ),
        ({}, {"disk_bytes": 200 * GIB}, "peaks: disk 200 GiB (forecast at most 0.00)"),
    ],
)
def test_what_was_measured_stands_beside_what_was_said(
    tmp_path: Path, said: dict[str, int] | None, seen: dict[str, int] | None, line: str | None
) -> None:
    for name, values in ((FORECAST, said), (MEASURED, seen)):
        if values is not None:
            write_json(tmp_path / name, values)
    assert beside(tmp_path) == line


# -- saves


def save(root: Path, step: int, value: float = 0.0, **extra: Any) -> Path:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    with CheckpointWriter(root, step=step, config=config, extra=extra) as writer:
        writer.add("weight", torch.full((4,), value))
    return root / f"step-{step:08d}"


def test_the_save_that_counts_comes_first_and_then_the_newest(tmp_path: Path) -> None:
    assert newest_whole(tmp_path / "nowhere") is None
    assert newest_first(tmp_path / "nowhere") == []
    folders = {step: save(tmp_path, step) for step in (2, 30, 4)}
    assert newest_whole(tmp_path) == folders[4], "the one written last, not that of the highest step"
    assert newest_first(tmp_path) == [folders[4], folders[30], folders[2]]
    (folders[4] / "manifest.json").write_text("{")
    assert newest_first(tmp_path)[0] == newest_whole(tmp_path)
    assert sorted(newest_first(tmp_path)) == sorted(folders.values()), "each once, whole or not"


def test_a_save_is_whole_with_its_manifest_and_all_its_bytes(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, settings={"data": "abc"})
    manifest = manifest_of(folder)
    assert manifest is not None
    assert manifest.extra["settings"] == {"data": "abc"}
    assert is_whole(folder)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert not is_whole(folder), "a byte short"
    weights.unlink()
    assert not is_whole(folder), "a file missing"
    weights.write_bytes(content)
    assert is_whole(folder)
    (folder / "manifest.json").write_text("[]")
    assert not is_whole(folder)
    assert manifest_of(folder) is None
    (folder / "manifest.json").unlink()
    assert not is_whole(folder), "without a manifest nobody knows what there should be"
    assert not is_whole(tmp_path / "nowhere")


def test_a_resume_state_speaks_for_a_run_before_its_checkpoint(tmp_path: Path) -> None:
    assert newest_manifest(tmp_path) is None
    save(tmp_path / CHECKPOINTS, 7, of="checkpoint")
    manifest = newest_manifest(tmp_path)
    assert manifest is not None
    assert manifest.extra["of"] == "checkpoint"
    save(tmp_path / RESUME, 5, of="resume")
    manifest = newest_manifest(tmp_path)
    assert manifest is not None
    assert manifest.extra["of"] == "resume"


def test_a_run_is_known_by_any_of_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    for root in (CHECKPOINTS, SNAPSHOTS, RESUME):
        (run / root / "step-00000001").mkdir(parents=True)
    inside = [run, run / CHECKPOINTS, run / CHECKPOINTS / "step-00000001", run / SNAPSHOTS / "step-00000001"]
    assert [run_of(path) for path in inside] == [None] * 4, "without its settings it is no run"
    (run / "config.yaml").write_text("")
    assert [run_of(path) for path in inside] == [run] * 4
    assert [run_of(run / RESUME), run_of(tmp_path), run_of(run / "data" / "x")] == [None] * 3
    monkeypatch.chdir(run / CHECKPOINTS)
    assert run_of(Path("step-00000001")) == run
    (tmp_path / "link").symlink_to(run / CHECKPOINTS / "step-00000001")
    assert run_of(tmp_path / "link") == run
