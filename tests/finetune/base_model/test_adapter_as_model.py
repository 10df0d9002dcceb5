"""An adapter is served as it lies; as the model that training begins with it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import CheckpointError, open_checkpoint
from finetune.base_model.identity import identified


def test_an_adapter_is_refused_as_the_model_that_training_begins_with(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": torch.ones(3, 2)}, base / "model.safetensors")
    (base / "config.json").write_text('{"model_type": "llama"}')
    factors = {"lora_A": torch.ones(1, 2), "lora_B": torch.ones(3, 1)}
    names = {key: f"base_model.model.model.layers.0.mlp.up_proj.{key}.weight" for key in factors}
    save_file({names[key]: tensor for key, tensor in factors.items()}, adapter / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    with open_checkpoint(adapter) as checkpoint:
        assert torch.equal(checkpoint.read("model.layers.0.mlp.up_proj.weight"), torch.full((3, 2), 3.0))
        with pytest.raises(CheckpointError, match="merge"):
            identified(checkpoint)
