"""Tests for a CUDA device: the cheapest proof first, all within ten minutes. What would begin later, or go on, fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator
from typing import Any, Final

import pytest

MINUTES: Final = 9.5
LAST_MINUTES: Final = 0.4
"""What a test has for its end when it was told to end."""
ORDER: Final = (
    "test_device_kernels",
    "test_families",
    "test_cuda_graphs",
    "test_packed",
    "test_cuda",
    "test_memory",
    "test_sanitizer",
    "test_several",
    "test_kills",
)
_CLOCK: Final = {"began": time.time()}


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell all processes that share the tests when these began."""
    node.workerinput["began"] = _CLOCK["began"]


def pytest_sessionstart(session: pytest.Session) -> None:
    """End a process of tests that go on: what waits in threads of its own, or for a device, hears no alarm."""
    told: dict[str, Any] = getattr(session.config, "workerinput", {})
    _CLOCK["began"] = told.get("began", _CLOCK["began"])
    if told and session.config.option.markexpr == "gpu":
        timer = threading.Timer(60 * (MINUTES + LAST_MINUTES) - _seconds(), os._exit, (1,))
        timer.daemon = True
        timer.start()


def _seconds() -> float:
    return time.time() - _CLOCK["began"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of this folder; all others stay before them, as they were."""
    items.sort(key=lambda item: ORDER.index(item.path.stem) + 1 if item.path.stem in ORDER else 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End a test with the time for all of them: ``pytest-timeout`` asks when it begins."""
    if item.get_closest_marker("gpu") is not None:
        item.add_marker(pytest.mark.timeout(max(1.0, 60 * MINUTES - _seconds())))
    return (yield)


@pytest.fixture(autouse=True)
def _within_the_time(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") is not None and _seconds() > 60 * MINUTES:
        pytest.fail(f"not run: the {MINUTES:g} minutes for tests on a device were over before it began")
