"""Adapters that say or hold one thing twice, name no base, or are described by what is no object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import open_checkpoint
from checkpoint.readers.lora_patterns import alpha_of
from tests.checkpoint.readers.test_adapters import (
    Q_PROJ,
    adapted,
    assert_merged,
    changed,
    gpt2,
    llama,
    opened,
    refusal,
    trained,
)


def renamed(adapter: Path, old: str, new: str) -> None:
    path = adapter / "adapter_model.safetensors"
    held = load_file(path)
    save_file({**held, new: held[old] + 1}, path)


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("base_model.model.lm_head.weight", "lm_head.weight", "which are both the adapter's 'lm_head.weight'"),
        (f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_A", "holds lora_A of 'model.layers.0.self_attn.q_proj' twice"),
        ("base_model.model.lm_head.weight", "base_model.model.embed_out.weight", "the base model"),
    ],
)
def test_what_an_adapter_holds_twice_is_refused(old: str, new: str, rule: str, tmp_path: Path) -> None:
    trained(tmp_path, llama, target_modules=["q_proj"], modules_to_save=["lm_head"])
    renamed(tmp_path / "adapter", old, new)
    assert rule in refusal(tmp_path / "adapter").rule


@pytest.mark.parametrize("more", [0.0, 1.0])
def test_a_magnitude_that_peft_saves_by_two_names_is_one(more: float, tmp_path: Path) -> None:
    want = trained(tmp_path, llama, target_modules=["q_proj"], use_dora=True)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    held = load_file(file)
    name = next(name for name in held if "lora_magnitude_vector" in name)
    save_file({**held, name.removesuffix(".weight") + ("" if name.endswith(".weight") else ".weight"): held[name] + more}, file)
    if more:
        assert "twice, by two names" in refusal(tmp_path / "adapter").rule
    else:
        assert (opened(tmp_path / "adapter")[0] - want).abs().max() < 1e-5


@pytest.mark.parametrize("patterns", [1, True, 1.5, [1], [[]], "x"])
def test_patterns_that_are_no_object_are_refused(patterns: Any, tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    changed(adapter, rank_pattern=patterns)
    assert "rank_pattern must be an object" in refusal(adapter).rule


@pytest.mark.parametrize("name", ["x" * 5000, "~nobody-of-this-name/x", "a\0b"])
def test_a_base_that_is_no_path_is_refused(name: str, tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    changed(adapter, base_model_name_or_path=name)
    assert "names the base model" in refusal(adapter).rule


def test_an_adapter_that_is_its_own_base_is_refused(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    changed(adapter, base_model_name_or_path=str(adapter))
    assert "an adapter's base model must be a whole one" in refusal(adapter).rule


def test_an_adapter_that_lost_the_biases_it_was_trained_with_is_refused(tmp_path: Path) -> None:
    """As peft 0.10 to 0.18 saved those of ``lora_only``."""
    adapter, want = adapted(tmp_path, gpt2, target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only")
    assert_merged(adapter, want)
    file = adapter / "adapter_model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(".bias")}
    assert len(kept) == len(load_file(file)) - 2
    save_file(kept, file)
    error = refusal(adapter)
    assert error.file == "adapter_config.json"
    assert error.rule.startswith("bias is 'lora_only', and adapter_model.safetensors lacks the bias of ")
    changed(adapter, bias="none")
    opened(adapter)
    description = json.loads((adapter / "adapter_config.json").read_text()) | {"bias": "lora_only"}
    del description["layer_replication"]
    (adapter / "adapter_config.json").write_text(json.dumps(description))
    opened(adapter)  # releases before 0.10 lost none
    _, want = adapted(tmp_path / "without", llama, target_modules=["q_proj"], bias="lora_only")
    assert_merged(tmp_path / "without" / "adapter", want)


def test_what_may_be_true_or_false_may_be_null_and_nothing_else(tmp_path: Path) -> None:
    """As trainers write their own defaults."""
    adapter, want = adapted(tmp_path, llama, target_modules=["q_proj"])
    keys = ("use_rslora", "use_dora", "fan_in_fan_out")
    changed(adapter, **dict.fromkeys(keys))
    assert_merged(adapter, want)
    for key in keys:
        changed(adapter, **{key: 0})
        assert refusal(adapter).rule == f"{key} is 0; it must be true or false"
        changed(adapter, **{key: None})


def test_a_factor_of_no_dimension_is_refused(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "lora_A" in name)
    save_file({**tensors, name: torch.tensor(1.0)}, file)
    assert "by factors of " in refusal(adapter).rule


def test_an_adapter_without_a_part_of_what_it_was_trained_for_is_refused(tmp_path: Path) -> None:
    adapter, want = adapted(tmp_path, llama, target_modules=["q_proj", "mlp.up_proj"])
    file = adapter / "adapter_model.safetensors"
    for lost, target in (("model.layers.1.self_attn.q_proj", "q_proj"), ("model.layers.1.mlp.up_proj", "mlp.up_proj")):
        tensors = load_file(file)
        assert any(f"{lost}." in name for name in tensors)
        save_file({name: tensor for name, tensor in tensors.items() if f"{lost}." not in name}, file)
        rule = f"has nothing for {lost!r}, one of the {target!r} of target_modules, and for others: a part of it is missing"
        assert refusal(adapter).rule == rule
        changed(adapter, exclude_modules=[lost])
        opened(adapter)
        changed(adapter, exclude_modules=None, init_lora_weights="eva")  # which spends ranks elsewhere, and then says so
        opened(adapter)
        changed(adapter, init_lora_weights=True)
        save_file(tensors, file)
    assert_merged(adapter, want)


@pytest.mark.parametrize("layers", [[1], 0])
def test_an_adapter_of_some_layers_is_whole(layers: Any, tmp_path: Path) -> None:
    adapter, want = adapted(tmp_path, llama, target_modules=["q_proj"], layers_to_transform=layers)
    assert_merged(adapter, want)


def test_two_adapters_of_one_module_are_not_taken_for_the_last(tmp_path: Path) -> None:
    """A base whose files hold an adapter beside its own weights, as it was trained, and one that was trained on the two."""
    from peft import LoraConfig, get_peft_model

    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    inner = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))
    base = tmp_path / "base"
    save_file({name: tensor.contiguous() for name, tensor in inner.state_dict().items()}, base / "model.safetensors")
    inner.peft_config["default"].save_pretrained(str(base))
    opened(base)
    for rule in (refusal(adapter).rule, refusal(base, adapter=str(adapter)).rule):
        assert "q_proj', which another adapter in the base model's own files adapts already" in rule


def test_experts_that_are_modules_in_files_alone_are_not_missed(tmp_path: Path) -> None:
    """transformers has them in one parameter, which peft passes over."""
    adapter, _ = adapted(tmp_path, llama, target_modules=["up_proj"])
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    expert = tensors["model.layers.0.mlp.up_proj.weight"].clone()
    save_file(tensors | {"model.layers.0.mlp.experts.0.up_proj.weight": expert}, file)
    with open_checkpoint(adapter) as checkpoint:
        assert "model.layers.0.mlp.experts.0.up_proj.weight" in checkpoint.tensors


def test_hundreds_of_keys_are_sought_in_a_moment() -> None:
    """As peft's EVA writes one for each module; the number of regular expressions that are tried is bounded, not the time."""
    names = [f"model.layers.{layer}.self_attn.{kind}_proj" for layer in range(60) for kind in "qkvo"]
    config = {"rank_pattern": dict.fromkeys(sorted(names), 3), "alpha_pattern": dict.fromkeys(sorted(names), 5)}
    assert {alpha_of(config, name, 3, "x") for name in names} == {5}
