"""Tests for a CUDA device: the cheapest proof first, all within ten minutes. What would begin later fails, and says so."""

from __future__ import annotations

import time
from typing import Final

import pytest

MINUTES: Final = 10.0
ORDER: Final = (
    "test_device_kernels",
    "test_families",
    "test_cuda_graphs",
    "test_packed",
    "test_cuda",
    "test_memory",
    "test_kills",
)
_BEGAN: Final = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder; all others stay before them, as they were."""
    items.sort(key=lambda item: ORDER.index(item.path.stem) + 1 if item.path.stem in ORDER else 0)


@pytest.fixture(autouse=True)
def _within_the_time(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None and time.monotonic() - _BEGAN > 60 * MINUTES:
        pytest.fail(f"not run: the {MINUTES:g} minutes for tests on a device were over before it began")
