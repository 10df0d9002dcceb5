"""Ranks on a CUDA device that are killed under load: ``make test-gpu``. Elsewhere these tests are skipped, and say so.

A rank on a device is back after its imports, its device and its captured steps, which takes many seconds; so a hundred deaths
are those of several servers side by side on one device.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from tests.gpu.deaths import say_less, serve_and_strike
from tests.gpu.device import ON_DEVICE, REHEARSED
from tests.support.models import save

pytestmark = ON_DEVICE
SERVERS: Final = 1 if REHEARSED else 8
DEATHS: Final = 1 if REHEARSED else 104


def test_every_call_is_answered_once_and_whole_whatever_ranks_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_less(monkeypatch)
    folder, each = save("llama", tmp_path / "llama"), DEATHS // SERVERS
    with ThreadPoolExecutor(SERVERS) as pool:
        served = list(pool.map(lambda number: serve_and_strike(folder, number, [0] * each), range(SERVERS)))
    for survived in served:
        survived.prove(each)
