"""Saves of a model with an adapter in it that left the frozen base out: joined with the base that their description names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from checkpoint import pinned
from checkpoint.given import Given
from tests.checkpoint.readers.test_adapters import LINEAR, changed, gpt2, llama, opened, refusal
from tests.support.descriptors import descriptors

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


def saved(
    folder: Path, make: Callable[[], PreTrainedModel], *, wrapper: str = "", whole: bool = False, **settings: Any
) -> torch.Tensor:
    """A base, and a save of the trained model in a file of the same name; the logits of the model that was trained.

    Args:
        wrapper: what stands before all names of the save.
        whole: the base is in the save, too.
    """
    torch.manual_seed(0)
    base = make().float()
    base.save_pretrained(folder / "base")
    config = LoraConfig(r=4, lora_alpha=6, **settings)
    model = get_peft_model(base, config).eval()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    (folder / "save").mkdir()
    kept = {name: p for name, p in model.named_parameters() if p.requires_grad or whole}  # each that is shared once
    save_file({wrapper + name: p.detach().contiguous() for name, p in kept.items()}, folder / "save" / "model.safetensors")
    config.save_pretrained(str(folder / "save"))
    changed(folder / "save", base_model_name_or_path=str(folder / "base"))
    if whole:
        (folder / "save" / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(40).view(2, -1)).logits
    return logits


BIASED = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


@pytest.mark.parametrize("wrapper", ["", "model.", "_forward_module.model."])
@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (llama, {"target_modules": LINEAR, "modules_to_save": ["lm_head"]}),
        (partial(llama, tied=True), {"target_modules": [*LINEAR, "embed_tokens"]}),
        (partial(llama, tied=True), {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]}),
        (gpt2, {**BIASED, "bias": "all"}),
        (gpt2, {**BIASED, "bias": "lora_only"}),
    ],
    ids=["head", "tied", "both of a tied", "all biases", "biases beside factors"],
)
def test_a_save_of_an_adapter_alone_is_what_was_trained(
    make: Callable[[], PreTrainedModel], settings: dict[str, Any], wrapper: str, tmp_path: Path
) -> None:
    """Both folders have a file of one name, of other lengths and contents."""
    want = saved(tmp_path, make, wrapper=wrapper, **settings)
    before = descriptors()
    for given in ({}, {"prefix": wrapper} if wrapper else {}):
        assert (opened(tmp_path / "save", **given)[0] - want).abs().max() < 1e-5
    assert descriptors() <= before


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["lm_head"]},
        {"target_modules": ["lm_head", "embed_tokens"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_save_that_keeps_a_tied_weight_once_has_it_for_both(settings: dict[str, Any], tmp_path: Path) -> None:
    want = saved(tmp_path, partial(llama, tied=True), whole=True, **settings)
    shutil.rmtree(tmp_path / "base")
    got, config = opened(tmp_path / "save")
    assert (got - want).abs().max() < 1e-5
    assert config["tie_word_embeddings"] is False


def test_masters_are_asked_of_the_save_and_not_of_its_base(tmp_path: Path) -> None:
    saved(tmp_path, llama, target_modules=LINEAR)
    base, save = (tmp_path / name / "model.safetensors" for name in ("base", "save"))
    save_file({name: tensor.bfloat16() for name, tensor in load_file(base).items()}, base)
    opened(tmp_path / "save", master_weights=True)
    save_file({name: tensor.bfloat16() for name, tensor in load_file(save).items()}, save)
    assert "no fp32 master weights are read" in refusal(tmp_path / "save", master_weights=True).rule


def test_of_another_vocabulary_than_the_base_has_the_save_lacks_rows(tmp_path: Path) -> None:
    want = saved(tmp_path, llama, target_modules=LINEAR)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    beside = tmp_path / "save" / "config.json"
    beside.write_text(json.dumps(config))
    assert (opened(tmp_path / "save")[0] - want).abs().max() < 1e-5
    beside.write_text(json.dumps(config | {"vocab_size": 44}))
    before = descriptors()
    error = refusal(tmp_path / "save")
    assert (error.file, error.rule.partition(":")[0]) == (
        "config.json",
        "vocab_size is 44; the base model has 40, and the save lacks the resized one's rows",
    )
    assert descriptors() <= before


@pytest.mark.parametrize("given", [False, True])
def test_a_save_that_is_its_own_base_is_refused(given: bool, tmp_path: Path) -> None:
    saved(tmp_path, llama, target_modules=LINEAR)
    save = tmp_path / "save"
    changed(save, base_model_name_or_path=None if given else str(save))
    before = descriptors()
    error = refusal(save, base=str(save)) if given else refusal(save)
    assert "an adapter's base model must be a whole one" in error.rule
    assert descriptors() <= before
    assert pinned(save, Given(base=str(tmp_path / "base"))).base == str((tmp_path / "base").resolve())
