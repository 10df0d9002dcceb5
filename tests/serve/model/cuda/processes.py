"""What the modules of this folder say that run in processes of their own; each is run once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[4]


@cache
def _ran(module: str, words: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"tests.serve.model.cuda.{module}", *words],
        cwd=_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
        capture_output=True,
        text=True,
        timeout=600,
    )


def told_by(module: str, *words: str, **environment: str) -> Any:
    """The JSON that a module of this folder prints."""
    ended = _ran(module, words, tuple(sorted(environment.items())))
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])  # before it DeepSpeed may have said which accelerator it found
