"""Quantised folders are refused with what they are, whether their configuration says so or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoint import CheckpointError, open_checkpoint
from tests.checkpoint.folders import CONFIG, plain_folder, raw_safetensors, some_tensors, write_config


def refusal(folder: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught, open_checkpoint(folder):
        pass
    return caught.value


@pytest.mark.parametrize(
    ("values", "method"),
    [
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "by awq"),
        ({"quantization_config": {"load_in_4bit": True}}, "by bitsandbytes"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "by compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "by fp8"),
    ],
)
def test_what_the_configuration_says_is_named(tmp_path: Path, values: dict[str, Any], method: str) -> None:
    plain_folder(tmp_path)
    write_config(tmp_path, CONFIG | values)
    error = refusal(tmp_path)
    assert error.file == "config.json"
    assert method in error.rule


@pytest.mark.parametrize(
    ("name", "dtype", "method"),
    [
        ("h.0.c_fc.qzeros", torch.int32, "GPTQ or AWQ"),
        ("h.0.c_fc.g_idx", torch.int32, "GPTQ"),
        ("h.0.c_fc.weight.quant_state.bitsandbytes__nf4", torch.uint8, "bitsandbytes in 4 bits"),
        ("h.0.c_fc.SCB", torch.float32, "bitsandbytes in 8 bits"),
        ("h.0.c_fc.weight_packed", torch.int32, "compressed-tensors"),
        ("h.0.c_fc.weight_scale_inv", torch.float32, "FP8 by blocks"),
    ],
)
def test_what_only_the_tensors_tell_is_named(tmp_path: Path, name: str, dtype: torch.dtype, method: str) -> None:
    write_config(tmp_path)
    save_file(some_tensors() | {name: torch.ones(4, dtype=dtype)}, tmp_path / "model.safetensors")
    assert f"quantised by {method};" in refusal(tmp_path).rule


def test_eight_bit_floating_point_is_named_with_its_tensor(tmp_path: Path) -> None:
    write_config(tmp_path)
    raw_safetensors(tmp_path / "model.safetensors", {"w": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}, b"ab")
    assert "'w' has dtype 'F8_E4M3', as quantised weights have" in refusal(tmp_path).rule
