"""The name that a model has by the folder that it is in."""

from __future__ import annotations

import os
import re
from pathlib import PurePath
from typing import Final

_OF_EVERY_RUN: Final = re.compile(r"checkpoints|step-\d+")
"""Names of folders that training gives in every run."""


def own_name(path: str) -> str:
    """The last part of a path that tells one run from another: every run keeps its steps in ``checkpoints/step-00000320``."""
    if path.startswith("hf:"):  # a name of the hub, and perhaps a revision
        path = path.partition("@")[0]
    own = PurePath(os.path.abspath(path))
    while _OF_EVERY_RUN.fullmatch(own.name) and own.parent.name:
        own = own.parent
    return own.name
