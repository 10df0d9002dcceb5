"""kill -9 at any moment leaves the previous checkpoint or the new one, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.checkpoint.writing.crashes", str(tmp_path_factory.mktemp("crashes"))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("case", "before"), [("first save", "none"), ("next save", "old"), ("same step", "old"), ("same step, set aside", "old")]
)
def test_killed_at_every_step_on_disk(results: dict[str, Any], case: str, before: str) -> None:
    """Every outcome was opened with all hashes compared; once the new one counts it never goes back."""
    outcomes = results[case]["outcomes"]
    assert len(outcomes) > 20
    assert set(outcomes) == {before, "new"}
    assert outcomes == sorted(outcomes, key=lambda found: found == "new")
    assert results[case]["leftovers"] == []


def test_killed_at_random_moments(results: dict[str, Any]) -> None:
    found = results["random"]["found"]
    assert len(found) >= 40
    assert all(seed in range(5) for seed in found)
    assert results["random"]["leftovers"] == []
