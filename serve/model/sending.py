"""How the host's numbers reach the device, and the device's the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def send(values: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's on the device, for which the host does not wait: a plain copy waits for all that is under way."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


class Fetched:
    """Numbers on their way from the device to the host, which waits for them when it reads them, and for nothing behind them.

    On a CPU they are the tensor itself, which must not be written to before they are read.
    """

    __slots__ = ("_event", "_values")

    def __init__(self, values: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            self._event.record()
        else:
            self._values = values

    def tolist(self) -> Any:
        """Wait for them; as ``Tensor.tolist`` gives them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
