"""The checkpoint format that training writes and serving reads."""

from checkpoint.errors import CheckpointError
from checkpoint.latest import resolve_latest
from checkpoint.layout import TensorInfo
from checkpoint.manifest import Manifest
from checkpoint.open import Checkpoint, open_checkpoint
from checkpoint.writer import CheckpointWriter

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointWriter",
    "Manifest",
    "TensorInfo",
    "open_checkpoint",
    "resolve_latest",
]
