"""What the ranks of a run are told: a file as they start, and one message once everything before training is ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from finetune.config import TuneConfig
from finetune.data.prepared import Prepared
from finetune.machine.nvme import Disk

Command = Literal["tune", "pretrain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """``run.json`` in a run's folder: what the ranks that are started on this machine begin with."""

    config: TuneConfig
    command: Command = "tune"
    anyway: bool = False
    """Whether a run that the forecast says cannot fit starts all the same."""

    @classmethod
    def read(cls, path: Path) -> RunFile:
        """The file at ``path``.

        Raises:
            msgspec.ValidationError: it is of another form.
        """
        return msgspec.json.decode(path.read_bytes(), type=cls)

    def write(self, path: Path) -> None:
        """Write the file, for ``read``."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """What a rank needs beyond the configuration to train."""

    model_path: str | None
    """``model.path`` as it was settled for all ranks; ``None`` of a new model."""
    prepared: Prepared
    ops: dict[str, str]
    """Libraries of DeepSpeed's operations on the first machine, by name."""
    disk: Disk | None
    """What the NVMe disk can do; ``None`` where nothing is offloaded to one."""
    swap: str | None
    """The run's own folder on that disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Why there will be no training, for ranks that wait for instructions."""

    message: str
    exit_code: int


def encoded(told: Instructions | Refused) -> bytes:
    """One line of JSON, for ``decoded``."""
    return msgspec.json.encode({"refused" if isinstance(told, Refused) else "train": told})


def decoded(line: bytes) -> Instructions | Refused:
    """What ``encoded`` made a line of.

    Raises:
        msgspec.ValidationError: it is of another form.
    """
    message = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    if "refused" in message:
        return msgspec.json.decode(message["refused"], type=Refused)
    return msgspec.json.decode(message["train"], type=Instructions)
