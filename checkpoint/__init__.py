"""The checkpoint format that training writes and serving reads.

What reads or writes tensors is imported when it is first asked for: looking at a checkpoint needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from checkpoint.disk.holding import Hold, claimed, hold
from checkpoint.disk.latest import resolve_latest
from checkpoint.disk.manifest import Manifest
from checkpoint.errors import CheckpointError
from checkpoint.given import Given
from checkpoint.layout import TensorInfo
from checkpoint.opening.adapted import pinned
from checkpoint.opening.prove import open_structure
from checkpoint.opening.recognise import locate
from checkpoint.opening.structure import Structure

if TYPE_CHECKING:
    from checkpoint.opening.open import Checkpoint, open_checkpoint
    from checkpoint.writing.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "Given",
    "Hold",
    "Manifest",
    "Structure",
    "TensorInfo",
    "claimed",
    "hold",
    "locate",
    "open_checkpoint",
    "open_structure",
    "pinned",
    "resolve_latest",
]

_WITH_TORCH = {"Checkpoint": "opening.open", "open_checkpoint": "opening.open", "CheckpointWriter": "writing.writer"}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
