"""Adapters of peft beside or instead of a model: read as peft would merge them, slice by slice."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from checkpoint import CheckpointError, Given, open_checkpoint, pinned

LINEAR = ["q_proj", "o_proj", "gate_proj", "down_proj"]


def llama(*, tied: bool = False) -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32))


def adapted(folder: Path, make: Callable[[], PreTrainedModel], **settings: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A base and an adapter with random weights, and the tensors of what peft merges them to."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base = make().float()
    base.save_pretrained(folder / "base")
    config = LoraConfig(r=4, lora_alpha=6, base_model_name_or_path=str(folder / "base"), **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(base, config)
        wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
        for name, parameter in wrapped.named_parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, mean=1.0 if "magnitude" in name else 0.0, std=0.3)
        wrapped.save_pretrained(folder / "adapter", save_embedding_layers=False)
        merged = wrapped.merge_and_unload()
    return folder / "adapter", {name: parameter.detach() for name, parameter in merged.named_parameters()}


def assert_merged(model: Path, want: dict[str, torch.Tensor], **given: Any) -> None:
    with open_checkpoint(model, given=Given(**given)) as checkpoint:
        for name, tensor in want.items():
            assert torch.allclose(checkpoint.read(name), tensor, rtol=0, atol=1e-6), name
            if tensor.ndim == 2:
                rows, columns = slice(5, 14), slice(3, 11)
                got = checkpoint.read(name, (rows, columns))
                assert torch.allclose(got, tensor[rows, columns], rtol=0, atol=1e-6), name


def changed(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(path: Path, **given: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(path, given=Given(**given)):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (llama, {"target_modules": LINEAR}),
        (llama, {"target_modules": LINEAR, "use_rslora": True, "modules_to_save": ["lm_head", "norm"]}),
        (llama, {"target_modules": LINEAR, "use_dora": True}),
        (llama, {"target_modules": [*LINEAR, "embed_tokens"]}),
        (
            llama,
            {
                "target_modules": LINEAR,
                "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 3},
                "alpha_pattern": {"model.layers.0.self_attn.o_proj": 9},
            },
        ),
        (gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True, "bias": "lora_only"}),
        (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
    ],
    ids=["lora", "rslora and whole modules", "dora", "embedding", "patterns", "conv1d and biases", "conv1d dora"],
)
def test_an_adapter_is_read_as_peft_merges_it(
    tmp_path: Path, make: Callable[[], PreTrainedModel], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, want = adapted(tmp_path, make, **settings)
    monkeypatch.setattr("checkpoint.opening.slices.CHUNK_BYTES", 200)  # a few rows in each block
    assert_merged(adapter, want)
    assert_merged(tmp_path / "base", want, adapter=str(adapter))
    (tmp_path / "base").rename(tmp_path / "moved")
    assert "--base" in refusal(adapter).rule
    assert_merged(adapter, want, base=str(tmp_path / "moved"))


def test_the_base_is_read_once_and_no_more_than_the_slice_asks_for(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    with open_checkpoint(adapter) as checkpoint:
        checkpoint.read("model.layers.0.mlp.down_proj.weight", (slice(None), slice(12, 24)))
        assert checkpoint.bytes_read == 4 * (16 * 12 + 16 * 4 + 4 * 12)


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"r": 8}, "the rank 8"),
        ({"lora_alpha": "6"}, "lora_alpha"),
        ({"use_dora": True}, "magnitude"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"kasa_config": {"beta": 1e-4}}, "kasa_config is set"),
        ({"of_a_later_release": "yes"}, "of_a_later_release is set"),
        ({"rank_pattern": {"(a+)+$": 2}}, "rank_pattern"),
        ({"base_model_name_or_path": "some/model"}, "no folder here"),
    ],
)
def test_an_adapter_of_another_kind_is_refused_by_name(tmp_path: Path, values: dict[str, Any], rule: str) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    changed(adapter, **values)
    assert rule in refusal(adapter).rule


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    weights = adapter / "adapter_model.safetensors"
    held = load_file(weights)
    first = next(iter(held))
    save_file(held | {first.replace("layers.0", "layers.7"): held[first].clone()}, weights)
    assert "layers.7.self_attn.q_proj', whose weight the base model does not have" in refusal(adapter).rule
    save_file({name: tensor for name, tensor in held.items() if name != first}, weights)
    assert "one pair of factors" in refusal(adapter).rule
    save_file(held | {first: torch.zeros(4, 17)}, weights)
    assert "[4, 17]" in refusal(adapter).rule
    save_file({name.replace("q_proj", "c_attn"): tensor for name, tensor in held.items()}, weights)
    assert "'model.layers.0.self_attn.c_attn'" in refusal(adapter).rule


@pytest.mark.parametrize("base", ["safetensors", "torch"])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (partial(llama, tied=True), {"target_modules": ["q_proj", "embed_tokens"]}),
        (partial(llama, tied=True), {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
        (gpt2, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
    ],
    ids=["factors", "whole", "gpt2"],
)
def test_an_adapter_of_an_embedding_that_is_also_the_head_is_refused(
    tmp_path: Path, make: Callable[[], PreTrainedModel], settings: dict[str, Any], base: str
) -> None:
    """peft adapts the embedding and leaves the head as it was; a model that ties the two has no place for that."""
    adapter, _ = adapted(tmp_path, make, **settings)
    if base == "torch":  # which stores both names, and the one tensor once
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
        (tmp_path / "base" / "model.safetensors").unlink()
    assert "embedding and head are one there" in refusal(adapter).rule


def test_a_model_with_an_adapter_beside_it_is_not_guessed_about(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=["q_proj"])
    shutil.copytree(tmp_path / "base", adapter, dirs_exist_ok=True)
    assert "cannot be told" in refusal(adapter).rule
    assert "no adapter" in refusal(tmp_path / "base", adapter=str(tmp_path / "base")).rule


def in_cache(cache: Path, base: Path, name: str) -> Path:
    """The base model as the hub's cache keeps it."""
    folder, commit = cache / f"models--{name.replace('/', '--')}", "0" * 39 + "1"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    snapshot = folder / "snapshots" / commit
    shutil.copytree(base, snapshot)
    return snapshot


def test_a_base_of_the_hub_is_its_snapshot_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    adapter, want = adapted(tmp_path, llama, target_modules=LINEAR)
    changed(adapter, base_model_name_or_path="someone/small")
    error = refusal(adapter)
    assert error.file == "adapter_config.json"
    assert (
        "names the base model 'someone/small', which is no folder here, and as a model of the hub: revision main" in error.rule
    )
    assert "nothing is downloaded here" in error.rule
    assert error.rule.endswith("name its folder (--base)")
    snapshot = in_cache(tmp_path / "hub", tmp_path / "base", "someone/small")
    assert_merged(adapter, want)
    assert pinned(adapter, Given()).base == str(snapshot)
    assert_merged(adapter, want, base="hf:someone/small")
    assert "is no folder here; name" in refusal(adapter, base="someone/small").rule, "only with hf: is what is given a name"


def test_an_adapters_step_is_that_of_its_folders_name(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    with open_checkpoint(adapter) as checkpoint:
        assert checkpoint.step is None
    adapter.rename(tmp_path / "checkpoint-70")
    with open_checkpoint(tmp_path / "checkpoint-70") as checkpoint:
        assert checkpoint.step == 70
