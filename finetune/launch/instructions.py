"""What the ranks of a run are told: a file as they start, and one message once everything before training is ready."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from finetune.config import TuneConfig
from finetune.data.prepared import Prepared
from finetune.errors import RunError
from finetune.machine.nvme import Disk

Command = Literal["tune", "pretrain"]
T = TypeVar("T")


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
            RunError: as ``decoded``.
        """
        return _exactly(path.read_bytes(), cls)

    def write(self, path: Path) -> None:
        """Write this to ``path`` as indented JSON, from which ``read`` makes an equal value."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instructions:
    """What a rank needs beyond the configuration to train."""

    model_path: str | None
    """``model.path`` as it was settled for all ranks; ``None`` of a new model."""
    prepared: Prepared
    ops: dict[str, str]
    """Built libraries on the first machine, by name."""
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
    """Instructions or a refusal as one line of JSON, without its line end, that says which of the two it is."""
    return msgspec.json.encode({"refused" if isinstance(told, Refused) else "train": told})


def decoded(line: bytes) -> Instructions | Refused:
    """The instructions or the refusal that a line of ``encoded`` holds; its line end may be there.

    Raises:
        msgspec.ValidationError: it is of another form.
        RunError: it has other keys than this release's.
    """
    message = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    if "refused" in message:
        return _exactly(message["refused"], Refused)
    return _exactly(message["train"], Instructions)


def _exactly(text: bytes | msgspec.Raw, cls: type[T]) -> T:
    """``text`` as ``cls``, with every field of it and nothing else.

    msgspec alone passes over keys that ``cls`` lacks, and takes the default for those that ``text`` lacks: what another release
    on another node means by them would be lost without a word.
    """
    read = msgspec.json.decode(text, type=cls)
    if msgspec.json.decode(msgspec.json.encode(read)) != msgspec.json.decode(text):
        raise RunError("what this rank is told comes from another release of Tessera; all nodes need the same one")
    return read
