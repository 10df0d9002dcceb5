"""The look at /dev/shm that other tests take."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from tests.support.shared_memory import abandoned, in_shared_memory


def test_what_nobody_has_mapped_is_abandoned_and_what_somebody_has_is_not() -> None:
    before = in_shared_memory()
    segment = SharedMemory(create=True, size=64)
    left = Path("/dev/shm/tessera-abandoned")
    try:
        left.write_bytes(b"x")
        found = abandoned(before)
        assert left.name in found
        assert segment.name.strip("/") not in found
    finally:
        segment.close()
        segment.unlink()
        left.unlink()
