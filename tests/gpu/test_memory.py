"""What a run is said to need of a CUDA device beside what it took: ``make test-gpu``. Elsewhere skipped, and said so."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from benchmarks.gpu_training import BOTH, CASE_SECONDS, OPTIMIZER, Case, make_text, run
from tests.gpu.device import ON_DEVICE, REHEARSED, some

pytestmark = ON_DEVICE
APART: Final = 0.1
"""How far, as a share of what was measured, the forecast of a device's memory may be from it."""
WAYS: Final = {"optimizer": OPTIMIZER, "both": BOTH}


@pytest.mark.parametrize("name", some(WAYS, "both"))
def test_a_run_takes_the_device_memory_that_was_forecast(name: str, tmp_path: Path) -> None:
    text = make_text(tmp_path / "text.txt", megabytes=0.2 if REHEARSED else 4)
    case = Case("fits", name, "125M", WAYS[name], micro=4)
    told = run(case, tmp_path, text, CASE_SECONDS, rehearse=REHEARSED)
    assert "failed" not in told, told
    kind = "host_bytes" if REHEARSED else "device_reserved_bytes"  # beside which other tests may have theirs
    assert told[kind]["forecast"] > 0
    assert told[kind]["measured"] > 0
    if not REHEARSED:  # a forecast of the host's memory is compared elsewhere, with runs that are not as small as their noise
        assert abs(told[kind]["difference"]) <= APART
