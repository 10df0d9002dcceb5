"""The settings that GPT-NeoX keeps in its checkpoints: where they are, and what of them no model of transformers has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointError, open_checkpoint, open_structure
from tests.checkpoint.readers.test_neox import assert_holds, assert_model, saved, with_tokenizer


@pytest.mark.parametrize("name", ["a pipeline", "no pipeline"])
def test_settings_above_the_checkpoint_are_read_where_nothing_else_describes_the_model(name: str, tmp_path: Path) -> None:
    model, folder = saved(tmp_path, name, **with_tokenizer(tmp_path))
    (folder / "configs").rename(tmp_path / "configs")
    for place in (tmp_path, folder):
        with open_checkpoint(place) as checkpoint:
            assert_holds(checkpoint, model)
            assert_model(checkpoint.config, model)
    (tmp_path / "configs" / "more.yml").write_text("hidden_size: 7")
    with pytest.raises(CheckpointError, match=r"\.\./configs/\w+\.yml: hidden.size is .*; \.\./configs/\w+\.yml gives it as"):
        open_checkpoint(tmp_path)
    described = tmp_path / "config.json"
    described.write_text(json.dumps(dict(checkpoint.config)))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)


def test_what_is_not_set_is_said_to_be_so(tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "a sliding window")
    for file in (folder / "configs").iterdir():
        kept = [line for line in file.read_text().splitlines(keepends=True) if "use_bias_in_mlp" not in line.replace("-", "_")]
        file.write_text("".join(kept))
    with pytest.raises(CheckpointError, match=r"use_bias_in_mlp is not set; biases \(which there are unless it is false\)"):
        open_structure(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pos-emb": "alibi"}, "pos_emb is 'alibi'"),
        ({"pos_emb": "sinusoidal", "pos-emb": "sinusoidal"}, "pos_emb is 'sinusoidal'"),
        ({"pos-emb": "rpe"}, "pos_emb is 'rpe'"),
        ({"norm": "scalenorm"}, "norm is 'scalenorm'"),
        ({"norm": "non_parametric_layernorm"}, "norm is 'non_parametric_layernorm'"),
        ({"pos-emb": "learned", "gpt-j-residual": False, "mup_rp_embedding_mult": 0.25}, "mup_rp_embedding_mult is 0.25"),
        ({"sequence_parallel": True, "gpt-j-residual": False}, "sequence_parallel is True; without gpt_j_residual each"),
        ({"te_rowparallel": True}, "te_rowparallel is True; with gpt_j_residual the sums"),
        ({"use_qk_layernorm": True}, "use_qk_layernorm is True"),
        ({"use_mup": True}, "use_mup is True"),
        ({"activation": "softsign"}, "activation is 'softsign'"),
        ({"activation": "geglu"}, "activation is 'geglu'"),
        ({"num-kv-heads": 2}, "num_kv_heads is 2"),
        ({"attention-config": [[["local", "global"], 1]]}, "attention_config is"),
        ({"moe_num_experts": 4}, "moe_num_experts is 4"),
        ({"sliding_window_width": 8}, "sliding_window_width is 8"),
        ({"train_impl": "rm"}, "train_impl is 'rm'"),
        ({"use_bias_in_mlp": False}, "use_bias_in_mlp is False"),
        (
            {"pos-emb": "learned", "gpt-j-residual": False, "opt_pos_emb_offset": 2},
            "opt_pos_emb_offset is 2; positions begin later",
        ),
        ({"num-layers": 3}, "layer 4 is missing|layer 6 is missing|3 layers"),
        ({"num-layers": 1 << 30}, "there are files of 5 layers in all"),
        ({"hidden-size": 64}, "hidden_size is 64; attention has 32 columns on 2 model-parallel ranks"),
        ({"num-attention-heads": 5}, "5 heads are not a multiple of 2"),
        ({"hidden-size": "wide"}, "hidden_size is 'wide'"),
        ({"train_batch_size": 5}, "train-batch-size|train_batch_size"),
    ],
)
def test_settings_that_no_model_of_transformers_has_are_refused_by_name(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=message):
        open_structure(tmp_path)


def test_a_key_that_one_file_gives_twice_is_named_with_its_line(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    (folder / "configs" / "local.yml").write_text("{\n'seed': 1,\n'save': 'x',\n'seed': 2\n}")
    with pytest.raises(CheckpointError, match=r"(?s)configs/local\.yml: .*the key 'seed' is given twice.*line 4"):
        open_structure(tmp_path)


@pytest.mark.parametrize("parallel", [2, 4])
def test_how_ranks_share_a_head_is_told_by_its_form_where_no_setting_says(parallel: int, tmp_path: Path) -> None:
    model, folder = saved(tmp_path, "a head cut by its input", parallel, **with_tokenizer(tmp_path))
    path = folder / "configs" / "model.yml"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "output-layer-parallelism" not in line))
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)
    for part in folder.glob("layer_06-model_*"):
        torch.save({"final_linear.weight": torch.load(part)["final_linear.weight"][:-3]}, part)
    with pytest.raises(CheckpointError, match=r"final_linear\.weight: .*neither some rows .*output_layer_parallelism column"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "a: &x [1]\nb: *x\n",
        "a: 1\na: 1\n",
        "[" * 5000,
        "- 1\n",
        "!!python/object/apply:os.getcwd []\n",
        "1: 2\n",
        "\x00",
        "{a: ",
    ],
)
def test_settings_that_are_no_plain_yaml_are_refused(text: str, tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    (folder / "configs" / "more.yml").write_text(text)
    with pytest.raises(CheckpointError, match=r"configs/more.yml: (is no YAML|must be an object)"):
        open_structure(tmp_path)
