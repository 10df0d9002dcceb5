"""What stands for CUDA's driver where memory is pinned in a test."""

from __future__ import annotations

import mmap

PAGE = mmap.PAGESIZE


class Driver:
    """Counts what is registered, up to a limit."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.held: dict[int, int] = {}
        self.most = most

    def register(self, address: int, num_bytes: int) -> None:
        assert address % PAGE == num_bytes % PAGE == 0, "whole pages, of which no two buffers share one"
        if num_bytes > self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.held[address] = num_bytes

    def unregister(self, address: int) -> None:
        del self.held[address]
