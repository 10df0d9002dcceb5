"""The committed code is what the protos give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]


def test_the_generated_code_is_fresh() -> None:
    check = [sys.executable, str(REPOSITORY / "protos" / "generate.py"), "--check"]
    result = subprocess.run(check, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
