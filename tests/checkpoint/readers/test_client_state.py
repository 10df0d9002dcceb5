"""The configuration and tokenizer that a training script keeps in the ``client_state`` of its saves, and what comes first."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from checkpoint import CheckpointError, Given, open_checkpoint
from checkpoint.opening.prove import model_config
from checkpoint.text.tokenizer import read_tokenizer
from tests.checkpoint.readers.deepspeed_folders import (
    CONFIG,
    TAG,
    change,
    gpt2_layers,
    layer_files,
    model_file,
    zero1,
    zero3,
)
from tests.checkpoint.readers.test_pickles import Calls
from tests.support.models import tokenizer

LLAMA = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, dtype=torch.bfloat16
)


def parallel(root: Path) -> Path:
    """A save of two tensor-parallel ranks that does not say how its tensors are cut: names and ``vocab_size`` do."""
    folder = root / TAG
    folder.mkdir(parents=True)
    for rank in range(2):
        module = OrderedDict({"wte.weight": torch.full((8, 4), float(rank)), "ln_f.weight": torch.ones(4)})
        torch.save({"module": module, "mp_world_size": 2, "global_steps": 7}, folder / f"mp_rank_{rank:02d}_model_states.pt")
    return folder


def pipeline(root: Path) -> Path:
    folder = layer_files(root, gpt2_layers() | {4: gpt2_layers()[3]})
    torch.save({"module": None, "global_steps": 7}, folder / "mp_rank_00_model_states.pt")
    return folder


def universal(root: Path) -> Path:
    folder = root / f"{TAG}_universal"
    (folder / "zero" / "wte.weight").mkdir(parents=True)
    torch.save({"param": torch.ones(5, 2)}, folder / "zero" / "wte.weight" / "fp32.pt")
    tree = {"module": OrderedDict({"wte.weight": torch.ones(5, 2)}), "param_shapes": [OrderedDict({"wte.weight": (5, 2)})]}
    torch.save(tree, folder / "mp_rank_00_model_states.pt")
    return folder


SAVES: dict[str, Callable[[Path], Path]] = {
    "ZeRO-3": zero3,
    "ZeRO-1": zero1,
    "AutoTP": parallel,
    "pipeline": pipeline,
    "universal": universal,
}
FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "model_config": lambda config: {"model_config": config},
    "config": lambda config: {"config": config, "epoch": 3},
    "text": lambda config: {"config": json.dumps(config, indent=2)},
    "beside a run's own config": lambda config: {"config": {"lr": 1e-4}, "model_config": config},
}


def save(root: Path, kind: str, state: dict[str, Any]) -> Path:
    """A save without ``config.json``, with a client state in the file of each rank."""
    folder = SAVES[kind](root)
    (root / "config.json").unlink(missing_ok=True)
    for file in folder.glob("*model_states.pt"):
        if not file.name.startswith("layer_"):
            change(file, **state)
    return folder


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return caught.value


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", SAVES)
def test_the_configuration_is_read_from_the_client_state(tmp_path: Path, kind: str, form: str) -> None:
    config = CONFIG | {"vocab_size": 16, "n_layer": 3 if kind == "pipeline" else 1}
    folder = save(tmp_path, kind, FORMS[form](config))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.config == config
        if kind == "AutoTP":  # whose embedding is cut, as nothing but the configuration tells
            assert checkpoint.tensors["wte.weight"].shape == (16, 4)
    assert model_config(folder) == (config, folder)


def test_what_transformers_makes_of_its_own_configuration_is_one(tmp_path: Path) -> None:
    folder = save(tmp_path, "ZeRO-3", {"model_config": LLAMA.to_dict() | {"torch_dtype": torch.bfloat16}})
    with open_checkpoint(folder) as checkpoint:
        config = dict(checkpoint.config)
        assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
        assert LlamaConfig(**config).to_dict() == LLAMA.to_dict()
        assert json.loads(json.dumps(config)) == config


def test_a_folder_s_own_configuration_and_the_one_above_and_a_given_one_come_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "ZeRO-1", {"config": CONFIG | {"vocab_size": 1, "n_layer": "none"}})
    places = [tmp_path / "run" / "config.json", folder / "config.json", tmp_path / "given.json"]
    for number, place in enumerate(places):
        place.write_text(json.dumps(CONFIG | {"vocab_size": 20 + number}))
        given = Given(config=str(place)) if place.name == "given.json" else Given()
        with open_checkpoint(folder, given=given) as checkpoint:
            assert checkpoint.config["vocab_size"] == 20 + number


@pytest.mark.parametrize("state", [{}, {"config": {"lr": 1e-4}}, {"config": "configs/run.yaml"}, {"config": None}], ids=str)
@pytest.mark.parametrize("kind", SAVES)
def test_where_it_was_looked_for_is_told(tmp_path: Path, kind: str, state: dict[str, Any]) -> None:
    folder = save(tmp_path, kind, state)
    if kind == "AutoTP":  # whose parts it would tell to join
        (folder / "mp_rank_01_model_states.pt").unlink()
        change(folder / "mp_rank_00_model_states.pt", mp_world_size=1)
    rule = refusal(folder).rule
    assert "does not say what model it is of (its client_state has no model_type in model_config or config)" in rule
    assert f"there is no {folder / 'config.json'}, {folder.parent / 'config.json'}; give" in rule
    assert rule.endswith("(--model-config)")


def test_a_pipeline_without_the_file_that_has_a_client_state_is_told_so(tmp_path: Path) -> None:
    folder = save(tmp_path, "pipeline", {})
    (folder / "mp_rank_00_model_states.pt").unlink()
    assert "(there is no mp_rank_00_model_states.pt, whose client_state could)" in refusal(folder).rule


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (CONFIG | {"n_layer": -1}, "n_layer is -1; it must be an integer from 1"),
        ({"model_type": 3}, "model_type is 3; it must name the model's family"),
        (CONFIG | {"extra": torch.ones(2)}, "which JSON has no form for"),
        (CONFIG | {"extra": {1.5: 2}}, "1.5 is a key, which JSON has no form for"),
        (CONFIG | {"extra": {1: 2, "1": 3}}, "key '1' is given twice"),
        (CONFIG | {"extra": "\ud800"}, "half of a surrogate pair"),
        (json.dumps(CONFIG)[:-1], "is not valid JSON"),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_broken_one_is_refused_by_file_and_key(tmp_path: Path, value: object, rule: str) -> None:
    folder = save(tmp_path, "ZeRO-1", {"model_config": value})
    error = refusal(folder)
    assert error.file == "mp_rank_00_model_states.pt"
    assert error.rule.startswith("its client_state has a model_config that is no configuration: ")
    assert rule in error.rule


@pytest.mark.parametrize("kind", SAVES)
def test_the_tokenizer_is_read_from_the_client_state(tmp_path: Path, kind: str) -> None:
    text = tokenizer().to_str()
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages[0]['content'] }}"}
    config = CONFIG | {"vocab_size": 16, "n_layer": 3 if kind == "pipeline" else 1}
    folder = save(tmp_path, kind, {"model_config": config, "tokenizer": text, "tokenizer_config": settings})
    with open_checkpoint(folder) as checkpoint:
        read = read_tokenizer(checkpoint.tokenizer, "gpt2")
        assert read is not None
        assert read.encode("Hello, world") == tuple(tokenizer().encode("Hello, world").ids)
        assert read.chat is not None
        assert checkpoint.tokenizer_vocab_size == tokenizer().get_vocab_size()


def test_a_tokenizer_beside_or_above_and_a_given_one_come_first(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", "ZeRO-1", {"config": CONFIG, "tokenizer": tokenizer().to_str()})
    for number, place in enumerate([tmp_path / "run", folder, tmp_path]):
        (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(n): n for n in range(3 + number)}}}))
        given = Given(tokenizer=str(place)) if place == tmp_path else Given()
        with open_checkpoint(folder, given=given) as checkpoint:
            assert checkpoint.tokenizer_vocab_size == 3 + number


@pytest.mark.parametrize("value", ["gpt2", "hf:org/model", None, {"type": "bpe"}], ids=str)
def test_another_thing_that_is_called_tokenizer_is_none(tmp_path: Path, value: object) -> None:
    folder = save(tmp_path, "ZeRO-1", {"config": CONFIG, "tokenizer": value})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tokenizer_vocab_size is None


@pytest.mark.parametrize(
    ("value", "settings", "rule"),
    [
        (tokenizer().to_str()[:-5], None, "is not valid JSON"),
        (tokenizer().to_str(), "{", "is not valid JSON"),
        (tokenizer().to_str(), {"eos_token": torch.ones(2)}, "which JSON has no form for"),
    ],
    ids=["cut short", "settings cut short", "settings with a tensor"],
)
def test_a_broken_tokenizer_is_refused_by_file_and_key(tmp_path: Path, value: str, settings: object, rule: str) -> None:
    folder = save(tmp_path, "ZeRO-1", {"config": CONFIG, "tokenizer": value, "tokenizer_config": settings})
    error = refusal(folder)
    assert error.file == "mp_rank_00_model_states.pt"
    assert error.rule.startswith("its client_state has a tokenizer that cannot be read: ")
    assert rule in error.rule


@pytest.mark.parametrize("kind", ["an object of transformers", "a call"])
def test_an_object_is_refused_and_nothing_runs(tmp_path: Path, kind: str) -> None:
    value = LLAMA if kind == "an object of transformers" else Calls(os.mkdir, str(tmp_path / "made"))
    folder = zero3(tmp_path)
    torch.save(torch.load(model_file(folder, 0)) | {"config": value}, model_file(folder, 0))
    assert "only tables of tensors are read, so this is refused" in refusal(folder).rule
    assert not (tmp_path / "made").exists()
