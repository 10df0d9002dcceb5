"""What devices do at best, which a run's share of is measured against; and the pace that a run leaves for the next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune.config import ActivationConfig, BatchConfig, LoraConfig, ModelConfig, OffloadConfig, OptimizerConfig
from finetune.forecast import pace
from finetune.forecast.pace import keep_pace, kept_pace, peak_flops
from tests.finetune.forecast.support import config_of


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_a_gpu_s_peak_is_its_own_and_not_that_of_one_whose_name_it_holds(
    name: str, teraflops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: name)
    assert peak_flops("cuda", 4, torch.bfloat16) == (None if teraflops is None else 4 * teraflops * 1e12)


def test_without_a_device_nothing_is_known_and_a_cpu_is_measured_once_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert peak_flops("cuda", 4, torch.bfloat16) is None
    monkeypatch.setattr(pace, "_cpu_peak_flops", {torch.float32: 3e9, torch.bfloat16: 7e9}.__getitem__)
    assert [peak_flops("cpu", 4, dtype) for dtype in (torch.float32, torch.bfloat16)] == [1.2e10, 2.8e10], "in its precision"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_measuring_a_cpu_draws_no_random_number(dtype: torch.dtype) -> None:
    before = torch.get_rng_state()
    assert pace._cpu_peak_flops(dtype, seconds=0.0) > 0, "measured once at least, whatever the machine is busy with"
    assert torch.equal(torch.get_rng_state(), before), "a run's own numbers must not move"


def test_a_pace_is_kept_for_the_same_shape_alone(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert kept_pace(config) is None
    keep_pace(tmp_path, config, step_seconds=0.5, tokens_per_second=100.0)
    kept = kept_pace(config)
    assert kept is not None
    assert kept.step_seconds == 0.5
    assert kept_pace(dataclasses.replace(config, optimizer=OptimizerConfig(lr=1.0))) == kept
    slower: list[dict[str, Any]] = [
        {"batch": BatchConfig(micro=4)},
        {"optimizer": OptimizerConfig(name="muon")},
        {"activations": ActivationConfig(checkpoint="device")},
        {"activations": ActivationConfig(loss_rows=8)},
        {"offload": OffloadConfig(optimizer="cpu", ratio=0.5)},
        {"data": dataclasses.replace(config.data, packing="isolate")},
        {"run": dataclasses.replace(config.run, precision="bf16")},
        {"run": dataclasses.replace(config.run, threads=1)},
    ]
    assert [changes for changes in slower if kept_pace(dataclasses.replace(config, **changes)) is not None] == []
    adapted = dataclasses.replace(config, model=ModelConfig(path="base"), lora=LoraConfig(targets=("query",)))
    keep_pace(tmp_path, adapted, step_seconds=0.25, tokens_per_second=200.0)
    assert kept_pace(adapted) is not None
    assert kept_pace(dataclasses.replace(adapted, lora=None)) is None
