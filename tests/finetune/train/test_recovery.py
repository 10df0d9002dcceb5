"""A run that was stopped anywhere in its saves goes on from what is whole, exactly where it can, and says what was lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from checkpoint import CheckpointWriter, hold, open_checkpoint
from checkpoint.disk.durable import Disk
from finetune.config import DataConfig, LoraConfig, ModelConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.errors import ConfigError, RunError
from finetune.model.adapters import adapter_config_of, add_adapters, as_peft_names_them
from finetune.output.folder import claimed_output, step_folders
from finetune.output.saves import is_whole, newest_whole
from finetune.train import saving
from finetune.train.changes import changes_in_words
from finetune.train.position import RunPosition
from finetune.train.recovery import SavedWeights
from finetune.train.resume import ResumeState, find_resume_state
from finetune.train.saving import CheckpointSaver
from tests.support.models import build


class Killed(BaseException):
    """As a kill: nothing of the process goes on."""


class OneRank:
    """An engine whose weights are all the step's number."""

    rank = 0
    device = torch.device("cpu")
    loss_scale = None

    def __init__(self, model: PreTrainedModel, step: int) -> None:
        self.model, self._step = model, step
        self.exact: dict[str, torch.Tensor] = {}

    def weights(self, dtype: torch.dtype, *, from_master: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, torch.full_like(parameter, self._step, dtype=dtype)

    def master_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights(torch.float32)

    def optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "exp_avg.x", torch.ones(3)

    def rng_states(self) -> list[torch.Tensor]:
        return [torch.get_rng_state()]

    def set_rng_state(self, state: torch.Tensor) -> None: ...

    def set_master_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        self.exact = {name: read(name) for name, _ in self.model.named_parameters()}

    def set_optimizer_state(self, read: Callable[[str], torch.Tensor], optimizer_steps: int) -> None: ...

    def agree(self, good: bool) -> bool:
        return good


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return build("gpt_neox", num_hidden_layers=1, hidden_size=32, intermediate_size=32, max_position_embeddings=32)


def config(output: Path) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(output), resume="auto"),
        data=DataConfig(train=("text",), seq_len=16),
        model=ModelConfig(new={"model_type": "gpt_neox"}),
        tokenizer=TokenizerConfig(path="somewhere"),
    )


def keeper(output: Path, model: PreTrainedModel) -> CheckpointSaver:
    return CheckpointSaver(
        output=output,
        config=model.config.to_dict(),
        generation_config={},
        tokenizer_files=(),
        dtype=torch.bfloat16,
        from_master=False,
        max_shard_bytes=1 << 30,
        keep=2,
        resume_state=True,
        settings={"data": "a", "model": {"hidden_size": 32}},
    )


def at(step: int) -> RunPosition:
    return RunPosition(step=step, samples=10 * step, tokens=100 * step, optimizer_steps=step, skipped_in_a_row=0)


def stopped_before(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Have the writers raise ``error`` before their step on disk of this number, counted over all of them."""
    left = number

    def before_step(what: str) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise error

    def writer(*arguments: Any, **named: Any) -> CheckpointWriter:
        return CheckpointWriter(*arguments, **named, before_step=before_step)

    monkeypatch.setattr(saving, "CheckpointWriter", writer)


def weights_of(found: ResumeState | SavedWeights, model: PreTrainedModel) -> set[float]:
    engine = OneRank(model, 0)
    found.restore(engine)  # type: ignore[arg-type]
    return {float(value) for tensor in engine.exact.values() for value in tensor.unique()}


def test_killed_at_any_step_of_its_first_save_a_run_can_go_on(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = []
    for number in range(200):
        output = tmp_path / str(number)
        stopped_before(monkeypatch, number, Killed())
        try:
            keeper(output, model).save(OneRank(model, 5), at(5))  # type: ignore[arg-type]
        except Killed:
            killed = True
        else:
            killed = False
        monkeypatch.undo()
        with claimed_output(config(output)):
            found = find_resume_state(config(output))
        outcomes.append(found is not None)
        if found is not None:
            assert isinstance(found, ResumeState), "what counts first is the resume state: nothing is lost"
            assert (found.position, found.lost, weights_of(found, model)) == (at(5), (), {5.0})
            made_up = keeper(output, model).save_missing(OneRank(model, 5), found.position)  # type: ignore[arg-type]
            assert is_whole(output / "checkpoints" / "step-00000005")
            assert made_up is None or made_up.name == "step-00000005"
        if not killed:
            break
    assert outcomes == sorted(outcomes), "first nothing, then all"
    assert 10 < outcomes.index(True) < len(outcomes) - 10


def test_a_full_disk_in_the_resume_state_leaves_a_folder_that_starts_or_goes_on(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(28, "No space left on device")
    for number in (0, 3, 6):
        output = tmp_path / str(number)
        stopped_before(monkeypatch, number, full)
        with pytest.raises(RunError, match=r"resume/step-00000005: the save of step 5 failed: .*the disk is full"):
            keeper(output, model).save(OneRank(model, 5), at(5))  # type: ignore[arg-type]
        monkeypatch.undo()
        assert step_folders(output / "checkpoints") == step_folders(output / "resume") == []
        with claimed_output(config(output)):
            assert find_resume_state(config(output)) is None
        keeper(output, model).save(OneRank(model, 5), at(5))  # type: ignore[arg-type]
        stopped_before(monkeypatch, number, full)
        with pytest.raises(RunError, match="the save of step 9 failed"):
            keeper(output, model).save(OneRank(model, 9), at(9))  # type: ignore[arg-type]
        monkeypatch.undo()
        found = find_resume_state(config(output))
        assert found is not None
        assert found.position == at(5)


def saved(output: Path, model: PreTrainedModel, *steps: int) -> None:
    for step in steps:
        keeper(output, model).save(OneRank(model, step), at(step))  # type: ignore[arg-type]


def remove(folder: Path) -> None:
    Disk().remove_tree(folder)


def damage(folder: Path) -> None:
    """One bit of the weights is another, as a disk may do it."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_weights_alone_are_gone_on_from_and_what_was_lost_is_said(model: PreTrainedModel, tmp_path: Path) -> None:
    saved(tmp_path, model, 5)
    remove(tmp_path / "resume")
    with claimed_output(config(tmp_path)):
        found = find_resume_state(config(tmp_path))
    assert isinstance(found, SavedWeights)
    assert (found.position.step, found.position.samples, found.position.optimizer_steps) == (5, 50, 0)
    assert weights_of(found, model) == {5.0}
    assert "moments" in " ".join(found.lost)
    found.check({"data": "a", "model": {"hidden_size": 32}}, None)
    with pytest.raises(ConfigError, match=r"model\.hidden_size \(was 32, is 48\)"):
        found.check({"data": "a", "model": {"hidden_size": 48}}, None)
    other = build("gpt_neox", num_hidden_layers=2, hidden_size=32, intermediate_size=32)
    with pytest.raises(ConfigError, match=r"run\.resume: .*step-00000005: "):
        found.fill(other, None)  # type: ignore[arg-type]


def test_a_checkpoint_of_an_earlier_release_tells_its_step_and_the_log_its_tokens(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    with CheckpointWriter(tmp_path / "checkpoints", step=5, config=model.config.to_dict()) as writer:
        for name, parameter in model.named_parameters():
            writer.add(name, parameter.detach())
    (tmp_path / "log.jsonl").write_text('{"step": 5, "loss": 1.0, "tokens": 77}\n{"step": 6')
    found = find_resume_state(config(tmp_path))
    assert found is not None
    assert (found.position.step, found.position.samples, found.position.tokens) == (5, 40, 77)
    found.check({"data": "b", "model": {}}, None)
    lost = "; ".join(found.lost)
    assert "the proof that data and order, batch are those of before: " in lost
    assert "step-00000005 records nothing of them" in lost
    assert "the position: it is taken for 8 samples a step" in lost


def test_a_damaged_state_gives_way_to_the_one_before_and_then_to_weights(model: PreTrainedModel, tmp_path: Path) -> None:
    saved(tmp_path, model, 5, 9)
    damage(tmp_path / "resume" / "step-00000009")
    found = find_resume_state(config(tmp_path))
    assert isinstance(found, ResumeState)
    assert found.position == at(5)
    assert "step-00000009" in found.lost[0]
    damage(tmp_path / "resume" / "step-00000005")
    found = find_resume_state(config(tmp_path))
    assert isinstance(found, SavedWeights)
    assert found.path.name == "step-00000009"
    assert [what.split(" in ")[0] for what in found.lost[:2]] == ["the save"] * 2
    assert "BF16" in " ".join(found.lost)
    for step in (5, 9):
        damage(tmp_path / "checkpoints" / f"step-{step:08d}")
    with pytest.raises(ConfigError, match=r"no save of .* is whole"):
        find_resume_state(config(tmp_path))


@pytest.mark.parametrize("keep", [1, 2])
def test_going_on_from_an_older_save_removes_the_damaged_one_and_no_good_one(
    model: PreTrainedModel, tmp_path: Path, keep: int
) -> None:
    saved(tmp_path, model, 10, 20)
    damage(tmp_path / "resume" / "step-00000020")
    found = find_resume_state(config(tmp_path))
    assert found is not None
    assert found.position.step == 10
    replace(keeper(tmp_path, model), keep=keep).save(OneRank(model, 12), at(12))  # type: ignore[arg-type]
    for root in ("resume", "checkpoints"):
        assert [step for step, _ in step_folders(tmp_path / root)] == [10, 12][-keep:]
        assert newest_whole(tmp_path / root) == tmp_path / root / "step-00000012"
    found = find_resume_state(config(tmp_path))
    assert isinstance(found, ResumeState)
    assert (found.position, found.lost) == (at(12), ())


def test_a_save_that_is_served_stays_is_told_of_once_and_goes_with_the_next_save_after_its_server(
    model: PreTrainedModel, tmp_path: Path
) -> None:
    told: list[str] = []
    saver = replace(keeper(tmp_path, model), keep=1, say=told.append)
    engine = OneRank(model, 5)
    served = hold(saver.save(engine, at(5)))  # type: ignore[arg-type]
    for step in (10, 15):
        saver.save(engine, at(step))  # type: ignore[arg-type]
        assert [found for found, _ in step_folders(tmp_path / "checkpoints")] == [5, step]
        assert [found for found, _ in step_folders(tmp_path / "resume")] == [step]
        assert newest_whole(tmp_path / "checkpoints") == tmp_path / "checkpoints" / f"step-{step:08d}"
    (line,) = told
    assert f"{served.path} is being served, and stays beside the newest 1" in line
    served.release()
    saver.save(engine, at(20))  # type: ignore[arg-type]
    assert [found for found, _ in step_folders(tmp_path / "checkpoints")] == [20]


def test_weights_alone_tell_the_course_and_keep_the_learning_rate(model: PreTrainedModel, tmp_path: Path) -> None:
    course = {"optimizer.lr": 3e-5, "batch.total": 8}
    kept = replace(keeper(tmp_path, model), resume_state=False, course=course)
    kept.save(OneRank(model, 5), at(5))  # type: ignore[arg-type]
    found = find_resume_state(config(tmp_path))
    assert isinstance(found, SavedWeights)
    assert not any("the proof" in what or "the position" in what for what in found.lost)
    assert (found.course, found.learning_rate) == (course, 3e-5)
    assert changes_in_words(found.course, {**course, "batch.total": 16}) == ["changed: batch.total 8 -> 16"]


def test_without_a_resume_state_the_earlier_ones_are_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    saved(tmp_path, model, 20)
    replace(keeper(tmp_path, model), keep=1, resume_state=False).save(OneRank(model, 12), at(12))  # type: ignore[arg-type]
    assert [step for step, _ in step_folders(tmp_path / "resume")] == [20]
    assert [step for step, _ in step_folders(tmp_path / "checkpoints")] == [12]


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_alone_are_gone_on_from_by_the_names_peft_gives_them(
    model: PreTrainedModel, tmp_path: Path, method: Literal["lora", "dora"]
) -> None:
    lora = LoraConfig(rank=2, method=method)

    def wrapped(seed: int) -> nn.Module:
        return add_adapters(copy.deepcopy(model), lora, base="base", seed=seed)

    def trained(adapted: nn.Module) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in adapted.named_parameters() if parameter.requires_grad}

    ours, theirs = wrapped(1), wrapped(2)
    described = {"config": model.config.to_dict(), "adapter_config": adapter_config_of(theirs)}
    with CheckpointWriter(tmp_path / "checkpoints", step=5, **described) as writer:
        for name, tensor in as_peft_names_them(theirs, trained(theirs)).items():
            writer.add(name, tensor)
    tree = replace(config(tmp_path), model=ModelConfig(path="base"), lora=lora)
    found = find_resume_state(tree)
    assert isinstance(found, SavedWeights)
    expected = trained(theirs)
    assert any(not torch.equal(tensor, expected[name]) for name, tensor in trained(ours).items())
    found.fill_adapters(ours, lambda _: nullcontext(True))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trained(ours).items())


def test_the_saves_are_read_by_others_as_before(model: PreTrainedModel, tmp_path: Path) -> None:
    saved(tmp_path, model, 5)
    for root in ("checkpoints", "resume"):
        with open_checkpoint(tmp_path / root, verify="sha256") as checkpoint:
            assert checkpoint.step == 5
