"""Megatron's checkpoints: every slice of every tensor is the model's, in each form; what cannot be read is refused."""

from __future__ import annotations

import argparse
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from checkpoint import CheckpointError, Given, open_checkpoint, open_structure
from checkpoint.layout import cover_fault
from tests.checkpoint.readers.test_neox import TOKENS, Runs, assert_holds, assert_model, small
from tests.support.megatron import Form, save_megatron, save_megatron_deepspeed
from tests.support.megatron_dist import megatrons_plan, save_torch_dist
from tests.support.models import tokenizer

FORMS = {
    "GPT-2's parts": ("gpt2", {"activation_function": "gelu"}, {"names": "legacy"}),
    "GPT-2's parts, in two stages": ("gpt2", {"activation_function": "gelu"}, {"names": "legacy", "pipeline": 2}),
    "Llama's parts": ("llama", {"num_key_value_heads": 2}, {}),
    "Llama's parts, fused": ("llama", {"tie_word_embeddings": True}, {"names": "fused", "pipeline": 2}),
    "stages in turn": ("llama", {"num_hidden_layers": 4}, {"pipeline": 2, "chunks": 2}),
    "biases of queries": ("qwen2", {}, {"pipeline": 2}),
    "plain MLP and rotary positions": ("gpt_neox", {"use_parallel_residual": False}, {"names": "fused"}),
}
"""Family, what its model has, how it is laid out."""


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_and_slice_is_that_of_the_model(name: str, tensor: int, tmp_path: Path) -> None:
    family, changes, form = FORMS[name]
    model = small(family, **changes)
    save_megatron(tmp_path, model, Form(tensor=tensor, **form))
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)
        assert (checkpoint.layout, checkpoint.step) == ("Megatron-LM", 10)
        assert_model(checkpoint.config, model)
    with open_structure(tmp_path) as structure:
        assert {cover_fault(stored) for stored in structure.weights.places.values()} == {None}
        told = [structure.weights.facts[f"{kind}_parallel_size"] for kind in ("tensor", "pipeline")]
        assert told == [tensor, form.get("pipeline", 1)]


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_deepspeed_saved_of_megatron_is_read(family: str, layers: bool, tmp_path: Path) -> None:
    model = small(family, **({"activation_function": "gelu"} if family == "gpt2" else {}))
    save_megatron_deepspeed(tmp_path, model, Form(tensor=2, names="legacy"), layers=layers)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)
        assert (checkpoint.layout, checkpoint.step) == ("Megatron-DeepSpeed", 10)
        assert_model(checkpoint.config, model)


def test_ranks_of_megatron_deepspeed_are_of_one_save(tmp_path: Path) -> None:
    folder = save_megatron_deepspeed(tmp_path, small("llama"), Form(tensor=2, names="legacy"), layers=False)
    file = folder / "mp_rank_01_model_states.pt"
    torch.save(torch.load(file, weights_only=False) | {"iteration": 20}, file)
    with pytest.raises(CheckpointError, match=r"mp_rank_01.*: is of step 20, mp_rank_00.* of step 10: two saves"):
        open_structure(tmp_path)


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("tensor", [1, 2])
def test_megatron_deepspeed_of_later_keeps_queries_keys_and_values_apart(layers: bool, tensor: int, tmp_path: Path) -> None:
    model = small("gpt2", activation_function="gelu")
    save_megatron_deepspeed(tmp_path, model, Form(tensor=tensor, names="legacy", has_thirds=True), layers=layers)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)


def test_megatron_deepspeed_without_deepspeed_has_the_same_order(tmp_path: Path) -> None:
    model = small("gpt2", activation_function="gelu")
    save_megatron(tmp_path, model, Form(tensor=2, names="legacy", has_thirds=True))
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_query_groups": 2}, "args.num_key_value_heads is None; with ds_sequence_parallel_fpdt"),
        ({}, "args.use_rotary_position_embeddings is True; with ds_sequence_parallel_fpdt"),
        ({"ds_sequence_parallel_size": 2}, "args.use_rotary_position_embeddings is True"),
        ({"ds_sequence_parallel_size": 2, "use_flash_attn_v2": True}, None),
    ],
)
def test_what_megatron_deepspeed_of_later_computes_as_no_model_does_is_refused(
    args: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    model, rotary = small("llama", num_key_value_heads=4), {"use_rotary_position_embeddings": True}
    save_megatron_deepspeed(tmp_path, model, Form(names="legacy", has_thirds=True), layers=False, **rotary, **args)
    if message is None:
        with open_checkpoint(tmp_path) as checkpoint:
            name = "model.layers.1.self_attn.k_proj.weight"
            assert torch.equal(checkpoint.read(name), model.state_dict()[name])
        return
    with pytest.raises(CheckpointError, match=message):
        open_structure(tmp_path)


@pytest.mark.parametrize("names", ["legacy", "core"])
def test_megatrons_core_passes_over_openai_gelu(names: str, tmp_path: Path) -> None:
    save_megatron(tmp_path, small("gpt2"), Form(names=names), openai_gelu=True)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config["activation_function"] == ("gelu_new" if names == "legacy" else "gelu")


@pytest.mark.parametrize("key", ["use_te_activation_func", "use_transformer_engine_op_fuser"])
def test_an_activation_of_transformer_engine_is_refused_where_it_may_be_another(key: str, tmp_path: Path) -> None:
    save_megatron(tmp_path / "plain", small("gpt2"), Form(), **{key: True})
    with pytest.raises(CheckpointError, match=f"args.{key} is True; TransformerEngine's GELU"):
        open_structure(tmp_path / "plain")
    save_megatron(tmp_path / "gated", small("llama"), Form(), **{key: True})
    open_structure(tmp_path / "gated").close()


def test_positions_are_scaled_by_the_factor_that_the_trainer_takes_and_dropouts_are_taken_over(tmp_path: Path) -> None:
    dropouts = {"attention_dropout": 0.25, "hidden_dropout": 0.125}
    save_megatron(tmp_path / "llama", small("llama"), Form(), use_rope_scaling=True, rope_scaling_factor=32.0, **dropouts)
    with open_checkpoint(tmp_path / "llama") as checkpoint:
        assert checkpoint.config["rope_parameters"]["factor"] == 8.0
        assert checkpoint.config["attention_dropout"] == 0.25
    save_megatron(tmp_path / "gpt2", small("gpt2"), Form(names="legacy"), **dropouts)
    with open_checkpoint(tmp_path / "gpt2") as checkpoint:
        taken = [checkpoint.config[key] for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")]
    assert taken == [0.25, 0.125, 0.125]


def test_the_tokenizer_that_megatron_saves_inside_is_found(tmp_path: Path) -> None:
    folder = save_megatron(tmp_path, small("llama"), Form())
    (folder / "tokenizer").mkdir()
    tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
    with open_structure(tmp_path) as structure:
        assert structure.config["vocab_size"] == TOKENS
        assert structure.tokenizer.has("tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer" / "tokenizer.json").read_bytes())
    (folder / "tokenizer" / "tokenizer.json").unlink()
    (folder / "tokenizer").rmdir()
    (folder / "tokenizer").symlink_to("/usr")
    with open_structure(tmp_path) as structure:
        assert structure.tokenizer.path == tmp_path, "nobody looks where the link leads"


@pytest.mark.parametrize("plan", [SavePlan, megatrons_plan()])
def test_what_ranks_meant_to_write_may_stand_in_the_table(plan: type[SavePlan], tmp_path: Path) -> None:
    model = small("llama")
    save_torch_dist(tmp_path, model, Form(tensor=2, names="fused"), plan=plan)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)


def plain_pipeline(root: Path, first: int, *, args: bool, embedding: str) -> Path:
    """A save of DeepSpeed's PipelineModule with a model axis: a layer before ``first`` is a function, which has no file."""
    folder = root / "global_step10"
    folder.mkdir(parents=True)
    (root / "config.json").write_text('{"model_type": "gpt2"}')
    (root / "latest").write_text(folder.name)
    block, norm = {"attn.c_attn.weight": torch.ones(2, 6)}, {"weight": torch.ones(2)}
    layers = enumerate([{embedding: torch.ones(5, 2), "wpe.weight": torch.ones(4, 2)}, block, block, norm], first)
    shapes: OrderedDict[str, torch.Size] = OrderedDict()
    for number, table in layers:
        torch.save(OrderedDict(table), folder / f"layer_{number:02d}-model_00-model_states.pt")
        shapes |= {f"{number}.{name}": value.shape for name, value in table.items()}
    state = {"args": argparse.Namespace(lr=1e-3, layers=2)} if args else {}
    tree = {"module": None, "param_shapes": [shapes], "mp_world_size": 1, "global_steps": 10}
    torch.save(tree | state, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize(
    ("first", "args", "embedding"),
    [
        (1, False, "wte.weight"),
        (1, True, "wte.weight"),
        (1, False, "word_embeddings.weight"),
        (0, True, "word_embeddings.weight"),
    ],
)
def test_a_pipeline_of_another_model_is_not_taken_for_megatron_s_or_neox_s(
    tmp_path: Path, first: int, args: bool, embedding: str
) -> None:
    plain_pipeline(tmp_path, first, args=args, embedding=embedding)
    given = Given()
    if embedding != "wte.weight":  # a name that no family has whose pipelines are known
        prefixes = [{"word_embeddings": "transformer.wte", "wpe": "transformer.wpe"}, "transformer.h.0.", "transformer.h.1."]
        (tmp_path / "map.json").write_text(json.dumps(dict(enumerate([*prefixes, "transformer.ln_f."], first))))
        given = Given(layer_map=str(tmp_path / "map.json"))
    expected = ["transformer.wte", "transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.h.1.attn.c_attn"]
    with open_checkpoint(tmp_path, given=given) as checkpoint:
        assert (checkpoint.layout, checkpoint.step) == ("DeepSpeed pipeline", 10)
        assert checkpoint.tensors.keys() == {f"{name}.weight" for name in (*expected, "transformer.ln_f")}


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("mp_rank_*_model_states.pt", "mp_rank_00_model_states.pt: is missing, which holds the arguments of the run"),
        ("layer_01-model_00-model_states.pt", "layer_01-model_00-model_states.pt: is not a zip archive"),
        ("layer_03-model_01-model_states.pt", "layer_03-model_01-model_states.pt: is missing"),
    ],
)
def test_what_megatron_deepspeed_lost_is_missed_by_name(tmp_path: Path, lost: str, message: str) -> None:
    folder = save_megatron_deepspeed(tmp_path, small("llama"), Form(tensor=2, names="legacy"), layers=True)
    for file in folder.glob(lost):
        if "zip" in message:
            file.write_bytes(b"")
        else:
            file.unlink()
    with pytest.raises(CheckpointError, match=re.escape(message)):
        open_structure(tmp_path)


@pytest.mark.parametrize(("stacked", "beside"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize(("family", "tensor"), [("gpt2", 2), ("llama", 2), ("llama", 1)])
def test_whole_tensors_with_stacked_layers_are_read(
    family: str, tensor: int, stacked: bool, beside: bool, tmp_path: Path
) -> None:
    model = small(family, **({"activation_function": "gelu"} if family == "gpt2" else {}))
    save_torch_dist(tmp_path, model, Form(tensor=tensor, names="fused"), stacked=stacked, beside=beside)
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)
        assert (checkpoint.layout, checkpoint.step) == ("Megatron-LM torch_dist", 10)
        assert_model(checkpoint.config, model)


def test_a_torch_dist_folder_that_is_not_whole_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = save_torch_dist(tmp_path, small("llama"), Form(names="fused"))
    common = torch.load(folder / "common.pt", weights_only=False)
    common["args"].num_layers = 3
    torch.save(common, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"is of 2 layers; args\.num_layers is 3"):
        open_structure(tmp_path)
    torch.save(common | {"extra": Runs()}, folder / "common.pt")
    with pytest.raises(CheckpointError, match="print"):
        open_structure(tmp_path)
    (folder / "common.pt").unlink()
    with pytest.raises(CheckpointError, match=r"common\.pt: is missing, and so is common_state"):
        open_structure(tmp_path)
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    torch.save(common, folder / "common.pt")
    for path in folder.glob("*distcp"):
        path.unlink()
    (folder / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"metadata\.json: sharded_backend is 'zarr'"):
        open_structure(tmp_path)


def test_without_a_tokenizer_no_row_is_left_out(tmp_path: Path) -> None:
    save_megatron(tmp_path, small("llama"), Form(tensor=2))
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config["vocab_size"] == -(-TOKENS // 16) * 16
        assert checkpoint.config["eos_token_id"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"num_experts": 8}, "args.num_experts is 8"),
        ({"pipeline_model_parallel_layout": "Et*2|L"}, "args.pipeline_model_parallel_layout is 'Et"),
        ({"account_for_embedding_in_pipeline_split": True}, "account_for_embedding_in_pipeline_split is True"),
        ({"qk_layernorm": True}, "args.qk_layernorm is True"),
        ({"apply_layernorm_1p": True}, "args.apply_layernorm_1p is True"),
        ({"rotary_interleaved": True}, "args.rotary_interleaved is True"),
        ({"rotary_seq_len_interpolation_factor": 2}, "args.rotary_seq_len_interpolation_factor is 2"),
        ({"no_rope_freq": 4}, "args.no_rope_freq is 4"),
        ({"softmax_type": "off-by-one"}, "args.softmax_type is 'off-by-one'"),
        ({"multi_latent_attention": True}, "args.multi_latent_attention is True"),
        ({"position_embedding_type": "alibi"}, "args.position_embedding_type is 'alibi'"),
        ({"normalization": "Other"}, "args.normalization is 'Other'"),
        ({"swiglu": False}, "args.normalization is 'RMSNorm'; with rotary positions and a plain MLP"),
        ({"num_layers": 3}, "there are tensors of 2 layers; args.num_layers is 3"),
        ({"num_layers": 1 << 30}, "there are tensors of 2 layers"),
        ({"num_attention_heads": 8}, "query_key_value: has"),
        ({"num_query_groups": 4}, "query_key_value: has"),
        ({"tensor_model_parallel_size": 1}, "there are 2 folders of ranks; by args there are 1 x 1|shape"),
        ({"tensor_model_parallel_size": 4}, "mp_rank_02"),
        ({"hidden_size": "wide"}, "args.hidden_size is 'wide'"),
        ({"expert_model_parallel_size": 2}, "expert_model_parallel_size is 2"),
        ({"enable_mhc_connections": True}, "args.enable_mhc_connections is True"),
        ({"spec": ["my.layers", "spec"]}, r"args.spec is \['my.layers', 'spec'\]; layers are of a specification"),
        ({"rotary_percent": 0.5}, "args.rotary_percent is 0.5; rotary positions for a part"),
        ({"attention_dropout": 2}, "args.attention_dropout is 2; it must be a number from 0 to 1"),
        ({"normalization": "LayerNorm", "swiglu": False}, "args.add_bias_linear is False; with layernorm, rotary positions"),
        *(
            ({"normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True, **more}, message)
            for more, message in (
                ({}, "args.num_query_groups is 2; with layernorm"),
                ({"num_query_groups": 4, "kv_channels": 3}, "args.kv_channels is 3; with layernorm"),
                ({"num_query_groups": 4, "use_rope_scaling": True}, "args.use_rope_scaling is True; with layernorm"),
            )
        ),
    ],
)
def test_arguments_that_no_model_of_transformers_has_are_refused_by_name(
    args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_megatron(tmp_path, small("llama"), Form(tensor=2), **args)
    with pytest.raises(CheckpointError, match=message):
        open_structure(tmp_path)


def tables_that_hold_themselves() -> dict[str, Any]:
    table: dict[str, Any] = {}
    table["a"] = table["b"] = table
    return table


def test_files_that_are_missing_old_or_no_tables_are_refused(tmp_path: Path) -> None:
    folder = save_megatron(tmp_path, small("llama"), Form(tensor=2))
    file = folder / "mp_rank_01" / "model_optim_rng.pt"
    held = torch.load(file, weights_only=False)
    without = {name: value for name, value in held["model"].items() if "layers.1" not in name}
    for change, message in (
        ({"checkpoint_version": 0}, "its checkpoint_version is 0"),
        ({"iteration": 9}, r"mp_rank_01/model_optim_rng\.pt: is of step 9, mp_rank_00/.* of step 10: two saves"),
        ({"args": None}, "holds tensor|args"),
        ({"model": without}, "a rank has no tensors of layer 1"),
        ({"model": held["model"] | {"decoder.layers.0.mlp.router.weight": torch.ones(2)}}, "router.weight"),
        ({"model": held["model"] | {"vision.weight": torch.ones(2)}}, "holds tensor 'vision.weight'"),
        ({"model": 5}, "holds int where a table"),
        ({"model": tables_that_hold_themselves()}, "one that holds itself"),
        ({"extra": Runs()}, "print"),
    ):
        torch.save(held | change, file)
        if "args" in change:
            open_structure(tmp_path).close()  # those of the first rank count
            continue
        with pytest.raises(CheckpointError, match=message):
            open_structure(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointError, match=r"mp_rank_01|model_optim_rng\.pt: is missing"):
        open_structure(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"latest_checkpointed_iteration\.txt: is '\.\./elsewhere'"):
        open_structure(tmp_path)
