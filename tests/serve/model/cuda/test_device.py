"""Which back end a CUDA device gets, by what the device says of itself; no device is there."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import tempfile
from pathlib import Path
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


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Triton keeps kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


@pytest.mark.parametrize(
    ("compiler", "lack"),
    [
        (None, "Triton needs a C compiler, and there is no gcc or clang; CC may name one"),
        ("/nowhere/cc", "Triton needs a C compiler, and there is no /nowhere/cc; CC may name one"),
    ],
)
def test_without_what_triton_compiles_with_it_is_plain_torch_and_the_log_says_so(
    device: SimpleNamespace,
    cache: Path,
    compiler: str | None,
    lack: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    assert lack in caplog.text


def test_without_pythons_headers_or_temporary_files_it_is_plain_torch(
    device: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_writable() -> str:
        raise FileNotFoundError("no usable temporary directory")

    with monkeypatch.context() as patch:
        patch.setattr(sysconfig, "get_paths", lambda scheme: {"include": "/nowhere"})
        assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "gettempdir", none_writable)
        assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    with monkeypatch.context() as patch:
        patch.setenv("CC", "")
        assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    assert "there is no /nowhere/Python.h (apt-get install python3-dev)" in caplog.text
    assert "none can be written; TMPDIR may name one" in caplog.text
    assert "there is no name in CC" in caplog.text


def test_where_triton_cannot_keep_kernels_it_is_plain_torch_and_the_log_says_which_folder(
    device: SimpleNamespace, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("no folder")
    assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    cache.unlink()
    flags = SimpleNamespace(f_flag=os.ST_NOEXEC)
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: flags)
        assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may write everywhere
        assert device_backend(DEVICE, torch.bfloat16)[0] == "torch"
    for lack in ("which cannot be made (File exists)", "from where no code may run (noexec)", "which cannot be written"):
        assert f"Triton keeps its kernels in {cache}, {lack}; TRITON_CACHE_DIR may name another folder" in caplog.text
    assert device_backend(DEVICE, torch.bfloat16)[0] == "triton"


def test_fp8_is_refused_by_name_on_a_device_that_cannot_convert_it(device: SimpleNamespace) -> None:
    device.capability = (8, 0)
    with pytest.raises(ConfigError, match=r"cache.kv_cache_dtype is fp8; it needs compute capability 8.9, and cuda:1 has 8.0"):
        device_backend(DEVICE, torch.float8_e4m3fn)
    device.capability = (8, 9)
    assert device_backend(DEVICE, torch.float8_e4m3fn)[0] == "triton"
