"""Which step a checkpoint is of, by the name that its trainer gave the folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

_NAME: Final = re.compile(r"(?:global_step|iter_|(?:step|checkpoint)[-_])(\d{1,18})")
"""DeepSpeed's and GPT-NeoX's, Megatron's, torchtitan's and HF Trainer's."""


def step_in_name(folder: Path) -> int | None:
    """The number in the name of a folder, as trainers number their steps; ``None`` of any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def step_in_names(folder: Path) -> int | None:
    """The number in the name of a folder, or of the one above it: some trainers keep weights in a folder of their own."""
    found = step_in_name(folder)
    return step_in_name(folder.parent) if found is None else found
