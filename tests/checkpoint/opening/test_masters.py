"""Master weights are read where they are asked for, or it is said that there are none: never the 16-bit weights instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import CheckpointError, Given, open_checkpoint
from tests.checkpoint.folders import CONFIG, plain_folder, write_config
from tests.checkpoint.readers import deepspeed_folders as deepspeed
from tests.checkpoint.readers.deepspeed_folders import gpt2_layers, layer_files
from tests.checkpoint.readers.test_hostile import tensor_parallel, tiny, universal
from tests.support import megatron, neox

MASTERS = Given(master_weights=True)


def pipeline(root: Path, dtype: torch.dtype) -> None:
    layers = {number: {name: tensor.to(dtype) for name, tensor in table.items()} for number, table in gpt2_layers().items()}
    layer_files(root, layers)
    write_config(root, CONFIG | {"n_layer": 2})


def autotp(root: Path, dtype: torch.dtype) -> None:
    tensor_parallel(root, told=False)
    for path in root.rglob("mp_rank_*"):
        tree = torch.load(path)
        torch.save(tree | {"module": {name: tensor.to(dtype) for name, tensor in tree["module"].items()}}, path)


def gpt_neox(root: Path, dtype: torch.dtype) -> None:
    neox.save_neox(root, tiny("gpt_neox").to(dtype), neox.Form(model_parallel=2))


def megatron_lm(root: Path, dtype: torch.dtype) -> None:
    megatron.save_megatron(root, tiny("llama").to(dtype), megatron.Form(tensor=2))


def hugging_face(root: Path, dtype: torch.dtype) -> None:
    plain_folder(root, {"transformer.wte.weight": torch.ones(11, 6, dtype=dtype)})


@pytest.mark.parametrize("make", [pipeline, autotp, gpt_neox, megatron_lm, hugging_face])
def test_a_layout_without_masters_is_refused_by_name_and_one_in_fp32_is_its_own_master(
    make: Callable[[Path, torch.dtype], Any], tmp_path: Path
) -> None:
    make(tmp_path / "half", torch.bfloat16)
    with open_checkpoint(tmp_path / "half") as checkpoint:
        layout = checkpoint.layout
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "half", given=MASTERS)
    assert f"of this layout ({layout}) no fp32 master weights are read" in caught.value.rule
    assert "--master-weights" in caught.value.rule
    make(tmp_path / "float", torch.float32)
    with open_checkpoint(tmp_path / "float", given=MASTERS) as checkpoint:
        assert {info.dtype for info in checkpoint.tensors.values()} == {torch.float32}


@pytest.mark.parametrize(
    "make",
    [deepspeed.zero3, deepspeed.zero1, lambda root: universal(root, stage=2), lambda root: universal(root, stage=3)],
    ids=["zero3", "zero1", "universal2", "universal3"],
)
def test_where_there_are_masters_they_are_what_is_read(make: Callable[[Path], Any], tmp_path: Path) -> None:
    make(tmp_path)
    with open_checkpoint(tmp_path, given=MASTERS) as checkpoint:
        for name in (name for group in deepspeed.GROUPS for name in group):
            assert torch.equal(checkpoint.read(name), deepspeed.tensors()[name]), name
