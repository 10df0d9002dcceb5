"""Which back end a CUDA device gets, by what the device says of itself; no device is there."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from serve.errors import ConfigError
from serve.model.attention import TorchBackend
from serve.model.cuda.backend import TritonBackend
from serve.model.cuda.device import device_backend

DEVICE = torch.device("cuda:1")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    told = SimpleNamespace(capability=(9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: told.capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return told


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)])
def test_a_device_that_the_kernels_are_compiled_for_gets_them(device: SimpleNamespace, capability: tuple[int, int]) -> None:
    device.capability = capability
    name, backend = device_backend(DEVICE, torch.bfloat16)
    assert (name, type(backend)) == ("triton", TritonBackend)


def test_an_older_device_gets_plain_torch_and_the_log_says_why(
    device: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    device.capability = (7, 5)
    name, backend = device_backend(DEVICE, torch.float16)
    assert (name, type(backend)) == ("torch", TorchBackend)
    assert "they need compute capability 8.0, and cuda:1 has 7.5" in caplog.text


def test_without_triton_it_is_plain_torch_and_the_log_says_so(
    device: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    assert "Triton is not installed" in caplog.text


def test_fp8_is_refused_by_name_on_a_device_that_cannot_convert_it(device: SimpleNamespace) -> None:
    device.capability = (8, 0)
    with pytest.raises(ConfigError, match=r"cache.kv_cache_dtype is fp8; it needs compute capability 8.9, and cuda:1 has 8.0"):
        device_backend(DEVICE, torch.float8_e4m3fn)
    device.capability = (8, 9)
    assert device_backend(DEVICE, torch.float8_e4m3fn)[0] == "triton"
