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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from checkpoint import CheckpointError, Given, open_checkpoint, pinned
from checkpoint.opening.prove import model_config

Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
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
                "rank_pattern": {"q_proj": 2, r"layers\.[12]\.(?:mlp)\..*": 3},
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


def trained(folder: Path, make: Callable[[], PreTrainedModel], resized: int = 0, **settings: Any) -> torch.Tensor:
    """A base and an adapter with random weights; the logits of the model that was trained, of all its tokens but the last."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = make().float()
    model.save_pretrained(folder / "base")
    if resized:
        model.resize_token_embeddings(40 + resized, mean_resizing=False)
    model.config.name_or_path = model.name_or_path = str(folder / "base")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings))
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
        wrapped.save_pretrained(folder / "adapter")
    assert wrapped.peft_config["default"].base_model_name_or_path == str(folder / "base")
    with torch.no_grad():
        logits: torch.Tensor = wrapped.eval()(input_ids=torch.arange(40 + resized).view(2, -1)).logits
    return logits


def opened(path: Path, **given: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of the model that is read there, as ``trained`` has them, and its configuration."""
    with open_checkpoint(path, given=Given(**given)) as checkpoint:
        config = dict(checkpoint.config)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        tied = {"lm_head.weight": EMBEDDING[config["model_type"]]} if model.config.tie_word_embeddings else {}
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        checkpoint.check_tensors(shapes, tied=tied)
        model.load_state_dict({name: checkpoint.read(checkpoint.resolve(name, tied)) for name in shapes})
    with torch.no_grad():
        return model(input_ids=torch.arange(config["vocab_size"]).view(2, -1)).logits, config


EMBEDDING = {"llama": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
BOTH = ["embed_tokens", "lm_head"]


@pytest.mark.parametrize("base", ["safetensors", "torch"])
@pytest.mark.parametrize(
    ("make", "settings", "stays_tied"),
    [
        (partial(llama, tied=True), {"target_modules": ["q_proj", "embed_tokens"]}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj", "lm_head"]}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj", *BOTH]}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj"], "modules_to_save": BOTH}, False),
        (
            partial(llama, tied=True),
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
            True,
        ),
        (partial(llama, tied=True), {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}, False),
        (partial(llama, tied=True), {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]}, False),
        (partial(llama, tied=True), {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}, False),
        (gpt2, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj"]}, True),
        (partial(llama, tied=True), {"target_modules": ["q_proj"], "resized": 2}, True),
        (gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True, "resized": 2}, True),
        (partial(llama, tied=True), {"target_modules": ["q_proj", "embed_tokens"], "resized": 2}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj", "lm_head"], "resized": 2}, False),
        (partial(llama, tied=True), {"target_modules": ["q_proj"], "modules_to_save": BOTH, "resized": 2}, False),
        (llama, {"target_modules": ["q_proj"], "resized": 2}, False),
        (llama, {"target_modules": ["q_proj"], "resized": -2}, False),
        (llama, {"target_modules": ["q_proj"], "modules_to_save": BOTH, "resized": 2}, False),
    ],
)
def test_an_adapter_of_the_vocabulary_is_what_peft_computes(
    tmp_path: Path, make: Callable[[], PreTrainedModel], settings: dict[str, Any], stays_tied: bool, base: str
) -> None:
    """peft adapts embedding and head each alone, where the base ties them too, and saves both of a resized vocabulary."""
    want = trained(tmp_path, make, **settings)
    if base == "torch":  # which stores both names, and the one tensor once
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        torch.save(model.state_dict(), tmp_path / "base" / "pytorch_model.bin")
        (tmp_path / "base" / "model.safetensors").unlink()
    got, config = opened(tmp_path / "adapter")
    assert config["tie_word_embeddings"] is stays_tied
    assert config["vocab_size"] == 40 + settings.get("resized", 0)
    assert got.shape == want.shape
    assert (got - want).abs().max() < 1e-5
    assert model_config(tmp_path / "adapter")[0] == config
    assert opened(tmp_path / "base", adapter=str(tmp_path / "adapter"))[1] == config


def test_half_of_a_resized_vocabulary_is_refused(tmp_path: Path) -> None:
    """peft saves the embedding alone where factors adapt it, and of an untied head the new rows are lost."""
    trained(tmp_path, llama, target_modules=["q_proj", "embed_tokens"], resized=2)
    rule = refusal(tmp_path / "adapter").rule
    assert "'lm_head.weight' has 40 rows with it, and 'model.embed_tokens.weight' 42" in rule


def stored_as_head(base: Path) -> None:
    held = load_file(base / "model.safetensors")
    held["lm_head.weight"] = held.pop("model.embed_tokens.weight")
    save_file(held, base / "model.safetensors")


def test_an_embedding_that_the_base_stores_as_a_head_has_the_name_that_the_adapter_gives_it(tmp_path: Path) -> None:
    want = trained(tmp_path / "one", partial(llama, tied=True), target_modules=["q_proj", "embed_tokens"])
    stored_as_head(tmp_path / "one" / "base")
    got, config = opened(tmp_path / "one" / "adapter")
    assert (got - want).abs().max() < 1e-5
    assert config["tie_word_embeddings"] is False
    trained(tmp_path / "other", partial(llama, tied=True), target_modules=["q_proj", "lm_head"])
    stored_as_head(tmp_path / "other" / "base")
    assert "stores no embedding by a name that is known" in refusal(tmp_path / "other" / "adapter").rule
    want = trained(tmp_path / "none", partial(llama, tied=True), target_modules=["q_proj"])
    stored_as_head(tmp_path / "none" / "base")
    assert (opened(tmp_path / "none" / "adapter")[0] - want).abs().max() < 1e-5


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_base_without_a_head_of_its_own_gets_none_from_an_adapter(target: str, tmp_path: Path) -> None:
    trained(tmp_path, llama, target_modules=["q_proj", target])
    base = tmp_path / "base" / "model.safetensors"
    held = load_file(base)
    del held["lm_head.weight"]
    save_file(held, base)
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    kept = {name: tensor for name, tensor in adapter.items() if "base_layer" not in name}
    save_file(kept, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head(\.weight)?'"):
        opened(tmp_path / "adapter")


def test_a_head_that_peft_ties_without_its_bias_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, partial(llama, tied=True), target_modules=["q_proj"], modules_to_save=BOTH)
    base = tmp_path / "base" / "model.safetensors"
    save_file({**load_file(base), "lm_head.bias": torch.ones(40)}, base)
    with open_checkpoint(tmp_path / "adapter"):
        pass
    changed(tmp_path / "adapter", ensure_weight_tying=True)
    assert "without the bias that the base model's has" in refusal(tmp_path / "adapter").rule


def test_a_tied_base_that_stores_two_embeddings_has_none_to_adapt(tmp_path: Path) -> None:
    trained(tmp_path, partial(llama, tied=True), target_modules=["q_proj", "lm_head"])
    base = tmp_path / "base" / "model.safetensors"
    held = load_file(base)
    save_file({**held, "lm_head.weight": held["model.embed_tokens.weight"] + 1}, base)
    assert "both are stored, and they differ" in refusal(tmp_path / "adapter").rule


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
    assert error.rule.endswith("name its folder (--base, or model.base of a run)")
    snapshot = in_cache(tmp_path / "hub", tmp_path / "base", "someone/small")
    assert_merged(adapter, want)
    assert pinned(adapter, Given()).base == str(snapshot)
    assert_merged(adapter, want, base="hf:someone/small")
    assert "is no folder here; name" in refusal(adapter, base="someone/small").rule, "only with hf: is what is given a name"
    changed(adapter, revision="main")
    assert_merged(adapter, want)
    changed(adapter, revision="v2")
    assert "revision v2 of someone/small is not in the cache" in refusal(adapter).rule, "it is the base's"


def test_an_adapters_step_is_that_of_its_folders_name(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    with open_checkpoint(adapter) as checkpoint:
        assert checkpoint.step is None
    adapter.rename(tmp_path / "checkpoint-70")
    with open_checkpoint(tmp_path / "checkpoint-70") as checkpoint:
        assert checkpoint.step == 70
