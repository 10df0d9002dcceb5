"""Habits of trainers around the files they write: what they name, leave out or put beside, none of which hides the model."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, Given, open_checkpoint
from checkpoint.readers.prefixes import chosen
from tests.checkpoint.folders import assert_holds, plain_folder, some_tensors, write_config
from tests.checkpoint.readers.deepspeed_folders import zero3_of
from tests.checkpoint.readers.test_adapters import LINEAR, adapted, changed, gpt2, llama, opened, trained


def refusal(path: Path, **given: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(path, given=Given(**given)):
        pass
    return caught.value


@pytest.mark.parametrize("family", ["transformer.word_embeddings.weight", "word_embeddings.weight", "transformer.wte.weight"])
@pytest.mark.parametrize("prefix", ["", "model.", "app.module."])
def test_the_embedding_of_every_family_tells_the_prefix(family: str, prefix: str) -> None:
    layer = "transformer.h.0.ln_1.weight" if family.startswith("transformer") else "h.0.ln_1.weight"
    assert chosen([prefix + family, prefix + layer], None, "x") == {family: prefix + family, layer: prefix + layer}


def test_an_optimizer_s_own_tree_is_no_model() -> None:
    held = ["wte.weight", "h.0.ln_1.weight", "state.wte.weight.exp_avg", "param_groups.wte.weight.lr"]
    assert sorted(chosen(held, None, "x").values()) == sorted(held[:2])


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("model._flat_param", "flat parameters, each rank's part of FSDP's .*SHARDED_STATE_DICT"),
        ("model.layers.0._fsdp_wrapped_module._flat_param", "flat parameters"),
        ("model.decoder.layers.0.mlp.linear_fc1.weight", "layers of Megatron-LM .*--ckpt-format torch_dist"),
        ("model.module.decoder.layers.0.self_attention.linear_qkv.weight", "layers of Megatron-LM"),
    ],
)
def test_what_no_prefix_would_help_is_refused_by_what_it_is(name: str, rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        chosen([name], None, ".metadata")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "model."])
def test_what_wraps_a_model_before_it_is_saved_leaves_its_name_before_all_others(prefix: str, tmp_path: Path) -> None:
    wanted = {name: torch.randn(6, 4) for name in ("transformer.wte.weight", "transformer.h.0.attn.c_proj.weight")}
    plain_folder(tmp_path, {prefix + name: tensor for name, tensor in wanted.items()})
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, wanted)


def test_tensors_that_fsdp_hung_attributes_on_are_tensors(tmp_path: Path) -> None:
    tensors = some_tensors()
    for tensor in tensors.values():
        tensor._has_been_cloned = True  # type: ignore[attr-defined]  # as FSDP does where it gathers a model
    torch.save(tensors, write_config(tmp_path) / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, some_tensors())


def test_parameters_with_attributes_are_tensors(tmp_path: Path) -> None:
    tensors = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in some_tensors().items()}
    for tensor in tensors.values():
        tensor.ds_id = 3  # type: ignore[attr-defined]  # as DeepSpeed does
    torch.save(tensors, write_config(tmp_path) / "pytorch_model.bin")
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, some_tensors())


class Loud(torch.Tensor):
    """A tensor of a class of somebody's own."""


def test_tensors_of_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    tensor = torch.ones(2).as_subclass(Loud)
    torch.save({"wte.weight": tensor}, write_config(tmp_path) / "pytorch_model.bin")
    assert "test_trainers_habits.Loud" in refusal(tmp_path).rule


@pytest.mark.parametrize("at", [0, 2])
def test_whole_tensors_from_torchs_writer_of_parts_are_opened(at: int, tmp_path: Path) -> None:
    tensors = some_tensors()
    told = {name: {"saved_offsets": [at] + [0] * (tensor.ndim - 1)} for name, tensor in tensors.items()}
    file = "model-00001-of-00001.safetensors"
    save_file(tensors, write_config(tmp_path) / file, {"DCP_SHARDING_INFO": json.dumps(told), "DCP_VERSION": "1.0"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    if at:
        assert "holds parts of tensors" in refusal(tmp_path).rule
        return
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / file).rename(tmp_path / "model.safetensors")
    assert "holds parts of tensors" in refusal(tmp_path).rule, "the first rank's part looks alike, and no index lists it"


@pytest.mark.parametrize("at", ["1", "[]", "[false]", "[null]", "[0, 1]", "[0.0]", '"0"'])
@pytest.mark.parametrize("others", [True, False])
def test_of_parts_that_say_nothing_sound_none_is_whole(at: str, others: bool, tmp_path: Path) -> None:
    tensors, file = some_tensors(), "model-00001-of-00001.safetensors"
    whole = {name: {"saved_offsets": [0] * tensor.ndim} for name, tensor in tensors.items()}
    first, *more = tensors
    told = json.dumps({name: whole[name] for name in (more if others else [])})[:-1]
    told += f'{", " if others else ""}"{first if others else "another"}": {{"saved_offsets": {at}}}}}'
    if at == "[]" and others:
        told = json.dumps({name: whole[name] for name in more})
    save_file(tensors, write_config(tmp_path) / file, {"DCP_SHARDING_INFO": told})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, file)}))
    assert "holds parts of tensors" in refusal(tmp_path).rule


@pytest.mark.parametrize(("more", "is_read"), [("model.layers.0.self_attn.rotary_emb.inv_freq", True), ("model.more", False)])
def test_an_index_may_name_tables_that_models_compute(more: str, is_read: bool, tmp_path: Path) -> None:
    tensors, file = some_tensors(), "model-00001-of-00001.safetensors"
    save_file(tensors, write_config(tmp_path) / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys([*tensors, more], file)}))
    if not is_read:
        assert "'model.more'" in refusal(tmp_path).rule
        return
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)


def test_a_run_of_torchtunes_is_its_last_epoch_with_the_adapter_merged(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    for epoch in (0, 1, 10):
        folder = plain_folder(tmp_path / "run" / f"epoch_{epoch}")
        for path in adapter.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / "adapter_model.pt").write_bytes(b"by torchtune's names")
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert checkpoint.layout == "Hugging Face"
        assert checkpoint.path.name == "epoch_10"
        assert_holds(checkpoint, some_tensors())


def test_torchtunes_adapters_of_qwen2s_queries_are_refused(tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    (adapter / "adapter_model.pt").touch()
    with open_checkpoint(adapter) as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen2", "architectures": []}))
    assert "self_attn.q_proj' of Qwen2, whose rows torchtune writes" in refusal(adapter).rule


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
        (
            {"auto_mapping": {"base_model_class": "LlamaForSequenceClassification"}},
            "trained on 'LlamaForSequenceClassification'",
        ),
    ],
)
def test_an_adapter_of_a_classifier_is_refused(values: dict[str, Any], rule: str, tmp_path: Path) -> None:
    adapter, _ = adapted(tmp_path, llama, target_modules=LINEAR)
    changed(adapter, **values)
    assert rule in refusal(adapter).rule
    mapping = {"base_model_class": "LlamaForCausalLM", "parent_library": "transformers.models.llama.modeling_llama"}
    changed(adapter, task_type=None, auto_mapping=mapping)
    with open_checkpoint(adapter):
        pass


def test_a_classifier_is_refused_by_its_own_name(tmp_path: Path) -> None:
    plain_folder(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["GPT2ForSequenceClassification"]}))
    assert "architectures names 'GPT2ForSequenceClassification'" in refusal(tmp_path).rule


def in_a_model(name: str) -> str:
    """The name in the model that peft made for a tensor in its adapter's file."""
    kinds = {"lora_A.weight": "lora_A.default.weight", "lora_B.weight": "lora_B.default.weight"}
    kind = next((kind for kind in kinds if name.endswith(kind)), None)
    whole = f"{name.removesuffix('weight')}modules_to_save.default.weight"
    return whole if kind is None else name.removesuffix(kind) + kinds[kind]


def test_what_was_trained_in_place_of_tied_tensors_needs_those_no_more(tmp_path: Path) -> None:
    """A save of ZeRO-3 without what is frozen, and beside it the adapter whose parameters nobody gathered."""
    settings = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}
    want = trained(tmp_path, partial(llama, tied=True), resized=2, **settings)
    adapter = tmp_path / "adapter"
    held = {name: tensor for name, tensor in load_file(adapter / "adapter_model.safetensors").items() if "original" not in name}
    plain = {name: tensor for name, tensor in held.items() if "modules_to_save" not in name}
    folder = zero3_of(adapter, {in_a_model(name): tensor for name, tensor in plain.items()}, 2)
    (adapter / "config.json").unlink()
    for file in folder.glob("*model_states.pt"):
        tree = torch.load(file, weights_only=False)
        head, embedding = (f"base_model.model.{name}.original_module.weight" for name in ("lm_head", "model.embed_tokens"))
        tree["module"] |= {head: torch.empty(0)}
        torch.save(tree | {"shared_params": {head: embedding}}, file)
    save_file({name: torch.empty(0) for name in plain}, adapter / "adapter_model.safetensors")
    assert "or name DeepSpeed's save in this folder, which has them" in refusal(adapter).rule
    got, config = opened(folder)
    assert (got - want).abs().max() < 1e-5
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (42, False)


def test_of_gpt2s_transposed_weights_the_family_must_be_known(tmp_path: Path) -> None:
    trained(tmp_path, gpt2, target_modules=["c_attn"], fan_in_fan_out=True)
    held = {in_a_model(name): tensor for name, tensor in load_file(tmp_path / "adapter" / "adapter_model.safetensors").items()}
    for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items():
        adapted_one = name.endswith("c_attn.weight")
        held["base_model.model." + (name.replace("c_attn.", "c_attn.base_layer.") if "c_attn." in name else name)] = tensor
        assert not adapted_one or tensor.shape == (16, 48)
    (tmp_path / "save").mkdir()
    save_file(held, tmp_path / "save" / "model.safetensors")
    given = str(tmp_path / "adapter" / "adapter_config.json")
    assert "of which family this is must be said (--model-config)" in refusal(tmp_path / "save", adapter_config=given).rule
    with open_checkpoint(tmp_path / "save", given=Given(adapter_config=given, config=str(tmp_path / "base"))):
        pass


def test_a_router_that_an_adapter_trains_whole_is_found_by_its_stored_name(tmp_path: Path) -> None:
    trained(tmp_path, llama, target_modules=["q_proj"])
    stored = {
        "model.layers.0.block_sparse_moe.gate.weight": torch.ones(4, 16),
        "model.layers.0.self_attn.q_proj.weight": torch.ones(4, 16),
    }
    save_file(stored, tmp_path / "base" / "model.safetensors")
    factors = {"self_attn.q_proj.lora_A.weight": torch.ones(4, 16), "self_attn.q_proj.lora_B.weight": torch.ones(4, 4)}
    held = {f"base_model.model.model.layers.0.{name}": tensor for name, tensor in factors.items()}
    held["base_model.model.model.layers.0.mlp.gate.weight"] = torch.full((4, 16), 2.0)
    save_file(held, tmp_path / "adapter" / "adapter_model.safetensors")
    with open_checkpoint(tmp_path / "adapter") as checkpoint:
        assert checkpoint.read("model.layers.0.block_sparse_moe.gate.weight").unique().tolist() == [2.0]


def test_an_adapter_that_is_no_vocabulary_s_leaves_the_base_s_configuration(tmp_path: Path) -> None:
    trained(tmp_path, llama, target_modules=["q_proj"])
    _, config = opened(tmp_path / "adapter")
    with open_checkpoint(tmp_path / "base") as base:
        assert config == dict(base.config)
