"""Programs that the deployment files are for, and what to say where one is missing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

PACKAGES = {"promtool": "prometheus", "prometheus": "prometheus", "haproxy": "haproxy", "mpirun": "openmpi-bin"}
"""Debian's package of each program."""
MOST_SECONDS = 120.0


def needs(*programs: str) -> pytest.MarkDecorator:
    """Skips a test where one of its programs is missing, and names the packages that have them."""
    missing = [program for program in programs if shutil.which(program) is None]
    packages = " ".join(sorted({PACKAGES[program] for program in missing}))
    return pytest.mark.skipif(bool(missing), reason=f"not tried: {', '.join(missing)} missing (apt-get install {packages})")


def run(*words: str, folder: Path, expected_code: int = 0) -> str:
    """What a program prints, standard error included; it must end with the expected code."""
    done = subprocess.run(
        words, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=MOST_SECONDS, check=False
    )
    assert done.returncode == expected_code, f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
