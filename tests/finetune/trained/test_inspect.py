"""``inspect``: what a checkpoint is and what is wrong with it, with or without a configuration."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from finetune.cli import main
from finetune.trained import inspect as inspecting

WTE = "transformer.wte.weight"


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(["inspect", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    numbers = torch.randn(11, 6, generator=torch.Generator().manual_seed(0))
    numbers[2] = 0.0
    numbers[3, 1], numbers[4, 2] = math.nan, math.inf
    save_file({WTE: numbers, "transformer.h.0.ln_1.bias": torch.ones(6).bfloat16()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "vocab_size": 11}')
    return tmp_path


def test_it_tells_format_sizes_and_types_by_headers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, str(folder))
    assert (found["format"], found["model_type"], found["step"]) == ("Hugging Face", "gpt2", None)
    assert (found["tensors"], found["parameters"], found["bytes"]) == (2, 72, 66 * 4 + 12)
    assert found["dtypes"] == {"F32": 66, "BF16": 6}
    assert found["problems"] == []


def test_what_is_stored_once_under_two_names_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tied = torch.zeros(5, 4)
    torch.save({WTE: tied, "lm_head.weight": tied, "other": torch.zeros(3)}, tmp_path / "pytorch_model.bin")
    found = told(capsys, str(tmp_path), code=1)  # for there is no configuration
    assert (found["tensors"], found["parameters"], found["bytes"]) == (3, 23, 23 * 4)
    assert found["dtypes"] == {"F32": 23}


def test_it_counts_what_tensors_hold_in_parts(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspecting, "_PART_BYTES", 50)  # two rows
    (held,) = (found := told(capsys, str(folder), "--tensors", "*.wte.*", code=1))["held"]
    from safetensors.torch import load_file

    numbers = load_file(folder / "model.safetensors")[WTE].double()
    finite = numbers[numbers.isfinite()]
    assert held["mean"] == pytest.approx(float(finite.mean()))
    assert held["deviation"] == pytest.approx(float(finite.std(correction=0)))
    assert (held["zeros"], held["nan"], held["infinite"]) == (pytest.approx(6 / 66), 1, 1)
    assert "1 NaN and 1 infinite" in found["problems"][0]
    assert main(["inspect", str(folder), "--tensors", "nothing*"]) == 2


def test_a_layout_without_a_configuration_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        dcp.save({WTE: torch.ones(4, 2), "step": 3}, checkpoint_id=tmp_path / "step-3", no_dist=True)
    found = told(capsys, str(tmp_path), code=1)
    assert (found["format"], found["step"], found["parameters"]) == ("torch.distributed.checkpoint", 3, 8)
    assert found["facts"]["other items"] == 1
    assert "--model-config" in found["problems"][0]
    assert main(["inspect", str(tmp_path)]) == 1
    assert "no configuration found" in capsys.readouterr().out


def test_what_is_wrong_is_told_with_what_can_be_seen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 40}')
    assert "40 layers" in told(capsys, str(folder), code=1)["problems"][0]
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "cut short" in told(capsys, str(folder), code=1)["problems"][0]
