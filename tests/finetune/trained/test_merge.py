"""``merge`` joins what serving joins; all else is refused by what it is, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from checkpoint import open_checkpoint
from finetune.errors import ConfigError
from finetune.trained.merge import merge
from tests.support.models import save


def adapter(root: Path, kind: Any) -> Path:
    base = save("llama", root / "base", with_tokenizer=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), kind)
    model.save_pretrained(root / "adapter")
    return root / "adapter"


@pytest.mark.parametrize("kind", ["PREFIX_TUNING", "ADAPTION_PROMPT", "XLORA", "IA3", "NONSENSE"])
def test_a_description_of_another_kind_than_the_file_is_refused(kind: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path, LoraConfig(target_modules=["q_proj"]))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_type": kind}))
    with pytest.raises(ConfigError):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 1), (0, 2)]), "layer_replication is set"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "peft_type is 'PREFIX_TUNING'"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "save it converted to plain LoRA"),
        (LoHaConfig(target_modules=["q_proj"]), r"peft_type is 'LOHA'.*\(merge_and_unload\), and that is read"),
        (
            LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[1, 2]),
            "alora_invocation_tokens is set",
        ),
    ],
    ids=["replicated layers", "prefix", "pissa", "loha", "activated"],
)
def test_what_is_no_sum_with_the_base_is_refused(kind: Any, rule: str, tmp_path: Path) -> None:
    folder = adapter(tmp_path, kind)
    with pytest.raises(ConfigError, match=rule):
        merge(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_patterns_mean_what_they_did_to_the_release_that_trained(tmp_path: Path) -> None:
    """Of peft before 0.14 the alpha of all counts here, for one key was sought for both tables."""
    base = save("llama", tmp_path / "base", with_tokenizer=False)
    patterns = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"self_attn.q_proj": 64}}
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=3, target_modules=["q_proj"], **patterns))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    described = json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}
    for date in ("exclude_modules", "trainable_token_indices"):
        del described[date]
    path.write_text(json.dumps(described))
    name = "model.layers.0.self_attn.q_proj.weight"
    with open_checkpoint(tmp_path / "adapter") as wanted, open_checkpoint(merge(tmp_path / "adapter", tmp_path / "out")) as got:
        assert torch.allclose(got.read(name), wanted.read(name), rtol=0, atol=1e-5)
    path.write_text(json.dumps(described | {"exclude_modules": None}))
    with open_checkpoint(tmp_path / "adapter") as later, open_checkpoint(tmp_path / "out") as before:
        assert not torch.allclose(later.read(name), before.read(name), rtol=0, atol=1e-1)


def test_an_adapter_of_another_vocabulary_is_merged_with_its_rows(tmp_path: Path) -> None:
    base = save("llama", tmp_path / "base", with_tokenizer=False)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(model.config.vocab_size + 2, mean_resizing=False)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter)
    wrapped.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    described = tmp_path / "adapter" / "adapter_config.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"base_model_name_or_path": str(base)}))
    merge(tmp_path / "adapter", tmp_path / "out", dtype=torch.float32)
    ids = torch.arange(model.config.vocab_size - 8, model.config.vocab_size)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, wrapped(ids).logits, rtol=1e-4, atol=1e-5)
