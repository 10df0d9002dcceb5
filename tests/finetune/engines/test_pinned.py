"""When DeepSpeed's memory is pinned exactly."""

from __future__ import annotations

import pytest
import torch

from finetune.config import OffloadConfig
from finetune.engines.zero import pinned
from finetune.engines.zero.pinned import pin_offloaded
from finetune.machine.pinned import CudaDriver


@pytest.mark.parametrize(
    ("offload", "device", "expected"),
    [
        (OffloadConfig(optimizer="cpu"), "cuda", True),
        (OffloadConfig(parameters="cpu"), "cuda", True),
        (OffloadConfig(), "cuda", False),
        (OffloadConfig(optimizer="cpu"), "cpu", False),
    ],
)
def test_memory_is_pinned_by_cuda_where_something_is_offloaded_from_a_gpu(
    offload: OffloadConfig, device: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers: list[object] = []
    monkeypatch.setattr(pinned, "pin_exactly", drivers.append)
    pin_offloaded(offload, torch.device(device))
    assert [type(driver) for driver in drivers] == [CudaDriver] * expected
