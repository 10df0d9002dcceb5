"""``tessera-finetune pretrain`` as it is used: one command, checkpoints that others open, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.cli import main
from finetune.config import ActivationConfig, TuneConfig
from finetune.config.load import load_config
from finetune.engines.pipeline.layer_costs import measure, recall, remember
from finetune.engines.pipeline.layers import HeadLayer, LossTally, build_on_meta, split
from finetune.model.build import new_config
from finetune.model.isolation import positions_of
from finetune.trained.evaluate import evaluate
from tests.finetune.support import ROOT, run_command, small_run, write_config

GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4}


def pretraining(text: Path, output: Path, **sections: Any) -> dict[str, Any]:
    tree = small_run(text, output, pipeline={"stages": 2}, model={"new": GPT2})
    tree["run"]["ranks"] = 2
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return tree


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> tuple[Path, Path, str]:
    """Configuration, output and what was printed of a finished run of two stages."""
    folder = tmp_path_factory.mktemp("pretrained")
    config = write_config(pretraining(text_folder, folder / "run"), folder / "run.yaml")
    done = run_command("pretrain", config)
    assert done.returncode == 0, done.stderr
    return config, folder / "run", done.stdout


def test_the_stages_are_printed_before_training(pretrained: tuple[Path, Path, str]) -> None:
    lines = pretrained[2].splitlines()
    stages = [line for line in lines if line.startswith("stage ")]
    assert len(stages) == 2
    assert all("parameters; " in line and line.endswith(" ms") for line in stages)
    assert any(line.startswith("slowest stage: ") for line in lines)


def test_the_loss_falls_and_the_checkpoint_scores_as_the_run_said(
    pretrained: tuple[Path, Path, str], text_folder: Path
) -> None:
    _, output, _ = pretrained
    log = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in log if "loss" in line]
    assert losses[-1] < losses[0] - 0.5
    result = evaluate(output, [str(text_folder)], pattern="*.py", seq_len=32)
    assert result.loss == pytest.approx(losses[-1], abs=0.5)


def test_what_was_measured_is_kept_for_a_resumed_run(pretrained: tuple[Path, Path, str]) -> None:
    (first, *_) = json.loads((pretrained[1] / "profile.json").read_text())
    assert len(first["seconds"]) == len(first["conditions"]["layers"]) == 6  # embedding, 3 blocks, norm, head


def test_measurements_are_recalled_under_the_same_conditions_alone(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    remember(file, {"micro": 2}, [1.0, 2.5])
    remember(file, {"micro": 4}, [3.0])
    assert recall(file, {"micro": 2}) == [1.0, 2.5]
    assert recall(file, {"micro": 3}) is None
    file.write_text("{", encoding="utf-8")
    assert recall(file, {"micro": 2}) is None


def test_measuring_leaves_no_memory_behind() -> None:
    config = new_config({**GPT2, "vocab_size": 61}, num_ids=61, seq_len=8, end_of_text_id=0)
    model = build_on_meta(config, torch.float32)
    device = torch.device("cpu")
    layers = split(model, device, LossTally(device), ActivationConfig(), head_pieces=2)
    seconds = measure(layers, micro=1, seq_len=8, hidden_size=32, vocab_size=61, device=device, dtype=torch.float32)
    assert len(seconds) == 7
    assert all(second > 0 for second in seconds)
    assert seconds[1] == seconds[2] == seconds[3]  # blocks of one kind are measured once
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_a_piece_of_the_head_is_measured_on_its_part_of_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    config = new_config({**GPT2, "vocab_size": 61}, num_ids=61, seq_len=8, end_of_text_id=0)
    device = torch.device("cpu")
    head = split(build_on_meta(config, torch.float32), device, LossTally(device), ActivationConfig(), head_pieces=4)[-4:]
    computed: list[int] = []
    monkeypatch.setattr(HeadLayer, "_loss", lambda self, hidden, targets: computed.append(targets.numel()) or hidden.sum())
    measure(head, micro=2, seq_len=8, hidden_size=32, vocab_size=61, device=device, dtype=torch.float32)
    assert set(computed) == {4}
    assert len({layer.signature for layer in head}) == 2  # the last one computes its loss otherwise


def test_positions_start_again_with_each_segment() -> None:
    segments = torch.tensor([[0, 0, 0, 1, 2, 2], [0, 1, 1, 1, 1, 2]])
    assert positions_of(segments).tolist() == [[0, 1, 2, 0, 0, 1], [0, 0, 1, 2, 3, 0]]


def test_pretrain_spreads_the_optimizer_unless_told_otherwise(tmp_path: Path, text_folder: Path) -> None:
    config = write_config(pretraining(text_folder, tmp_path / "run"), tmp_path / "run.yaml")
    assert load_config(config, command="pretrain").zero.stage == 1
    assert load_config(config, [("zero.stage", "0")], command="pretrain").zero.stage == 0


def test_pretrain_takes_fp16_where_there_is_a_gpu(tmp_path: Path, text_folder: Path) -> None:
    tree = pretraining(text_folder, tmp_path / "run", run={"precision": "fp16", "device": "cuda"})
    assert load_config(write_config(tree, tmp_path / "run.yaml"), command="pretrain").run.precision == "fp16"


REFUSED = {
    "precision": ({"run": {"precision": "fp16"}}, "run.precision is 'fp16'; it must be bf16 or fp32 on the CPU"),
    "zero": ({"zero": {"stage": 2}}, "zero.stage is 2; it must be 0 or 1 for pretrain"),
    "offload": ({"offload": {"optimizer": "cpu"}}, "offload.optimizer is 'cpu'; it must be none for pretrain"),
    "model": (
        {"model": {"new": {"model_type": "opt"}}},
        "model.new.model_type is 'opt'; it must be one of gpt_neox, gpt2, llama for pretrain",
    ),
    "stages": ({"pipeline": {"stages": 3}}, "pipeline.stages is 3; it must divide run.ranks, which is 2"),
    "method": (
        {"pipeline": {"partition": "best"}},
        "pipeline.partition is 'best'; it must be one of parameters, uniform, profile",
    ),
    "pattern": ({"pipeline": {"partition": "type:("}}, "hold a regular expression after the colon"),
    "key": ({"pipeline": {"stage": 2}}, "pipeline.stage"),
    "old key": (
        {"pipeline": {"checkpoint_activations": True}},
        "pipeline.checkpoint_activations is no longer a key: set activations.checkpoint, which pretrain obeys too",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_pipeline_cannot_do_is_refused(
    case: str, tmp_path: Path, text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections, message = REFUSED[case]
    config = write_config(pretraining(text_folder, tmp_path / "run", **sections), tmp_path / "run.yaml")
    assert main(["pretrain", str(config)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused_before_it_is_opened(
    tmp_path: Path, text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gptj"}', encoding="utf-8")
    tree = pretraining(text_folder, tmp_path / "run")
    tree["model"] = {"path": str(tmp_path / "model")}
    assert main(["pretrain", str(write_config(tree, tmp_path / "run.yaml"))]) == 2
    assert "config.json: model_type is 'gptj'" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("pipeline.stages", "2"), ("zero.stage", "0")])
def test_tune_points_to_pretrain(
    key: str, value: str, tmp_path: Path, text_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(pretraining(text_folder, tmp_path / "run", pipeline={"stages": 1}), tmp_path / "run.yaml")
    assert main(["tune", str(config), f"--{key}", value]) == 2
    error = capsys.readouterr().err
    assert key in error
    assert "pretrain" in error


@pytest.mark.parametrize("name", ["cpu/pretrain.yaml", "pretrain-125m.yaml"])
def test_the_examples_are_configurations_of_pretrain(name: str) -> None:
    config: TuneConfig = load_config(ROOT / "examples" / name, command="pretrain")
    assert config.accumulation >= config.pipeline.stages
