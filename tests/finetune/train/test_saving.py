"""What a save holds and who takes part in it: all ranks gather it whatever happens to the disk, rank 0 writes."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointWriter, open_checkpoint
from finetune.base_model.identity import Base
from finetune.errors import RunError
from finetune.output.saves import is_whole, manifest_of
from finetune.train import saving
from finetune.train.position import RunPosition
from finetune.train.saving import CheckpointSaver

CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
NAMES = ("a", "b", "c")


class Engine:
    """One of two ranks; counts what is gathered, and answers for the other rank as it is told."""

    device = torch.device("cpu")

    def __init__(self, rank: int = 0, *, others_good: bool = True) -> None:
        self.rank, self._others_good = rank, others_good
        self.gathered: list[str] = []
        self.asked: list[Any] = []

    def _all(self, prefix: str, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, torch.Tensor | None]]:
        for number, name in enumerate(NAMES):
            self.gathered.append(prefix + name)
            yield prefix + name, torch.full((3,), number, dtype=dtype) if self.rank == 0 else None

    def weights(self, dtype: torch.dtype, *, from_master: bool = False) -> Iterator[tuple[str, torch.Tensor | None]]:
        self.asked.append((dtype, from_master))
        return self._all("", dtype)

    def master_weights(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._all("")

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._all("exp_avg.")

    def rng_states(self) -> list[torch.Tensor]:
        return [torch.tensor([rank], dtype=torch.uint8) for rank in range(2)]

    def agree(self, good: bool) -> bool:
        self.asked.append(good)
        return good and self._others_good


def saver_of(output: Path, **changes: Any) -> CheckpointSaver:
    saver = CheckpointSaver(
        output=output, config=CONFIG, generation_config={"eos_token_id": 0}, tokenizer_files=(), dtype=torch.bfloat16,
        from_master=False, max_shard_bytes=1 << 30, keep=2, resume_state=True, settings={"data": "abc"},
        course={"run.ranks": 2},
    )  # fmt: skip
    return replace(saver, **changes)


def save(saver: CheckpointSaver, engine: Engine, step: int = 3) -> Path:
    any_engine: Any = engine
    return saver.save(any_engine, RunPosition(step=step, samples=10 * step))


EVERYTHING = [*NAMES, *(f"exp_avg.{name}" for name in NAMES), *NAMES]
"""A resume state and then a checkpoint."""


def test_a_save_is_a_served_folder_and_a_state_of_all_ranks(tmp_path: Path) -> None:
    words = tmp_path / "tokenizer.json"
    words.write_text("{}")
    engine = Engine()
    folder = save(saver_of(tmp_path / "run", tokenizer_files=(words,)), engine)
    assert folder == tmp_path / "run" / "checkpoints" / "step-00000003"
    assert engine.gathered == EVERYTHING
    assert engine.asked == [True, (torch.bfloat16, False), True]
    served, state = (tmp_path / "run" / root / "step-00000003" for root in ("checkpoints", "resume"))
    assert is_whole(served)
    assert is_whole(state)
    assert (served / "tokenizer.json").is_file()
    assert json.loads((served / "generation_config.json").read_text()) == {"eos_token_id": 0}
    assert not (state / "tokenizer.json").exists()
    assert json.loads((state / "generation_config.json").read_text()) == {"eos_token_id": 0}
    with open_checkpoint(state) as opened:
        names = {f"{prefix}{name}" for prefix in ("master.", "exp_avg.") for name in NAMES} | {"rng.cpu.0", "rng.cpu.1"}
        assert set(opened.tensors) == names
        assert opened.read("rng.cpu.1").tolist() == [1]
        assert opened.read("master.c").dtype == torch.float32
    for place in (served, state):
        manifest = manifest_of(place)
        assert manifest is not None
        assert manifest.extra["settings"] == {"data": "abc"}
        assert manifest.extra["course"] == {"run.ranks": 2}
        assert RunPosition.recorded(manifest.extra["progress"]) == RunPosition(step=3, samples=30)


def test_other_ranks_gather_everything_and_write_nothing(tmp_path: Path) -> None:
    engine = Engine(rank=1)
    folder = save(saver_of(tmp_path / "run"), engine)
    assert folder == tmp_path / "run" / "checkpoints" / "step-00000003", "who asks learns its name on every rank"
    assert engine.gathered == EVERYTHING
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("moment", ["beginning", "first tensor", "last tensor", "commit"])
def test_a_disk_that_fails_ends_the_writing_and_not_the_gathering(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    before = save(saver_of(run), Engine(), step=1)

    class Failing(CheckpointWriter):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.fail("beginning")
            super().__init__(*arguments, **named)

        def fail(self, now: str) -> None:
            if now == moment:
                raise OSError(errno.ENOSPC, "No space left on device")

        def add(self, name: str, tensor: torch.Tensor) -> None:
            self.fail({"master.a": "first tensor", "rng.cpu.1": "last tensor"}.get(name, ""))
            super().add(name, tensor)

        def commit(self) -> Path:
            self.fail("commit")
            return super().commit()

    monkeypatch.setattr(saving, "CheckpointWriter", Failing)
    engine = Engine()
    with pytest.raises(RunError, match=r"resume/step-00000002: the save of step 2 failed: .*No space left on device$"):
        save(saver_of(run), engine, step=2)
    assert engine.gathered == EVERYTHING[:6], "the other ranks wait in every one of these"
    assert engine.asked == [False]
    assert [path.name for path in (run / "resume").iterdir() if path.is_dir()] == ["step-00000001"]
    assert is_whole(before)


def test_a_save_that_failed_on_rank_0_fails_on_all(tmp_path: Path) -> None:
    engine = Engine(rank=1, others_good=False)
    with pytest.raises(RunError, match=r"the save of step 3 failed: see rank 0$"):
        save(saver_of(tmp_path / "run"), engine)


def test_weights_alone_are_a_snapshot_or_a_save_without_a_state(tmp_path: Path) -> None:
    engine: Any = Engine()
    saver = saver_of(tmp_path / "run", keep=1, resume_state=False, dtype=torch.float32, from_master=True)
    for step in (1, 2):
        assert saver.snapshot(engine, RunPosition(step=step)).parent.name == "snapshots"
    assert len(list((tmp_path / "run" / "snapshots").glob("step-*"))) == 2, "all of them are kept"
    for step in (1, 2):
        save(saver, engine, step)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000002"]
    assert not (tmp_path / "run" / "resume").exists()
    assert engine.asked[::2] == [(torch.float32, True)] * 4


def test_a_checkpoint_that_is_missing_beside_its_state_is_made_up_for(tmp_path: Path) -> None:
    saver, position = saver_of(tmp_path / "run"), RunPosition(step=3)
    engine: Any = Engine()
    folder = save(saver, engine)
    assert saver.save_missing(engine, position) is None
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert saver.save_missing(engine, position) == folder, "one that is not whole is missing"
    assert is_whole(folder)
    elsewhere = saver_of(tmp_path / "on another machine")
    other: Any = Engine(rank=1)
    assert elsewhere.save_missing(other, position) is None
    assert other.gathered == [], "a rank that sees no folder does as rank 0 found"
    other = Engine(rank=1, others_good=False)
    with pytest.raises(RunError):
        saver.save_missing(other, position)
    assert other.gathered == list(NAMES)


def test_the_base_is_remembered_where_a_run_cannot_go_on_without_it(tmp_path: Path) -> None:
    base = Base(folder="/models/base", identity="manifest:1234")
    whole = saver_of(tmp_path / "whole", base=base)
    adapters = saver_of(tmp_path / "adapters", base=base, adapter_config={"peft_type": "LORA", "r": 4})
    for saver, in_checkpoint in ((whole, False), (adapters, True)):
        folder = save(saver, Engine())
        for root, remembered in (("resume", True), ("checkpoints", in_checkpoint)):
            manifest = manifest_of(folder.parents[1] / root / folder.name)
            assert manifest is not None
            assert ("1234" in json.dumps(dict(manifest.extra))) is remembered, (saver.output, root)
    served = tmp_path / "adapters" / "checkpoints" / "step-00000003"
    assert json.loads((served / "adapter_config.json").read_text())["r"] == 4
    assert (served / "adapter_model.safetensors").is_file()
    assert not (served / "generation_config.json").exists(), "an adapter's folder is peft's"
    assert not (tmp_path / "adapters" / "resume" / "step-00000003" / "adapter_config.json").exists()
