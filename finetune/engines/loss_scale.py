"""Dynamic loss scaling for fp16 (Micikevicius and others, arXiv 1710.03740): as large as gradients do not overflow.

fp16 ends at 65,504 and loses digits below 6e-5, where many gradients lie. The loss is multiplied before the backward pass and
the gradients are divided before the update.
"""

from __future__ import annotations

from typing import Final

START: Final = 2.0**16
LEAST: Final = 1.0
SMALL: Final = 2.0**10
"""From here down, something overflows that a smaller scale will hardly mend."""
MOST: Final = 2.0**24
WINDOW: Final = 1000
"""Good steps in a row after which a larger scale is tried."""


def reason_of_bad_gradient(scale: LossScale | None) -> str:
    """Why a step with a bad gradient is skipped: in fp16 the scale of the loss is to blame as long as it can fall."""
    return "scale" if scale is not None and scale.can_fall else "gradient"


def is_everyday(skipped: str | None, scale: LossScale | None) -> bool:
    """Whether a scale that was too large is all there is to a skipped step, and every gradient not worth a look.

    Until the scale has become small. Asked before it falls.
    """
    return skipped == "scale" and scale is not None and scale.value > SMALL


class LossScale:
    """The factor of the loss. The same on every rank, since all learn of the same overflows."""

    def __init__(self, value: float = START, good_steps: int = 0) -> None:
        self.value = value
        self.good_steps = good_steps
        """Steps since the last change."""

    @property
    def can_fall(self) -> bool:
        """Whether an overflow can still be answered by a smaller scale."""
        return self.value > LEAST

    def stepped(self, *, overflowed: bool) -> None:
        """Halve after an overflow, double after a thousand steps without one."""
        if overflowed:
            self.value, self.good_steps = max(LEAST, self.value / 2), 0
            return
        self.good_steps += 1
        if self.good_steps >= WINDOW:
            self.value, self.good_steps = min(MOST, self.value * 2), 0
