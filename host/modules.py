"""Starting another Python process of ours so that only our own modules run in it, wherever it is started from."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path


def module_command(module: str) -> list[str]:
    """The beginning of a command that runs ``module`` in this interpreter.

    ``-P``: without it Python looks into the working directory first, and whatever ``serve.py`` lies there would be run.
    Belongs together with ``import_path``.
    """
    return [sys.executable, "-P", "-m", module]


def import_path(environment: Mapping[str, str]) -> str:
    """``PYTHONPATH`` for such a process: where this package lies, then what was given.

    Empty entries, which mean the working directory, are left out.
    """
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(Path(__file__).resolve().parents[1]), *filter(None, given)])
