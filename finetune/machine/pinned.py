"""Pinned host memory of the size that is asked for, not in powers of two as torch's, which also keeps what is freed.

A GPU copies from and to pinned memory without the host.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Driver(Protocol):
    """What pins memory."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin whole pages.

        Raises:
            RuntimeError: the driver refuses.
        """
        ...

    def unregister(self, address: int) -> None:
        """Let go of what was registered at this address, when no copy from or to it is under way."""
        ...


class CudaDriver:
    """CUDA's: the pages of this process stay where they are, and are known to its devices."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin whole pages by ``cudaHostRegister``.

        Raises:
            RuntimeError: CUDA refuses.
        """
        torch.cuda.check_error(int(_runtime().cudaHostRegister(address, num_bytes, 0)))

    def unregister(self, address: int) -> None:
        """Wait for all that the device does, then let go of the pages that were pinned at this address.

        Raises:
            RuntimeError: CUDA refuses.
        """
        torch.cuda.synchronize()  # a copy that was launched may still read
        torch.cuda.check_error(int(_runtime().cudaHostUnregister(address)))


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch leaves it unannotated


class _Pages(mmap.mmap):
    """Fresh pages of memory, pinned until nobody holds them: no tensor, and no view of one."""

    pins: PinnedMemory | None = None
    address = 0

    def __del__(self) -> None:
        if self.pins is not None:
            self.pins.release(self.address)


class PinnedMemory:
    """Hands out pinned tensors, each of pages of its own. DeepSpeed calls it where it pins memory: these are its names."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._sizes: dict[int, int] = {}
        """Bytes by address."""
        self.most_bytes = 0
        """What was pinned at once at most, whole pages."""

    @property
    def num_bytes(self) -> int:
        """What is pinned now, whole pages."""
        return sum(self._sizes.values())

    def pin(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """A pinned tensor like another one, or flat, with its numbers if ``make_copy``."""
        pinned = self.pin_empty(tensor, tensor.shape if match_shape else (tensor.numel(),))
        return pinned.copy_(tensor.reshape(pinned.shape)) if make_copy else pinned

    def pin_empty(self, example: Tensor, shape: Sequence[int]) -> Tensor:
        """A pinned tensor of a shape, in the type of ``example``.

        Raises:
            RuntimeError: the driver refuses.
        """
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=example.dtype)
        num_bytes = -(-count * example.element_size() // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = _Pages(-1, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        try:
            self._driver.register(address, num_bytes)
        except RuntimeError as error:
            held = self.num_bytes / 2**30
            raise RuntimeError(
                f"offload: {num_bytes / 2**30:.2f} GiB of memory could not be pinned beside {held:.2f} that are: {error}"
            ) from error
        self._sizes[address] = num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        pages.address, pages.pins = address, self
        return torch.frombuffer(pages, dtype=example.dtype, count=count).view(tuple(shape))

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in what was handed out."""
        if tensor.device.type != "cpu":
            return False
        place = tensor.untyped_storage().data_ptr()
        return any(begin <= place < begin + size for begin, size in self._sizes.items())

    def unpin(self, tensor: Tensor) -> bool:
        """Unpin what a tensor lies in, which stays as readable as it was.

        Returns:
            Whether it was pinned.
        """
        place = tensor.untyped_storage().data_ptr()
        if place not in self._sizes:
            return False
        self.release(place)
        return True

    def release(self, address: int) -> None:
        """Unpin what was registered at an address, if it still is."""
        if self._sizes.pop(address, None) is not None:
            self._driver.unregister(address)
