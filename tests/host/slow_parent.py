"""Imported where processes are forked from: that process is slow to see that what it has forked has ended."""

from __future__ import annotations

import os
import time

_waitpid = os.waitpid


def _late(pid: int, options: int) -> tuple[int, int]:
    time.sleep(5.0)
    return _waitpid(pid, options)


os.waitpid = _late
