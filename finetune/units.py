"""Bytes as people read them."""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30


def in_gib(size: float) -> str:
    """GiB with as many digits as matter."""
    value = size / GIB
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
