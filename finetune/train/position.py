"""How far a run has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPosition:
    """How far a run has come: all of its position but the tensors. Without arguments, a run's beginning."""

    step: int = 0
    """Steps of the schedule done, skipped ones included."""
    samples: int = 0
    """Samples taken, all ranks together: the position in the data."""
    tokens: int = 0
    """Target tokens taken."""
    optimizer_steps: int = 0
    """Updates the optimizer made."""
    skipped_in_a_row: int = 0
    """Without those that a smaller loss scale answered."""
    loss_scale: tuple[float, int] | None = None
    """In fp16: the scale, and the steps since it changed."""

    @classmethod
    def recorded(cls, record: Mapping[str, Any]) -> Self:
        """The position that a manifest's ``progress`` holds; earlier releases called the optimizer's steps ``adam_steps``.

        Raises:
            KeyError, TypeError: the record is of another form.
        """
        values = dict(record)
        if "adam_steps" in values:
            values["optimizer_steps"] = values.pop("adam_steps")
        return cls(**values)

    def record(self) -> dict[str, Any]:
        """The position as plain values for a manifest's ``progress``, from which ``recorded`` makes it again."""
        return asdict(self)
