"""Experts of GPT-OSS in numbers of four bits are read as what transformers decodes them to, slice by slice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import CheckpointError, open_checkpoint
from tests.support.models import save
from tests.support.mxfp4 import in_four_bits

UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = save("gpt_oss", tmp_path / "made", with_tokenizer=False, intermediate_size=96, num_hidden_layers=1)
    in_four_bits(made, tmp_path / "decoded")
    return made


def test_what_is_read_is_what_transformers_decodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = load_file(folder.parent / "decoded" / "model.safetensors")
    monkeypatch.setattr("checkpoint.opening.slices.CHUNK_BYTES", 1 << 14)  # several blocks for each expert
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        assert "quantization_config" not in checkpoint.config
        for name, tensor in expected.items():
            assert checkpoint.tensors[name].shape == tensor.shape
            assert torch.equal(checkpoint.read(name), tensor)
        for name in (UP, DOWN):
            for index in (
                (slice(1, 3), slice(5, 41)),
                (slice(4, 5), slice(32, 64), slice(7, 60)),
                (slice(0, 5), slice(63, 64)),
            ):
                assert torch.equal(checkpoint.read(name, index, dtype=torch.float32), expected[name][index].float())
        before = checkpoint.bytes_read
        checkpoint.read(DOWN, (slice(0, 1), slice(33, 60)))
        assert checkpoint.bytes_read - before == 64 * (16 + 1), "one group of thirty-two for each of 64 outputs, and its scale"


def test_numbers_without_their_scales_are_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    scales = stored.pop(UP + "_scales")
    for changed, rule in (({}, "without the"), ({UP + "_scales": scales[:, :-1]}, "a scale for each group")):
        save_file(stored | {name: part.contiguous() for name, part in changed.items()}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rule), open_checkpoint(folder):
            pass


def test_numbers_beside_what_they_decode_to_are_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file(stored | {UP: torch.zeros(5, 64, 192)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="beside the"), open_checkpoint(folder):
        pass
