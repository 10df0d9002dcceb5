"""Checkpoints cut for tensor-parallel ranks: each rank's file holds its parts, and any number of ranks opens them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint import CheckpointWriter, open_checkpoint, open_structure
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
