"""The layers of DeepSpeed's pipelines: what names of the model they get, by their family's order or by a file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import CheckpointError, Given, open_checkpoint
from checkpoint.readers.deepspeed.layer_map import rename
from tests.checkpoint.folders import assert_holds
from tests.checkpoint.readers.deepspeed_folders import TAG, gpt2_layers, layer_files
from tests.support.models import save

PARTS: Final = {
    "bloom": ("transformer.word_embeddings.", "transformer.word_embeddings_layernorm.", "transformer.h.", "transformer.ln_f."),
    "codegen": ("transformer.wte.", "transformer.h.", "transformer.ln_f."),
    "falcon": ("transformer.word_embeddings.", "transformer.h.", "transformer.ln_f."),
    "gpt2": ("transformer.wte.", "transformer.wpe.", "transformer.h.", "transformer.ln_f."),
    "gpt_bigcode": ("transformer.wte.", "transformer.wpe.", "transformer.h.", "transformer.ln_f."),
    "gpt_neo": ("transformer.wte.", "transformer.wpe.", "transformer.h.", "transformer.ln_f."),
    "gpt_neox": ("gpt_neox.embed_in.", "gpt_neox.layers.", "gpt_neox.final_layer_norm."),
    "gptj": ("transformer.wte.", "transformer.h.", "transformer.ln_f."),
    "llama": ("model.embed_tokens.", "model.layers.", "model.norm."),
    "olmo2": ("model.embed_tokens.", "model.layers.", "model.norm."),
    "opt": (
        "model.decoder.embed_tokens.", "model.decoder.embed_positions.",
        "model.decoder.layers.", "model.decoder.final_layer_norm.",
    ),
    "phi": ("model.embed_tokens.", "model.layers.", "model.final_layernorm."),
    "phi3": ("model.embed_tokens.", "model.layers.", "model.norm."),
    "stablelm": ("model.embed_tokens.", "model.layers.", "model.norm."),
}  # fmt: skip
"""Of a family, in the order of a pipeline: what the names of its layers begin with, those of each block of the last but one."""


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize("together", [False, True], ids=["each part a layer", "ends together"])
@pytest.mark.parametrize("family", PARTS)
def test_a_pipeline_of_transformers_modules_is_the_model(family: str, together: bool, tmp_path: Path) -> None:
    model = save(family, tmp_path / "model", with_tokenizer=False)
    stored = load_file(model / "model.safetensors")
    whole = {name.replace("embed_out.", "lm_head."): tensor for name, tensor in stored.items()}
    *before, blocks, norm = PARTS[family]
    head = {"lm_head.weight": whole[f"{before[0]}weight"].clone()} | {
        n: t for n, t in whole.items() if n.startswith("lm_head.")
    }

    def layer(*prefixes: str) -> dict[str, torch.Tensor]:
        """Some modules as one layer: a module's own names, or below an attribute where there are several."""
        return {
            name.removeprefix(prefix if len(prefixes) == 1 else prefix[: prefix[:-1].rfind(".") + 1]): tensor
            for prefix in prefixes
            for name, tensor in (whole | head).items()
            if name.startswith(prefix)
        }

    num_blocks = 1 + max(int(name.removeprefix(blocks).partition(".")[0]) for name in whole if name.startswith(blocks))
    inner = [layer(f"{blocks}{number}.") for number in range(num_blocks)]
    ends = (
        ([layer(*before)], [layer(norm, "lm_head.")])
        if together
        else ([layer(p) for p in before], [layer(norm), layer("lm_head.")])
    )
    layer_files(tmp_path / "run", dict(enumerate([*ends[0], *inner, *ends[1]])))
    (tmp_path / "run" / "config.json").write_bytes((model / "config.json").read_bytes())
    with open_checkpoint(tmp_path / "run") as checkpoint:
        assert_holds(checkpoint, whole | head)


@pytest.mark.parametrize(("like", "kind"), [("opt", "biogpt"), ("falcon", "chatglm"), ("phi", "another")])
def test_blocks_that_look_like_those_of_another_family_are_not_named(like: str, kind: str) -> None:
    marker = {
        "opt": "self_attn.out_proj.weight",
        "falcon": "self_attention.query_key_value.weight",
        "phi": "self_attn.dense.weight",
    }[like]
    shapes = {"0.weight": (8, 4), f"1.{marker}": (4, 4), "2.weight": (4,)} | ({"0.other": (8, 4)} if like == "opt" else {})
    places: dict[str, Any] = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    assert rename(places, None, "layer_00", {"model_type": like}), "the family itself is known"
    with pytest.raises(CheckpointError, match=f"its configuration says {kind}.*--layer-map"):
        rename(places, None, "layer_00", {"model_type": kind})


@pytest.mark.parametrize("before", [{"0.rope.inv_freq": (4,)}, {"0.rope.weight": (4, 4)}, {"0.wide": (8, 5)}])
def test_what_is_no_embedding_before_the_blocks_is_refused(before: dict[str, tuple[int, ...]]) -> None:
    shapes = {"0.wte.weight": (8, 4), "1.self_attention.query_key_value.weight": (12, 4), "2.weight": (4,)} | before
    places: dict[str, Any] = {name: SimpleNamespace(shape=shape) for name, shape in sorted(shapes.items())}
    with pytest.raises(CheckpointError, match="before its blocks"):
        rename(places, None, "layer_00")


def test_embeddings_are_as_wide_as_one_another() -> None:
    shapes = {"0.weight": (20, 4), "1.weight": (8, 5), "2.attn.c_attn.weight": (4, 12), "3.weight": (4,)}
    places: dict[str, Any] = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    with pytest.raises(CheckpointError, match="2 embeddings must stand"):
        rename(places, None, "layer_00")


@pytest.mark.parametrize("axis", ["", "-model_00"])
def test_layers_of_a_known_family_are_named_by_their_order(tmp_path: Path, axis: str) -> None:
    layer_files(tmp_path, gpt2_layers(), axis)
    with open_checkpoint(tmp_path) as checkpoint:
        first = {name: checkpoint.read(name).flatten()[0].item() for name in checkpoint.tensors}
    assert first == {
        "transformer.wte.weight": 5.0,
        "transformer.wpe.weight": 4.0,
        "transformer.h.0.attn.c_attn.weight": 2.0,
        "transformer.h.0.ln_1.weight": 2.0,
        "transformer.h.1.attn.c_attn.weight": 3.0,
        "transformer.h.1.ln_1.weight": 3.0,
        "transformer.ln_f.weight": 6.0,
        "transformer.ln_f.bias": 7.0,
        "lm_head.weight": 8.0,
    }


@pytest.mark.parametrize("axis", ["", "-model_00"])
def test_a_missing_layer_is_told(tmp_path: Path, axis: str) -> None:
    layers = gpt2_layers()
    layer_files(tmp_path, layers | {4: layers[3]}, axis)
    (tmp_path / TAG / f"layer_03{axis}-model_states.pt").unlink()
    want = f"layer_03{axis}-model_states.pt: is missing between other layers; say which names of the model its layers have"
    assert str(refusal(tmp_path)).startswith(want)


def test_a_layer_without_parameters_may_stand_between_blocks() -> None:
    blocks = (1, 3, 4)
    shapes = {"0.weight": (8, 4), "5.weight": (4,)} | {f"{number}.self_attn.q_proj.weight": (4, 4) for number in blocks}
    places: dict[str, Any] = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    config = {"model_type": "llama", "num_hidden_layers": 3}
    named = {f"model.layers.{number}.self_attn.q_proj.weight" for number in range(3)}
    assert rename(places, None, "layer_00", config).keys() == named | {"model.embed_tokens.weight", "model.norm.weight"}
    assert (
        rename(places, None, "layer_00", config)["model.layers.1.self_attn.q_proj.weight"]
        is places["3.self_attn.q_proj.weight"]
    )
    with pytest.raises(CheckpointError, match=r"layer_02.*is missing between other layers"):
        rename(places, None, "layer_00", config | {"num_hidden_layers": 4})


def test_numbers_of_layers_may_be_far_apart_and_not_without_bound() -> None:
    shapes = {"0.weight": (8, 4), "999999999.weight": (4,)} | {
        f"{number}.self_attn.q_proj.weight": (4, 4) for number in (1, 999_999_998)
    }
    places: dict[str, Any] = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    config = {"model_type": "llama", "num_hidden_layers": 2}
    assert "model.layers.1.self_attn.q_proj.weight" in rename(places, None, "layer_00", config)
    with pytest.raises(CheckpointError, match="outside a layer"):
        rename({f"{'9' * 5000}.weight": None}, None, "zero")  # type: ignore[dict-item]  # not looked at


def test_what_layers_share_is_the_embedding_of_a_known_family() -> None:
    shapes = {"tied_modules.embed.embed_tokens.weight": (8, 4), "1.self_attn.q_proj.weight": (4, 4), "2.weight": (4,)}
    places: dict[str, Any] = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    assert rename(places, None, "zero")["model.embed_tokens.weight"] is places["tied_modules.embed.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="which no layer map names; open the save that it was converted from"):
        rename(places, "map.yaml", "zero")


def test_layers_that_model_parallel_ranks_share_are_refused_by_what_they_are(tmp_path: Path) -> None:
    folder = layer_files(tmp_path, gpt2_layers(), "-model_00")
    layer_files(tmp_path / "other", gpt2_layers(), "-model_01")
    for path in (tmp_path / "other" / TAG).iterdir():
        path.rename(folder / path.name)
    error = refusal(tmp_path)
    assert (error.file, "that 2 model-parallel ranks of a pipeline share" in error.rule) == (
        "layer_00-model_01-model_states.pt",
        True,
    )


def test_layers_that_are_not_known_are_named_by_a_file(tmp_path: Path) -> None:
    layer_files(
        tmp_path / "save",
        {0: {"weight": torch.ones(2, 2)}, 1: {"l.a": torch.ones(3), "b": torch.ones(4)}, 2: {"x": torch.ones(1)}},
    )
    assert "--layer-map" in refusal(tmp_path / "save").rule
    said = tmp_path / "map.yaml"
    said.write_text("0: embed.\n1: {l.: block.0., '': rest.}\n2: null\n")
    with open_checkpoint(tmp_path / "save", given=Given(layer_map=str(said))) as checkpoint:
        assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
            "embed.weight": (2, 2),
            "block.0.a": (3,),
            "rest.b": (4,),
        }


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("0: a\n0: b\n", "names layer 0 twice"),
        ("0: a\n", "does not name layer 1"),
        ("0: a\n1: b\n9: c\n", "names layer 9, which the checkpoint does not have"),
        ("x: a\n", "has the key 'x'"),
        ("0: 3\n", "must be a prefix"),
        ("- a\n", "must be a table"),
        ("{", "neither YAML nor JSON"),
        ("0: ''\n1: ''\n", "gives the name 'weight' to two tensors"),
        ("0: {x: y}\n1: b\n", "has no prefix for 'weight' of layer 0"),
    ],
)
def test_a_map_of_layers_that_does_not_fit_is_refused(tmp_path: Path, text: str, rule: str) -> None:
    (tmp_path / "map.yaml").write_text(text)
    layer_files(tmp_path / "save", {0: {"weight": torch.ones(2, 2)}, 1: {"weight": torch.ones(2)}})
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(tmp_path / "save", given=Given(layer_map=str(tmp_path / "map.yaml")))


def test_what_lies_outside_layers_has_no_name() -> None:
    with pytest.raises(CheckpointError, match="outside a layer"):
        rename({"step": None}, None, "zero")  # type: ignore[dict-item]  # not looked at
