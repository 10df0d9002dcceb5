"""GPT-NeoX's checkpoints: every slice of every tensor is the model's, in each form; what cannot be read is refused."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from checkpoint import Checkpoint, CheckpointError, Given, open_checkpoint, open_structure
from checkpoint.layout import cover_fault
from checkpoint.opening.recognise import recognise
from checkpoint.readers.neox import folders
from tests.support.models import build, tokenizer
from tests.support.neox import Form, save_neox

TOKENS = tokenizer().get_vocab_size()

FORMS = {
    "a pipeline": ("gpt_neox", {}, {}),
    "a sequential residual": ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}, {}),
    "the older names": ("gpt_neox", {}, {"generation": "dense_h_to_4h"}),
    "no pipeline": ("gpt_neox", {}, {"pipeline": False}),
    "a head cut by its input": ("gpt_neox", {}, {"head": "row"}),
    "a head cut by its input, no pipeline": ("llama", {"num_key_value_heads": 4}, {"head": "row", "pipeline": False}),
    "learned positions": ("gpt2", {"activation_function": "gelu"}, {}),
    "heads that share keys": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, {}),
    "heads that share keys, before": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 4}, {"qkv": "per-head"}),
    "heads with keys of their own": ("llama", {"num_key_value_heads": 4}, {"generation": "w1"}),
    "biases": ("llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}, {}),
    "a sliding window": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 4}, {}),
}
"""Family, what its model has, how it is laid out."""


def small(family: str, **changes: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2} if family != "gpt2" else {"n_embd": 32, "n_layer": 2}
    model = build(family, **{"vocab_size": TOKENS, **sizes, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.copy_((torch.randn(parameter.shape) * 16).round() / 64 + 1)  # so that averages are exact
    return model


def saved(root: Path, name: str = "a pipeline", parallel: int = 2, **settings: Any) -> tuple[PreTrainedModel, Path]:
    family, changes, form = FORMS[name]
    model = small(family, **changes)
    return model, save_neox(root, model, Form(model_parallel=parallel, **form), **settings)


def with_tokenizer(root: Path) -> dict[str, str]:
    """Write the tokenizer beside the checkpoint under a name of its own; returns the settings that name it."""
    root.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(root / "20B_tokenizer.json"))
    return {"tokenizer-type": "HFTokenizer", "vocab-file": "/data/elsewhere/20B_tokenizer.json"}


def assert_holds(checkpoint: Checkpoint, model: PreTrainedModel) -> None:
    state = model.state_dict()
    left_out = ("lm_head.weight",) if model.config.tie_word_embeddings else ()
    assert set(checkpoint.tensors) == {name for name in state if name not in left_out}
    draw = random.Random(5)
    for name, info in checkpoint.tensors.items():
        assert torch.equal(checkpoint.read(name), state[name]), name
        starts = [draw.randrange(size) for size in info.shape]
        index = tuple(slice(start, draw.randint(start, size) + 1) for start, size in zip(starts, info.shape, strict=True))
        assert torch.equal(checkpoint.read(name, index), state[name][index]), name


def assert_model(config: Mapping[str, Any], model: PreTrainedModel) -> None:
    """With the same weights, the model of ``config`` computes what ``model`` does."""
    again = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**config), dtype=torch.float32).eval()
    again.load_state_dict(model.state_dict())
    ids = torch.arange(64).reshape(1, 64) * 7 % 300
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("parallel", [1, 2, 4])
@pytest.mark.parametrize("name", FORMS)
def test_every_tensor_and_slice_is_that_of_the_model(name: str, parallel: int, tmp_path: Path) -> None:
    model, _ = saved(tmp_path, name, parallel, **with_tokenizer(tmp_path))
    given = Given(neox_qkv_layout=FORMS[name][2].get("qkv", "blocks"))
    with open_checkpoint(tmp_path, given=given) as checkpoint:
        assert_holds(checkpoint, model)
        assert checkpoint.layout == "GPT-NeoX"
        assert checkpoint.step == 40
        config = checkpoint.config
    with open_structure(tmp_path, given=given) as structure:
        assert [cover_fault(stored) for stored in structure.weights.places.values()] == [None] * len(structure.weights.places)
        assert structure.tokenizer.has("tokenizer.json")
    assert_model(config, model)
    assert config["eos_token_id"] == 0


def test_without_a_tokenizer_no_row_is_left_out(tmp_path: Path) -> None:
    saved(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config["vocab_size"] == 352
        assert checkpoint.tensors["gpt_neox.embed_in.weight"].shape == (352, 32)
        assert checkpoint.config["eos_token_id"] is None


@pytest.mark.parametrize(("name", "stages"), [("a pipeline", 1), ("no pipeline", 0)])
def test_both_sizes_of_the_training_are_told(name: str, stages: int, tmp_path: Path) -> None:
    saved(tmp_path, name)
    with open_structure(tmp_path) as structure:
        facts = structure.weights.facts
    assert (facts["model_parallel_size"], facts["pipe_parallel_size"]) == (2, stages)


def test_of_a_run_whose_names_are_of_an_earlier_time_it_is_told_where_epsilon_was_added(tmp_path: Path) -> None:
    for name, told in (("heads with keys of their own", True), ("heads that share keys", False)):
        saved(tmp_path / name, name)
        with open_structure(tmp_path / name) as structure:
            assert ("rms_norm_epsilon" in structure.weights.facts) is told


@pytest.mark.parametrize("name", ["a pipeline", "no pipeline"])
def test_it_is_known_without_its_settings(name: str, tmp_path: Path) -> None:
    _, folder = saved(tmp_path, name)
    shutil.rmtree(folder / "configs")
    assert recognise(tmp_path)[1] is folders


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_of_frequencies_that_were_rounded_with_the_model_it_is_told(dtype: torch.dtype, tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    for file in folder.glob("layer_02-*"):
        held = torch.load(file)
        torch.save({**held, "attention.rotary_emb.inv_freq": torch.ones(2, dtype=dtype)}, file)
    with open_structure(tmp_path) as structure:
        assert ("rotary_frequencies" in structure.weights.facts) is (dtype == torch.float16)


def test_the_fused_activation_and_the_dropouts_of_the_settings_are_taken_over(tmp_path: Path) -> None:
    saved(tmp_path, **{"bias-gelu-fusion": True, "hidden-dropout": 0.1, "attention-dropout": 0, "layernorm_epsilon": "1e-6"})
    with open_checkpoint(tmp_path) as checkpoint:
        taken = {key: checkpoint.config[key] for key in ("hidden_act", "hidden_dropout", "attention_dropout", "layer_norm_eps")}
    assert list(taken.values()) == ["gelu_fast", 0.1, 0.0, 1e-6]


def test_a_rank_reads_its_own_part_and_little_besides(tmp_path: Path) -> None:
    saved(tmp_path, "heads that share keys", 4)
    shard = 0
    with open_checkpoint(tmp_path) as checkpoint:
        for name, info in checkpoint.tensors.items():
            dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
            size = info.shape[dim] // 2 if len(info.shape) == 2 else info.shape[dim]
            shard += checkpoint.read(name, (slice(None),) * dim + (slice(0, size),)).nbytes
        norms = sum(info.shape[0] * 4 for info in checkpoint.tensors.values() if len(info.shape) == 1)
        assert checkpoint.bytes_read == shard + 3 * norms  # norms are averages of four ranks


def test_a_given_configuration_says_how_many_rows_there_are(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    model.config.save_pretrained(tmp_path / "beside")
    for path in (folder / "configs").iterdir():
        path.unlink()
    with open_checkpoint(folder, given=Given(config=str(tmp_path / "beside"))) as checkpoint:
        assert_holds(checkpoint, model)
    with pytest.raises(CheckpointError, match=r"layer_00-model_00-model_states.pt: there is no configs/ .*--model-config"):
        open_structure(folder)


@pytest.mark.parametrize("where", ["beside the weights", "above them", "given"])
def test_a_vocabulary_and_its_merges_are_found_by_the_names_the_settings_give(where: str, tmp_path: Path) -> None:
    model = json.loads(tokenizer().to_str())["model"]
    named = {"tokenizer-type": "GPT2BPETokenizer", "vocab-file": "/x/gpt2-vocab.json", "merge-file": "/x/gpt2-merges.txt"}
    _, folder = saved(tmp_path, **named)
    place = {"beside the weights": folder, "above them": tmp_path, "given": tmp_path / "other"}[where]
    place.mkdir(exist_ok=True)
    (place / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    (place / "gpt2-merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(merge) + "\n" for merge in model["merges"]))
    from checkpoint.text.tokenizer import read_tokenizer

    given = Given(tokenizer=str(place / "gpt2-vocab.json")) if where == "given" else Given()
    with open_structure(tmp_path, given=given) as structure:
        found = read_tokenizer(structure.tokenizer)
        assert structure.config["vocab_size"] == TOKENS
    assert found is not None
    text = "the lazy dog<|endoftext|>"
    assert list(found.encode(text)) == tokenizer().encode(text).ids
    assert found.end_of_text_id == 0


@pytest.mark.parametrize(
    "settings", [{"opt_pos_emb_offset": 2}, {"sequence_parallel": True}, {"te_rowparallel": True, "gpt-j-residual": False}]
)
def test_what_one_rank_or_another_residual_trains_right_is_opened(settings: dict[str, Any], tmp_path: Path) -> None:
    for parallel, more in ((1, {}), (2, {"gpt-j-residual": "te_rowparallel" not in settings})):
        saved(tmp_path / str(parallel), parallel=parallel, **settings | more)
        open_structure(tmp_path / str(parallel)).close()


@pytest.mark.parametrize(
    ("settings", "family"),
    [
        ({"attention-config": [[["flash"], "all"]], "pipe_parallel_size": 0}, "mistral"),
        ({"attention-config": [[["global"], "all"]], "pipe_parallel_size": 1}, "mistral"),
        ({"attention-config": [[["flash", "global"], 1]], "pipe_parallel_size": 1}, "mistral"),
        ({"attention-config": None, "pipe_parallel_size": 0}, "llama"),
        ({"attention-config": [[["global"], "all"]], "pipe_parallel_size": None}, "llama"),
        ({"scaled-upper-triang-masked-softmax-fusion": True, "attention-config": None}, "mistral"),
    ],
)
def test_a_window_is_that_of_the_attention_which_has_it(settings: dict[str, Any], family: str, tmp_path: Path) -> None:
    model, _ = saved(tmp_path, "a sliding window", **settings)
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config["model_type"] == family
        assert checkpoint.config.get("sliding_window") == (model.config.sliding_window if family == "mistral" else None)
        assert set(checkpoint.tensors) == set(model.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"attention-config": [[["flash", "global"], 1]], "pipe_parallel_size": 0},
            "sliding_window_width is .* without a pipeline",
        ),
        *(
            (
                {"attention-config": None, "scaled-upper-triang-masked-softmax-fusion": True, **bits},
                "scaled_upper_triang_masked_softmax_fusion is True; with a sliding window",
            )
            for bits in ({"fp16": {"enabled": True}}, {"precision": "bfloat16"})
        ),
    ],
)
def test_a_window_that_only_some_of_the_attention_has_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, "a sliding window", **settings)
    with pytest.raises(CheckpointError, match=message):
        open_structure(tmp_path)


def test_a_norm_that_attention_and_the_mlp_share_is_in_both_places(tmp_path: Path) -> None:
    model, _ = saved(tmp_path, gpt_j_tied=True, **with_tokenizer(tmp_path))
    for layer in model.gpt_neox.layers:
        layer.post_attention_layernorm.load_state_dict(layer.input_layernorm.state_dict())
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)


@pytest.mark.parametrize(("name", "norm"), [("a pipeline", "te_layernorm"), ("biases", "te_rmsnorm")])
def test_norms_of_transformer_engine_are_those_of_the_model(name: str, norm: str, tmp_path: Path) -> None:
    model, folder = saved(tmp_path, name, norm=norm, num_unique_layers=1, **with_tokenizer(tmp_path))
    for file in folder.glob("layer_*"):
        inside = {
            re.sub(
                r"(layernorm|^norm)\.(weight|scale|bias)",
                lambda found: f"{found[1]}.norm.{found[2].replace('scale', 'weight')}",
                key,
            ): value
            for key, value in torch.load(file).items()
        }
        torch.save(inside, file)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, model)


def test_a_file_a_tensor_or_a_form_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    one, other = folder / "layer_02-model_00-model_states.pt", folder / "layer_02-model_01-model_states.pt"
    table = torch.load(other)
    for change, message in (
        ({"mlp.router.weight": torch.ones(2)}, "holds tensor 'mlp.router.weight', which layer_02-model_00"),
        ({"attention.query_key_value.weight": torch.ones(6, 32)}, "attention.query_key_value: has 6 rows"),
        ({"mlp.linear2.weight": torch.ones(32, 3).half()}, "'mlp.linear2.weight' has another data type"),
        ({"input_layernorm.weight": torch.ones(31)}, "input_layernorm"),
    ):
        torch.save(table | change, other)
        with pytest.raises(CheckpointError, match=message):
            open_structure(tmp_path)
    torch.save(table, other)
    open_structure(tmp_path).close()
    other.unlink()
    with pytest.raises(CheckpointError, match=r"layer_02-model_01-model_states\.pt: is missing"):
        open_structure(tmp_path)
    torch.save({"x": torch.ones(2)}, other)
    with pytest.raises(CheckpointError, match=r"which layer_02-model_01-model_states\.pt does not have"):
        open_structure(tmp_path)
    for path in (one, other):
        path.unlink()
    with pytest.raises(CheckpointError, match="layer 2 is missing"):
        open_structure(tmp_path)


@pytest.mark.parametrize("key", ["global_steps", "iteration"])
def test_ranks_of_two_saves_are_refused(key: str, tmp_path: Path) -> None:
    _, folder = saved(tmp_path, "no pipeline")
    for step, file in ((3, "mp_rank_00_model_states.pt"), (4, "mp_rank_01_model_states.pt")):
        held = torch.load(folder / file, weights_only=False)
        torch.save({name: value for name, value in held.items() if "step" not in name} | {key: step}, folder / file)
    with pytest.raises(CheckpointError, match=r"mp_rank_01.*: is of step 4, mp_rank_00.* of step 3: two saves lie in one"):
        open_structure(tmp_path)


class Runs:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_nothing_of_a_rank_file_runs_and_no_link_leaves_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = saved(tmp_path, "no pipeline", 1)
    held = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    torch.save(held | {"extra": Runs()}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"names __builtin__.print|names builtins.print"):
        open_structure(tmp_path)
    torch.save(held, tmp_path / "outside.pt")
    (folder / "mp_rank_00_model_states.pt").unlink()
    (folder / "mp_rank_00_model_states.pt").symlink_to(tmp_path / "outside.pt")
    with pytest.raises(CheckpointError, match="is a link that leaves"):
        open_structure(tmp_path)
    assert capsys.readouterr().out == ""
