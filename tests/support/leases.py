"""Whether leases can be had where tests keep their files."""

from __future__ import annotations

import fcntl
import tempfile

import pytest


def _why_not() -> str:
    with tempfile.NamedTemporaryFile() as file, open(file.name, "rb") as opened:
        file.close()
        try:
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            return str(error)
    return ""


WHY_NOT = _why_not()
needs_leases = pytest.mark.skipif(bool(WHY_NOT), reason=f"temporary files have no leases here: {WHY_NOT}")
