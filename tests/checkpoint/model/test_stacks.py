"""Experts that files have one by one are the stacks of transformers' model; what is no stack is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, Given, open_checkpoint
from tests.checkpoint.readers.test_adapters import adapted
from tests.support.models import build, save

EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"


def test_stacks_are_those_of_the_model_and_little_more_is_read(tmp_path: Path) -> None:
    folder = save("mixtral", tmp_path / "model", with_tokenizer=False, max_shard_size="100KB")
    model, draw = build("mixtral"), random.Random(3)
    with open_checkpoint(folder, stacked=True) as opened:
        state = model.state_dict()
        assert opened.tensors.keys() == state.keys()
        for name, tensor in state.items():
            assert torch.equal(opened.read(name), tensor), name
            starts = [draw.randrange(size) for size in tensor.shape]
            index = tuple(slice(a, draw.randint(a, size) + 1) for a, size in zip(starts, tensor.shape, strict=True))
            before = opened.bytes_read
            assert torch.equal(opened.read(name, index), tensor[index]), name
            assert opened.bytes_read - before <= tensor[index].nbytes
        one_by_one = opened.identity()
    with open_checkpoint(folder) as opened:
        assert opened.identity() == one_by_one, "the same checkpoint, however its tensors are called"
        assert EXPERT.format(0, "w1") in opened.tensors


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (without(EXPERT.format(2, "w3")), r"has no tensor '.*experts\.2\.w3\.weight'"),
        (lambda held: held.update({EXPERT.format(9, "w1"): torch.ones(2, 2)}), "holds an expert 9 of .*num_local_experts is"),
        (lambda held: held.update({EXPERT.format(1, "w2"): torch.ones(2, 2)}), r"expert 1 of '.*down_proj' is F32 \[2, 2\]"),
        (lambda held: held.update({EXPERT.format(1, "w1"): torch.ones(2)}), r"experts\.1\.w1\.weight' is no plain matrix"),
    ],
)
def test_an_expert_that_is_missing_or_of_another_form_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], rule: str, tmp_path: Path
) -> None:
    folder = save("mixtral", tmp_path, with_tokenizer=False)
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rule):
        open_checkpoint(folder, stacked=True)


def test_an_adapter_of_attention_is_joined_with_stacks_beside_it(tmp_path: Path) -> None:
    adapter, want = adapted(tmp_path, lambda: build("mixtral"), target_modules=["q_proj", "o_proj"])
    with open_checkpoint(adapter, given=Given(base=str(tmp_path / "base")), stacked=True) as opened:
        for name in (name for name in opened.tensors if "self_attn" in name):
            torch.testing.assert_close(opened.read(name), want[name], rtol=0, atol=1e-5)
        assert "model.layers.0.mlp.experts.down_proj" in opened.tensors
