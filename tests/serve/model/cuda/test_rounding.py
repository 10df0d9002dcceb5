"""Interpreted kernels round as torch does: every number of the smaller types, and what lies between those of bf16."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.serve.model.cuda.rounding import as_devices_round

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}


def left_alone(*_: Any) -> Any:
    raise AssertionError("none of these conversions is the interpreter's own")


def converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    data = x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()
    given, wanted = (SimpleNamespace(name=NAMES[each]) for each in (x.dtype, dtype))
    return torch.from_numpy(as_devices_round(left_alone)(data, given, wanted, None)).view(dtype)


def every(dtype: torch.dtype) -> Tensor:
    """Each number of a type of two bytes, infinities and what is no number among them."""
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(dtype)


def around_bf16() -> Tensor:
    """fp32: every number of bf16, what is a bit beside it, halfway to the next one, and a bit beside that."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    return torch.from_numpy((upper[:, None] | lower).reshape(-1).view(np.float32))


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found.float().isnan(), expected.float().isnan())
    held = ~expected.float().isnan()
    assert torch.equal(found[held].float(), expected[held].float())
    assert torch.equal(found[held].float().signbit(), expected[held].float().signbit())


def test_fp32_becomes_bf16() -> None:
    numbers = around_bf16()
    assert_same(converted(numbers, torch.bfloat16), numbers.bfloat16())


def test_bf16_becomes_fp32() -> None:
    assert_same(converted(every(torch.bfloat16), torch.float32), every(torch.bfloat16).float())


@pytest.mark.parametrize("numbers", [around_bf16(), every(torch.bfloat16), every(torch.float16)], ids=["fp32", "bf16", "fp16"])
def test_all_become_fp8_and_what_is_beyond_its_largest_becomes_that(numbers: Tensor) -> None:
    expected = numbers.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    assert_same(converted(numbers, torch.float8_e4m3fn), expected)


def test_numbers_that_do_not_lie_side_by_side() -> None:
    numbers = torch.randn(6, 10)
    data = numbers.numpy()[::2, ::3]
    assert not data.flags.c_contiguous
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        assert_same(converted(torch.from_numpy(data), dtype), numbers[::2, ::3].to(dtype))
