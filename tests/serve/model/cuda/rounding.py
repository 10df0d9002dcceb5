"""The conversions of Triton's interpreter, rounded as devices round them: to nearest, half to even."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_UPPER: Final = np.uint32(16)
"""bf16 is the upper half of fp32."""
_FP8_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max


class Named(Protocol):
    """A type of Triton's language."""

    name: str


Convert = Callable[[NDArray[Any], Named, Named, Any], NDArray[Any]]
"""The interpreter's ``_convert_float``: numbers, their type, the wanted one, how to round. bf16 is in uint16, fp8 in uint8."""


def as_devices_round(convert: Convert) -> Convert:
    """Convert between fp32 and bf16, and to fp8 (e4m3, which holds nothing beyond 448), as devices do it; all else as before.

    The interpreter of Triton 3.6 and 3.7 cuts off what bf16 does not hold, and loses what is carried when it rounds to fp8.
    """

    def converted(data: NDArray[Any], given: Named, wanted: Named, rounding_mode: Any) -> NDArray[Any]:
        if wanted.name == "fp8e4nv" and given.name in ("fp32", "fp16", "bf16"):
            return _to_fp8(_from_bf16(data) if given.name == "bf16" else data)
        if rounding_mode is None and (given.name, wanted.name) == ("bf16", "fp32"):
            return _from_bf16(data)
        if rounding_mode is None and (given.name, wanted.name) == ("fp32", "bf16"):
            return _to_bf16(data)
        return convert(data, given, wanted, rounding_mode)

    return converted


def _from_bf16(data: NDArray[Any]) -> NDArray[Any]:
    return np.left_shift(data, _UPPER, dtype=np.uint32).view(np.float32)


def _to_bf16(data: NDArray[Any]) -> NDArray[Any]:
    bits = np.ascontiguousarray(data).view(np.uint32)
    upper = bits >> _UPPER
    rounded = (bits + (upper & np.uint32(1)) + np.uint32(0x7FFF)) >> _UPPER
    if (nan := (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)).any():  # which would become an infinity, or a zero
        rounded = np.where(nan, upper | np.uint32(0x40), rounded)
    return rounded.astype(np.uint16)


def _to_fp8(data: NDArray[Any]) -> NDArray[Any]:
    held = torch.from_numpy(data.astype(np.float32)).clamp(-_FP8_LARGEST, _FP8_LARGEST)  # leaves what is no number
    return held.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
