"""What tests of the engine share."""

from __future__ import annotations

import dataclasses

import pytest

from tests.serve.engine import engines


@pytest.fixture(params=[False, True], ids=["one_at_a_time", "ahead"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's engines plan each step when the one before it has ended, and then again while that is computed."""
    monkeypatch.setattr(engines, "LIMITS", dataclasses.replace(engines.LIMITS, async_scheduling=request.param))
