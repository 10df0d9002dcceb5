"""An adapter with its base is the model that training begins with, known by the files of both; no base of another adapter."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, Given, open_checkpoint, pinned
from checkpoint.opening.prove import model_config, tokenizer_place
from finetune.base_model.identity import identified
from finetune.config.load import load_config
from finetune.data.prepare import prepare
from finetune.errors import ConfigError
from finetune.train.initial_model import InitialModel
from tests.finetune.support import write_config
from tests.support.models import save, tokenizer


def folders(root: Path) -> tuple[Path, Path]:
    """A base and an adapter of one layer."""
    base, adapter = save("llama", root / "base"), root / "adapter"
    adapter.mkdir()
    with open_checkpoint(base) as checkpoint:
        rows, columns = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"].shape
    factors = {"lora_A": torch.ones(1, columns), "lora_B": torch.ones(rows, 1)}
    names = {key: f"base_model.model.model.layers.0.mlp.up_proj.{key}.weight" for key in factors}
    save_file({names[key]: tensor for key, tensor in factors.items()}, adapter / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    return base, adapter


def identity_of(path: Path) -> str:
    with open_checkpoint(path) as checkpoint:
        return identified(checkpoint).identity


def changed(file: Path) -> None:
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)


def test_it_is_known_by_the_files_of_both_and_by_its_description(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    seen = [identity_of(base), identity_of(adapter), identity_of(adapter)]
    assert seen[1] == seen[2]
    changed(adapter / "adapter_model.safetensors")
    seen.append(identity_of(adapter))
    changed(base / "model.safetensors")
    seen.append(identity_of(adapter))
    description = adapter / "adapter_config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"lora_alpha": 3}))
    seen.append(identity_of(adapter))
    assert len(set(seen)) == 5


@pytest.mark.parametrize("added", [False, True])
def test_a_new_adapter_has_a_whole_model_for_its_base(added: bool, tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "rows.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    tree = {
        "model": {"path": str(base), "adapter": str(adapter)} if added else {"path": str(adapter), "base": str(base)},
        "tokenizer": {"path": str(tmp_path / "tokenizer.json")},
        "data": {"train": str(tmp_path / "rows.txt"), "seq_len": 32, "eval_fraction": 0},
        "schedule": {"steps": 1},
        "run": {"output": str(tmp_path / "run"), "device": "cpu", "precision": "fp32"},
    }
    config = load_config(write_config(tree, tmp_path / "run.yaml"))
    prepared = prepare(config, lambda _: None)
    begun = InitialModel(config, prepared)
    assert begun.base is not None
    assert begun.base.identity == identity_of(adapter)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=r"is no base for another adapter \(lora\).*tessera-finetune export"):
        InitialModel(load_config(write_config(tree | {"lora": {}}, tmp_path / "lora.yaml")), prepared)
    assert len(os.listdir("/proc/self/fd")) == before
    for model, rule in (
        ({"path": str(base), "base": str(base)}, "model.base names the base of an adapter"),
        ({"path": str(base), "base": str(base), "adapter": str(adapter)}, "model.base names the base of an adapter"),
        ({"path": str(adapter), "adapter": str(adapter)}, "there is one at a time"),
    ):
        with pytest.raises(ConfigError, match=rule):
            InitialModel(load_config(write_config(tree | {"model": model}, tmp_path / "x.yaml")), prepared)


def test_the_adapters_own_tokenizer_counts_wherever_it_is_named(tmp_path: Path) -> None:
    base, adapter = folders(tmp_path)
    (adapter / "config.json").write_bytes((base / "config.json").read_bytes())
    assert tokenizer_place(adapter).path == base.resolve()
    tokenizer().save(str(adapter / "tokenizer.json"))
    for path, given in ((adapter, Given()), (base, Given(adapter=str(adapter)))):
        assert tokenizer_place(path, given).path == adapter.resolve()
        assert model_config(path, given)[0]["model_type"] == "llama"
    with pytest.raises(CheckpointError, match="there is one at a time"):
        pinned(adapter, Given(adapter=str(adapter)))
