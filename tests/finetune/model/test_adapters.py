"""LoRA and its kin: trained beside frozen weights, saved as peft's, resumed exactly, merged into a model that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftLora
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from checkpoint import open_checkpoint
from finetune.trained.merge import merge
from tests.finetune.conftest import TrainedRun
from tests.finetune.support import run_command, small_run, write_config
from tests.finetune.train.test_tune import losses_of

pytestmark = pytest.mark.slow

IDS = torch.tensor([[5, 9, 40, 200, 17, 3, 88]])


def adapter_run(trained: TrainedRun, folder: Path, **sections: Any) -> tuple[Path, Path]:
    """Configuration and output of a LoRA run on the trained model, two ranks, all offloaded."""
    tree = small_run(trained.text, folder / "run", offload={"optimizer": "cpu", "parameters": "cpu"}, **sections)
    tree["model"] = {"path": str(trained.output / "checkpoints" / "step-00000012")}
    del tree["tokenizer"]
    tree["run"]["ranks"] = 2
    return write_config(tree, folder / "run.yaml"), folder / "run"


@pytest.fixture(scope="module")
def adapted(trained: TrainedRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    config, output = adapter_run(trained, tmp_path_factory.mktemp("lora"), lora={"rank": 4, "alpha": 8, "dropout": 0.1})
    done = run_command("tune", config)
    assert done.returncode == 0, done.stderr
    return config, output, done.stdout


def base_of(trained: TrainedRun) -> Any:
    return AutoModelForCausalLM.from_pretrained(trained.output / "checkpoints" / "step-00000012").eval()


def test_a_run_saves_an_adapter_that_peft_opens(trained: TrainedRun, adapted: tuple[Path, Path, str]) -> None:
    _, output, shown = adapted
    folder = output / "checkpoints" / "step-00000012"
    assert "tessera-finetune merge" in shown
    assert " trained" in shown
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["r"], described["lora_alpha"], described["peft_type"]) == (4, 8, "LORA")
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * 4 * 2, "two factors for each of four layers in each of two blocks"
    learned = [name for name in tensors if "lora_B" in name]
    assert all(tensors[name].abs().max() > 0 for name in learned), "an adapter that learned nothing"
    base = base_of(trained)
    with torch.no_grad():
        before = base(IDS).logits
        model = PeftModel.from_pretrained(base, str(folder)).eval()
        assert not torch.allclose(model(IDS).logits, before, atol=1e-3)
    assert not (folder / "config.json").exists(), "a folder without weights must not look like a model"


def test_the_state_to_resume_holds_the_adapters_alone(adapted: tuple[Path, Path, str]) -> None:
    with open_checkpoint(adapted[1] / "resume") as state:
        masters = [name for name in state.tensors if name.startswith("master.")]
    assert len(masters) == 16
    assert all("lora_" in name for name in masters)


def test_resuming_adapters_is_exact(adapted: tuple[Path, Path, str], tmp_path: Path) -> None:
    config, whole, _ = adapted
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    for root in ("checkpoints", "resume"):
        shutil.rmtree(output / root / "step-00000012")
        (output / root / "latest").write_text("step-00000006\n")
    done = run_command("tune", config, "--resume", "--run.output", output)
    assert done.returncode == 0, done.stderr
    assert losses_of(output) == losses_of(whole)
    ours, theirs = (load_file(run / "checkpoints" / "step-00000012" / "adapter_model.safetensors") for run in (output, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_resumed_adapters_go_on_beside_their_base_although_its_run_saved_again(
    trained: TrainedRun, adapted: tuple[Path, Path, str], tmp_path: Path
) -> None:
    config, whole, _ = adapted
    base, output = tmp_path / "base", tmp_path / "run"
    shutil.copytree(trained.output / "checkpoints" / "step-00000012", base / "checkpoints" / "step-00000012")
    shutil.copytree(trained.output / "checkpoints" / "step-00000006", base / "checkpoints" / "step-00000099")
    (base / "checkpoints" / "latest").write_text("step-00000099\n")
    shutil.copytree(whole, output)
    for root in ("checkpoints", "resume"):
        shutil.rmtree(output / root / "step-00000012")
        (output / root / "latest").write_text("step-00000006\n")
    done = run_command("tune", config, "--resume", "--run.output", output, "--model.path", base)
    assert done.returncode == 0, done.stderr
    assert f"means step-00000099 by now; going on with {base / 'checkpoints' / 'step-00000012'}" in done.stdout
    assert losses_of(output) == losses_of(whole)
    described = json.loads((output / "checkpoints" / "step-00000012" / "adapter_config.json").read_text())
    assert described["base_model_name_or_path"] == str(base / "checkpoints" / "step-00000012")


def test_merged_is_what_peft_computes(trained: TrainedRun, adapted: tuple[Path, Path, str], tmp_path: Path) -> None:
    done = run_command("merge", adapted[1], tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        folder = adapted[1] / "checkpoints" / "step-00000012"
        expected = PeftModel.from_pretrained(base_of(trained), str(folder)).eval()(IDS).logits
        model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
        torch.testing.assert_close(model.eval()(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert (tmp_path / "merged" / "tokenizer.json").is_file()
    with open_checkpoint(tmp_path / "merged", verify="sha256") as checkpoint:
        assert set(checkpoint.tensors) == set(open_checkpoint(trained.output / "checkpoints").tensors)
    from finetune.trained.evaluate import evaluate

    text = [str(trained.text / "module_0.py")]
    assert evaluate(adapted[1], text).loss == pytest.approx(evaluate(tmp_path / "merged", text).loss, abs=1e-5)


@pytest.mark.parametrize(("method", "stage"), [("rslora", 2), ("dora", 3)])
def test_other_methods_train_and_merge(trained: TrainedRun, tmp_path: Path, method: str, stage: int) -> None:
    lora = {"rank": 2, "method": method, "targets": ["query_key_value"]}
    config, output = adapter_run(trained, tmp_path, lora=lora, zero={"stage": stage}, schedule={"steps": 3, "warmup": 1})
    parameters = "cpu" if stage == 3 else "none"
    done = run_command("tune", config, "--offload.parameters", parameters, "--save.every", "3")
    assert done.returncode == 0, done.stderr
    folder = output / "checkpoints" / "step-00000003"
    assert json.loads((folder / "adapter_config.json").read_text())[f"use_{method}"] is True
    done = run_command("merge", folder, tmp_path / "merged", "--base", trained.output / "checkpoints")
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        expected = PeftModel.from_pretrained(base_of(trained), str(folder)).eval()(IDS).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()(IDS).logits
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_is_refused_by_its_key(trained: TrainedRun, tmp_path: Path) -> None:
    config, _ = adapter_run(trained, tmp_path, lora={"targets": ["no_such_layer"]})
    done = run_command("tune", config)
    assert done.returncode == 2
    assert "lora.targets: 'no_such_layer'" in done.stderr
    assert "query_key_value" in done.stderr
    done = run_command("merge", trained.output, tmp_path / "merged")
    assert done.returncode == 2
    assert "adapter_config.json" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_a_runs_adapter_opens_as_the_model_that_merging_makes(adapted: tuple[Path, Path, str], tmp_path: Path) -> None:
    merge(adapted[1], tmp_path / "merged")
    with open_checkpoint(adapted[1] / "checkpoints") as opened, open_checkpoint(tmp_path / "merged") as merged:
        assert opened.tensors.keys() == merged.tensors.keys()
        for name in merged.tensors:
            torch.testing.assert_close(opened.read(name), merged.read(name), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("settings", [{"target_modules": ["wte"]}, {"target_modules": ["c_fc"], "modules_to_save": ["wte"]}])
def test_an_adapter_of_an_embedding_that_is_also_the_head_is_merged_as_two(tmp_path: Path, settings: dict[str, Any]) -> None:
    base = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=4, bos_token_id=0, eos_token_id=0))
    base.save_pretrained(tmp_path / "base")
    wrapped = get_peft_model(base, PeftLora(r=2, fan_in_fan_out=True, **settings)).eval()
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge(tmp_path / "adapter", tmp_path / "merged")
    ids = torch.arange(12)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, wrapped(ids).logits, rtol=1e-4, atol=1e-5)
