"""Layers as a GPU computes them, on the CPU: sums and norms found together, by plain torch in the place of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast
from unittest import mock

from torch import Tensor, nn

from serve.model.cuda import layers, residuals
from serve.model.cuda.device import launch_less
from serve.worker import loader


class _InTorch:
    """A kernel that is launched as Triton's are, whatever its grid."""

    def __init__(self, compute: Callable[..., None]) -> None:
        self._compute = compute
        self.launches = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self.launches += 1
        return self._compute


def _normed(x: Tensor, weight_W: Tensor, bias_W: Tensor, epsilon: float, rounding: str) -> Tensor:
    if rounding == "layer":
        return nn.functional.layer_norm(x, weight_W.shape, weight_W, bias_W, epsilon)
    scaled = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return scaled * (1 + weight_W) if rounding == "one plus weight" else scaled * weight_W


def _rms_norm(x: Tensor, weight_W: Tensor, out: Tensor, _stride: int, epsilon: float, *, ROUNDING: str, **_: Any) -> None:
    out.copy_(_normed(x, weight_W, weight_W, epsilon, ROUNDING))


def _sum_and_norm(*given: Any, THREE: bool, NORMS: int, ROUNDING: str, **_: Any) -> None:
    x, y, z, out, *of_norms = cast("tuple[Tensor, ...]", given[:10])
    out.copy_(x + y + z if THREE else x + y)
    for number in range(NORMS):
        weight_W, bias_W, normed = of_norms[3 * number : 3 * number + 3]
        normed.copy_(_normed(out, weight_W, bias_W, given[-1], ROUNDING))


@contextmanager
def layers_of_a_gpu() -> Iterator[dict[str, _InTorch]]:
    """Load models, while it lasts, whose layers have the form that they have on a CUDA device.

    Yields:
        What stands for the kernels, by name.
    """
    kernels = {"rms_norm": _InTorch(_rms_norm), "sum_and_norm": _InTorch(_sum_and_norm)}

    def between_products(model: nn.Module, *_: object) -> None:
        launch_less(model, by_triton=True)

    with (
        mock.patch.object(loader, "compute_between_products", between_products),
        mock.patch.object(layers, "rms_norm", kernels["rms_norm"]),
        mock.patch.object(residuals, "sum_and_norm", kernels["sum_and_norm"]),
    ):
        yield kernels
