"""Checkpoints cut for tensor-parallel ranks: each rank's file holds its parts, and any number of ranks opens them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint import CheckpointError, CheckpointWriter, open_checkpoint, open_structure
from checkpoint.writing.cut_shards import cut_dim
from tests.checkpoint.folders import assert_holds

TENSORS = {
    "model.embed_tokens.weight": (11, 6),
    "model.layers.0.self_attn.q_proj.weight": (8, 6),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.self_attn.o_proj.weight": (6, 8),
    "model.layers.0.input_layernorm.weight": (6,),
    "lm_head.weight": (11, 6),
}


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_cut_for_ranks_opens_whole_and_each_part_lies_in_its_ranks_file(tmp_path: Path, ranks: int) -> None:
    make = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=make) for name, shape in TENSORS.items()}
    with CheckpointWriter(tmp_path, step=5, config={"model_type": "llama"}, ranks=ranks) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    with open_checkpoint(tmp_path, verify="sha256") as checkpoint:
        assert checkpoint.step == 5
        assert_holds(checkpoint, tensors)
        down = "model.layers.0.self_attn.o_proj.weight"
        assert torch.equal(checkpoint.read(down, (slice(None), slice(3, 8))), tensors[down][:, 3:8])
    with open_structure(tmp_path) as structure:
        for name, stored in structure.weights.places.items():
            files = [piece.file for piece in stored.pieces]
            assert len(files) == (1 if "layernorm" in name else ranks), name
            assert files == sorted(set(files))
            offsets = {(piece.file, piece.extent.offset_bytes) for piece in stored.pieces}
            assert len(offsets) == len(files)


def test_headers_take_little_more_than_the_names_call_for(tmp_path: Path) -> None:
    strange = [f'{name} \u00e9\u65e5"\\ {number}' for name in TENSORS for number in range(20)]
    tensors = {name: torch.ones(4, 4) for name in ("model.embed_tokens.weight", *strange)}
    with CheckpointWriter(tmp_path, step=0, config={"model_type": "llama"}, ranks=2, names=list(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    with open_checkpoint(tmp_path) as checkpoint:
        assert_holds(checkpoint, tensors)
    for file in tmp_path.glob("*/shard-*"):
        length = int.from_bytes(file.read_bytes()[:8], "little")
        assert length < 1000 * len(tensors)


def test_more_tensors_than_a_header_has_room_for_are_refused(tmp_path: Path) -> None:
    names = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(100)]
    with CheckpointWriter(tmp_path, step=0, config={"model_type": "llama"}, ranks=2, names=names[:1]) as writer:
        for name in names:
            writer.add(name, torch.ones(4, 4))
        with pytest.raises(CheckpointError, match=r"cannot hold a part of 100 tensors: its header is full"):
            writer.commit()
        writer.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "name", "shape", "dim"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", (4, 8), 1),
        ("llama", "model.layers.0.mlp.up_proj.weight", (8, 4), 0),
        ("gpt2", "transformer.h.0.mlp.c_proj.weight", (8, 4), 0),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", (4, 12), 1),
        ("gpt_neo", "transformer.h.0.mlp.c_proj.weight", (4, 8), 1),
        ("gpt2", "transformer.wpe.weight", (16, 4), None),
        ("gpt2", "transformer.h.0.ln_1.bias", (4,), None),
        ("gpt_neox", "gpt_neox.layers.0.attention.dense.bias", (4,), None),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.bias", (12,), 0),
    ],
)
def test_a_tensor_is_cut_as_its_ranks_share_it(family: str, name: str, shape: tuple[int, ...], dim: int | None) -> None:
    assert cut_dim(family, name, shape) == dim
