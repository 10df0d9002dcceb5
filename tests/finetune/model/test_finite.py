"""A weight that is not finite is refused by its name, wherever weights are loaded, before anything is computed with it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointWriter, open_checkpoint
from finetune.cli import main
from finetune.config import DataConfig, LoraConfig, ModelConfig, RunConfig, TuneConfig
from finetune.data.prepared import Prepared
from finetune.errors import WeightNotFinite
from finetune.model.build import _always, build_empty
from finetune.model.finite import check_finite
from finetune.train.initial_model import InitialModel
from finetune.train.resume import ResumeState
from tests.support.models import build, save

SPOILED = "gpt_neox.layers.1.mlp.dense_h_to_4h.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gpt_neox", tmp_path_factory.mktemp("sound") / "model")


def spoiled(sound: Path, folder: Path, number: float, name: str = SPOILED) -> Path:
    """A copy of the checkpoint with one number changed."""
    shutil.copytree(sound, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[5] = number
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def state_in(output: Path, tensors: dict[str, torch.Tensor]) -> ResumeState:
    progress = {"step": 3, "samples": 6, "tokens": 60, "optimizer_steps": 3, "skipped_in_a_row": 0}
    extra = {"progress": progress, "settings": {}}
    with CheckpointWriter(output / "resume", step=3, config={"model_type": "gpt_neox"}, extra=extra) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return ResumeState(open_checkpoint(output / "resume"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_one_such_number_is_found_and_counted(dtype: torch.dtype, number: float) -> None:
    tensor = torch.full((3, 4), 60_000.0).to(dtype)
    check_finite("weight", tensor)
    tensor[1, 2] = number
    with pytest.raises(WeightNotFinite, match=rf"tensor 'weight' holds {number} at \[1, 2\]; 1 of its 12 numbers is"):
        check_finite("weight", tensor)


def test_what_has_no_numbers_or_none_that_could_be_infinite_is_well() -> None:
    check_finite("empty", torch.zeros(0))
    check_finite("counts", torch.tensor([1, 2]))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_training_does_not_begin_with_it(sound: Path, tmp_path: Path, number: float) -> None:
    folder = spoiled(sound, tmp_path / "model", number)
    config = TuneConfig(
        run=RunConfig(output=str(tmp_path / "run")), data=DataConfig(train=("text",)), model=ModelConfig(path=str(folder))
    )
    facts: dict[str, Any] = dict.fromkeys(Prepared.__dataclass_fields__, 0)
    origin = InitialModel(config, Prepared(**{**facts, "num_ids": 200, "stop_ids": ()}))
    rule = rf"model\.path: {folder}: tensor '{SPOILED}' holds {number} at \[0, 5\]"
    with pytest.raises(WeightNotFinite, match=rule):
        origin.fill(build_empty(origin.hf_config, torch.float32, _always([])), _always)


@pytest.mark.parametrize("command", ["evaluate", "predict", "export"])
def test_other_commands_refuse_it_too(sound: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spoiled(sound, tmp_path / "model", math.nan)
    (tmp_path / "text.txt").write_text("some text to complete")
    words = {
        "evaluate": ["--data", str(tmp_path / "text.txt")],
        "predict": ["--prompts", str(tmp_path / "text.txt")],
        "export": [str(tmp_path / "out")],
    }
    assert main([command, str(folder), *words[command]]) == 2
    assert f"{folder}: tensor '{SPOILED}' holds nan at [0, 5]" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "text.txt"], "nothing is written"


@pytest.mark.parametrize("command", ["evaluate", "export"])
def test_a_number_that_the_type_asked_for_does_not_have_is_refused(
    sound: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = spoiled(sound, tmp_path / "model", 70_000.0)
    (tmp_path / "text.txt").write_text("some text to score")
    words = {"evaluate": ["--data", str(tmp_path / "text.txt")], "export": [str(tmp_path / "out")]}[command]
    assert main([command, str(folder), *words, "--dtype", "float16"]) == 2
    assert f"tensor '{SPOILED}' holds 70000 at [0, 5], which float16 has no number for" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert main([command, str(folder), *words, "--dtype", "float32"]) == 0


def test_a_resume_state_is_refused_by_the_weight_or_the_moment(sound: Path, tmp_path: Path) -> None:
    weights = {f"master.{name}": parameter.detach() for name, parameter in build("gpt_neox").named_parameters()}
    config = TuneConfig(run=RunConfig(output="run"), data=DataConfig(train=("text",)), model=ModelConfig(path=str(sound)))
    facts: dict[str, Any] = dict.fromkeys(Prepared.__dataclass_fields__, 0)
    hf_config = InitialModel(config, Prepared(**{**facts, "num_ids": 200, "stop_ids": ()})).hf_config
    moment = f"exp_avg_sq.{SPOILED}"
    state = state_in(tmp_path / "moment", {**weights, moment: torch.tensor([1.0, math.inf])})
    state.fill(build_empty(hf_config, torch.float32, _always([])), _always)
    with pytest.raises(WeightNotFinite, match=rf"run\.resume: .*step-00000003: tensor '{moment}' holds inf at \[1\]"):
        state.moment(moment)
    weights[f"master.{SPOILED}"].view(-1)[5] = math.nan
    state = state_in(tmp_path / "weight", weights)
    with pytest.raises(WeightNotFinite, match=rf"run\.resume: .*step-00000003: tensor '{SPOILED}' holds nan at \[0, 5\]"):
        state.fill(build_empty(hf_config, torch.float32, _always([])), _always)


def test_adapters_and_what_they_are_joined_with_are_looked_at(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from finetune.model.adapters import adapter_config_of, add_adapters, as_peft_names_them

    base = build("gpt_neox")
    base.name_or_path = str(sound)  # as peft would find it
    model = add_adapters(base, LoraConfig(rank=2), base=str(sound), seed=0)
    trained = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config_of(model)))
    tensors = {name: tensor.clone() for name, tensor in as_peft_names_them(model, trained).items()}
    save_file(tensors, adapter / "adapter_model.safetensors")
    broken = spoiled(sound, tmp_path / "base", math.nan)
    assert main(["merge", str(adapter), str(tmp_path / "out"), "--base", str(broken)]) == 2
    assert f"{broken} with the adapter {adapter}: tensor '{SPOILED}' holds nan at [0, 5]" in capsys.readouterr().err
    name = next(name for name in tensors if "layers.1.attention.dense.lora_A" in name)
    tensors[name].view(-1)[5] = math.inf
    save_file(tensors, adapter / "adapter_model.safetensors")
    assert main(["merge", str(adapter), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"{adapter}: tensor 'base_model.model.gpt_neox.layers.1.attention.dense.lora_A" in said
    assert "holds inf at [0, 5]" in said
    assert not (tmp_path / "out").exists()
