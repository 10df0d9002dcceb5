"""How long before a step ends the next one is planned."""

from __future__ import annotations

from typing import Final

_FIRST_SECONDS: Final = 0.002
_FIRST: Final = (4.0, 0.1)
"""Before anything was learnt, and never more than: ``_FIRST_SECONDS``, so many times what the ranks would wait without a plan,
and this share of a step."""
_LEAST_SECONDS: Final = 0.0002
_LATER: Final = 0.975
_SOONER: Final = 1.25
"""What a plan in time and a late one make of the lead: it settles where one of ten is late. A late one costs the ranks what it
takes to plan a step; one in time lets whatever comes after it wait for a step more."""


class Lead:
    """Learns from whether the ranks had ended a step before they were given the next one, or before they had launched it.

    How long a plan takes to reach them, how long they take to launch it on a device, and how much longer or shorter than usual
    a step takes, depends on the machine and on what else it does.
    """

    def __init__(self) -> None:
        self._share = 1.0

    def seconds(self, between: float, step: float) -> float:
        """How long before its usual end the step after the one under way is to be planned.

        Args:
            between: seconds from a step's answer to the next step's launch, where none is planned ahead.
            step: seconds that one of this size usually takes.
        """
        times, share = _FIRST
        return max(_LEAST_SECONDS, self._share * (_FIRST_SECONDS + times * between + share * step))

    def learn(self, *, was_late: bool) -> None:
        """A step was launched, before the ranks had ended the one before it or after."""
        self._share = min(1.0, self._share * (_SOONER if was_late else _LATER))
