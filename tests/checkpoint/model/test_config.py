"""What ``config.json`` may say: each value that is used is checked when the checkpoint is opened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoint import CheckpointError, open_structure
from checkpoint.model.config import check_config, check_vocabulary
from tests.checkpoint.folders import CONFIG, plain_folder, write_config

NAN, INFINITE, HUGE = float("nan"), float("inf"), 10**18
WRONG: dict[str, tuple[Any, ...]] = {
    "vocab_size": (0, -1, 1.5, "11", None, True, HUGE, [11]),
    "n_positions": (0, -512, HUGE, "many", 512.0, None),
    "n_head": (0, -4, 2.5, {}, None),
    "n_layer": (0, -1, HUGE, "3"),
    "n_inner": (0, -8, "8"),
    "layer_norm_epsilon": (NAN, INFINITE, 0, -1e-5, "1e-5", 10**400, None),
    "resid_pdrop": (NAN, -0.1, 1.1, "0"),
    "initializer_range": (NAN, -1, 10**400),
    "tie_word_embeddings": ("yes", 1),
    "activation_function": (3, "", None),
    "dtype": ("float31", 16, {"": "float32"}),
    "torch_dtype": ("int8",),
    "rope_theta": (NAN, 0, -1.0, INFINITE, "10000", 10**400),
    "rope_parameters": ("none", {"rope_theta": NAN}, {"factor": 0}, {"original_max_position_embeddings": -1}, {"rope_type": 3}),
    "rope_scaling": ([], {"factor": INFINITE}, {"partial_rotary_factor": 2}),
    "partial_rotary_factor": (NAN, -0.5, 1.5),
    "eos_token_id": (-1, "</s>", {"id": 1}, True, 1.0, [1, -1], [[1]], HUGE),
    "bos_token_id": (-2, "<s>", [-2], ["<s>"]),
    "pad_token_id": (-2, {}, [1]),
    "attention_types": (3, [[["global"], HUGE]], [[["global", "odd"], 1]], [["global"]], [[[], 1]]),
}
CASES = [(key, value) for key, values in WRONG.items() for value in values]


@pytest.mark.parametrize(("key", "value"), CASES, ids=lambda item: str(item)[:24])
def test_a_value_that_cannot_be_used_is_refused_by_its_name_when_the_checkpoint_is_opened(
    tmp_path: Path, key: str, value: object
) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, {**CONFIG, key: value})
    with pytest.raises(CheckpointError) as caught:
        open_structure(tmp_path)
    assert caught.value.file == "config.json"
    assert key in caught.value.rule
    assert len(str(caught.value)) < 300


UNSAID = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "initializer_range", "use_cache")


def test_what_older_files_leave_null_has_the_default_of_the_family(tmp_path: Path) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, {**CONFIG, **dict.fromkeys(UNSAID), "n_inner": None})
    with open_structure(tmp_path) as opened:
        assert not opened.config.keys() & set(UNSAID)
        assert opened.config["n_inner"] is None


@pytest.mark.parametrize(
    ("key", "value", "means"),
    [
        ("tie_word_embeddings", None, False),
        ("attn_pdrop", 1.0, 1.0),
        ("bos_token_id", [3, 4], 3),
        ("bos_token_id", [], None),
        ("bos_token_id", [-1], -1),
    ],
)
def test_what_older_libraries_took_is_given_to_that_of_today_as_it_takes_it(
    tmp_path: Path, key: str, value: object, means: object
) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, {**CONFIG, key: value})
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": [1, 2]}))
    with open_structure(tmp_path) as opened:
        assert opened.config[key] == means
        assert opened.generation_config == {"bos_token_id": 1}
        opened.check_model()


@pytest.mark.parametrize("family", ["gpt_neox", "some_other"])
def test_what_says_nothing_of_the_model_reaches_no_library(family: str, tmp_path: Path) -> None:
    """transformers would make ten thousand million labels, and ask the hub for a kernel of that name."""
    plain_folder(tmp_path)
    others = {"num_labels": 10**10, "id2label": {"0": "a"}, "label2id": {"a": 0}, "attn_implementation": "org/kernel"}
    write_config(tmp_path, {**CONFIG, "model_type": family, **others, "_attn_implementation": "org/kernel"})
    with open_structure(tmp_path) as opened:
        assert opened.config.keys() <= CONFIG.keys()


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_type_may_be_spelled_as_torch_prints_it(tmp_path: Path, key: str) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, {**CONFIG, key: "torch.float16"})
    with open_structure(tmp_path) as opened:
        assert opened.config[key] == "float16"


@pytest.mark.parametrize("value", [-1, "</s>", {"id": 1}, [3, "x"]])
def test_ids_of_the_generation_config_are_ids(tmp_path: Path, value: object) -> None:
    plain_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        open_structure(tmp_path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [11, [3, 11]])
def test_an_end_of_text_without_a_row_is_refused_before_a_model_is_made(tmp_path: Path, file: str, ids: object) -> None:
    plain_folder(tmp_path)
    given = CONFIG if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps({**given, "eos_token_id": ids}))
    with (
        open_structure(tmp_path) as opened,
        pytest.raises(CheckpointError, match="10, for vocab_size is 11") as caught,
    ):
        opened.check_model()
    assert caught.value.file == file


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_id_that_only_fills_up_needs_no_row(tmp_path: Path, file: str) -> None:
    plain_folder(tmp_path)
    given = CONFIG if file == "config.json" else {}
    (tmp_path / file).write_text(json.dumps({**given, "pad_token_id": 11}))
    with open_structure(tmp_path) as opened:
        opened.check_model()


def test_a_padding_row_of_the_embedding_must_be_there() -> None:
    with pytest.raises(CheckpointError, match=r"pad_token_id is 11; .* padding row"):
        check_vocabulary({"model_type": "llama", "vocab_size": 11, "pad_token_id": 11}, {})
    check_vocabulary({"model_type": "llama", "vocab_size": 11}, {"pad_token_id": 11})


def test_more_layers_than_tensors_are_refused_before_a_model_is_made(tmp_path: Path) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, {**CONFIG, "n_layer": 6})
    with open_structure(tmp_path) as opened, pytest.raises(CheckpointError, match=r"6 layers; .* has 5 tensors"):
        opened.check_model()


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "divisor of the 4 query heads"),
        ({"num_attention_heads": 4, "hidden_size": 6}, "multiple of the 4 query heads"),
        (
            {"model_type": "falcon", "num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 3},
            "divisor of the 4 query heads",
        ),
        (
            {"model_type": "gemma2", "num_hidden_layers": 3, "layer_types": ["full_attention"]},
            "of 1 layers; num_hidden",
        ),
        ({"model_type": "gpt_oss", "layer_types": ["sideways"]}, "layer_types"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts"),
    ],
)
def test_numbers_that_must_divide_each_other(config: dict[str, Any], rule: str) -> None:
    with pytest.raises(CheckpointError, match=rule):
        check_config({"model_type": "llama"} | config)


def test_what_other_families_mean_by_a_name_is_left_to_them() -> None:
    check_config(
        {"model_type": "openelm", "num_attention_heads": [2, 4], "sliding_window": 0, "head_dim": None, "use_cache": 1}
    )
    with pytest.raises(CheckpointError, match="sliding_window is -1"):
        check_config({"model_type": "openelm", "sliding_window": -1})


def test_json_that_libraries_would_stumble_over_is_refused(tmp_path: Path) -> None:
    plain_folder(tmp_path)
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"inner": deep}
    write_config(tmp_path, {**CONFIG, "extra": deep})
    with pytest.raises(CheckpointError, match="nested more than 64 deep"):
        open_structure(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG)[:-1] + r', "name": "\ud83d"}')
    with pytest.raises(CheckpointError, match="half of a surrogate pair"):
        open_structure(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG)[:-1] + r', "name": "\ud83d\ude42"}')
    open_structure(tmp_path).close()


def test_looking_at_a_checkpoint_needs_neither_torch_nor_what_is_for_text(tmp_path: Path) -> None:
    program = (
        f"import sys, checkpoint; checkpoint.open_structure({str(plain_folder(tmp_path))!r}); "
        "print({'torch', 'tokenizers', 'jinja2'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
