"""Commands print what they are for, and nothing of the libraries they call."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from checkpoint import open_checkpoint
from finetune.cli import main
from finetune.config import DataConfig, LogConfig, ModelConfig, RunConfig, TuneConfig
from finetune.observe.report import _samples
from tests.support.models import build, save


@pytest.fixture(params=["model.safetensors", "pytorch_model.bin"])
def adapter(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A run's folder with an adapter that changes what its base model says; the base has its weights in either format."""
    base = save("gpt_neox", tmp_path / "base")
    if request.param != "model.safetensors":
        torch.save(load_file(base / "model.safetensors"), base / request.param)
        (base / "model.safetensors").unlink()
    settings = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    with warnings.catch_warnings(action="ignore"):
        wrapped = get_peft_model(build("gpt_neox"), settings)
    wrapped.peft_config["default"].base_model_name_or_path = str(base)
    wrapped.save_pretrained(tmp_path / "run" / "checkpoints" / "step-00000001")
    return tmp_path / "run"


@pytest.mark.filterwarnings("default")  # as the commands have them
def test_merging_and_predicting_print_nothing_of_the_libraries(
    adapter: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.txt").write_text("def read_config(\n")
    capfd.readouterr()
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    assert tuple(capfd.readouterr()) == (f"{tmp_path / 'merged'}\n", "")
    words = ["--prompts", str(tmp_path / "p.txt"), "--max-new-tokens", "3", "--temperature", "0.5", "--top-p", "0.9"]
    for model in (adapter, tmp_path / "merged"):
        assert main(["predict", str(model), *words]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        assert out.startswith(">>> def read_config(\n")
    config = TuneConfig(
        run=RunConfig(output=str(adapter)),
        data=DataConfig(train=("x",)),
        model=ModelConfig(path="x"),
        log=LogConfig(sample_prompts=("def ",)),
    )
    samples = _samples(config, adapter)
    assert samples is not None
    assert [prompt for prompt, _ in samples.texts] == ["def "]
    assert tuple(capfd.readouterr()) == ("", "")
    with open_checkpoint(tmp_path / "merged") as merged, open_checkpoint(tmp_path / "base") as base:
        assert len(merged.tensors) == len(base.tensors)
        name = next(name for name in base.tensors if "query_key_value.weight" in name)
        assert not torch.equal(merged.read(name), base.read(name))
