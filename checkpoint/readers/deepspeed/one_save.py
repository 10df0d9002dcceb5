"""Tells whether the files of several ranks are of one save.

A save under a name that an earlier one had, interrupted, leaves new files beside old ones of the same names and sizes. Each
model file has the number of steps, and in nearly every optimizer each rank counts its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from checkpoint.readers.deepspeed.saves import Saved, step_of
from checkpoint.readers.files.pickles import StoredTensor
from checkpoint.readers.files.torch_zip import NUMBERS
from checkpoint.readers.ranks import check_one_step

_STATES = ("optimizer_state_dict", "base_optimizer_state")
"""Where ZeRO-3, and ZeRO-1 and 2, keep what the optimizer itself would save."""


def check_model_files(saved: Sequence[Saved]) -> None:
    """All ranks' files are of one step.

    Raises:
        CheckpointError: they are not.
    """
    check_one_step([(one.file, step_of(one)) for one in saved])


def check_optimizer_files(saved: Sequence[Saved]) -> None:
    """All ranks' optimizers have taken as many steps.

    Raises:
        CheckpointError: they have not.
    """
    check_one_step([(one.file, _steps_taken(one)) for one in saved])


def _steps_taken(saved: Saved) -> float | None:
    """Steps by the state of the first parameter, or by the first group; ``None`` where the optimizer does not count there."""
    for name in _STATES:
        states, groups = (saved.get("optimizer_state_dict", name, kind) for kind in ("state", "param_groups"))
        first_state = list(states.values())[:1] if isinstance(states, dict) else []
        first_group = groups[:1] if isinstance(groups, list) else []
        for found in (*first_state, *first_group):
            step = found.get("step") if isinstance(found, dict) else None
            if isinstance(step, StoredTensor) and step.shape in ((), (1,)) and step.dtype in NUMBERS:
                return saved.archive.number(f"{name}.step", step)
            if isinstance(step, int | float):
                return float(step)
    return None
