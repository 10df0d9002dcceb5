"""Tests for a CUDA device: the cheapest proof first, all within ten minutes. What would begin later, or go on, fails."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Final

import pytest

MINUTES: Final = 9.5
ORDER: Final = (
    "test_device_kernels",
    "test_families",
    "test_cuda_graphs",
    "test_packed",
    "test_cuda",
    "test_memory",
    "test_several",
    "test_kills",
)
_BEGAN: Final = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder; all others stay before them, as they were."""
    items.sort(key=lambda item: ORDER.index(item.path.stem) + 1 if item.path.stem in ORDER else 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a test with the time for all of them: ``pytest-timeout`` asks when it begins."""
    if item.get_closest_marker("gpu") is not None:
        item.add_marker(pytest.mark.timeout(max(1.0, 60 * MINUTES - (time.monotonic() - _BEGAN))))
    return (yield)


@pytest.fixture(autouse=True)
def _within_the_time(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None and time.monotonic() - _BEGAN > 60 * MINUTES:
        pytest.fail(f"not run: the {MINUTES:g} minutes for tests on a device were over before it began")
