"""How many tokens a sequence proposes for a step, by what became of those before."""

from __future__ import annotations

from collections.abc import Sequence

from serve.engine.lookup import Lookup
from serve.engine.plan import DRAFTED

_FIRST_COUNT = 2
_LONGEST_PAUSE = 32
"""Tokens. A text that is never guessed right pays for a wrong guess this seldom."""


class Speculation:
    """What one sequence proposes: twice as much after all of it was accepted, half after less than half of it was.

    After a step that accepted nothing the sequence is left alone for a token, for two after the next such step, then for
    four, and so on, until something is accepted: where the text does not repeat itself, guessing costs next to nothing.
    """

    __slots__ = ("_count", "_drafts", "_lookup", "_most", "_pause", "_resumes", "accepted", "proposed")

    def __init__(self, most: int, *, drafts: bool = False) -> None:
        """Nothing was proposed yet.

        Args:
            most: tokens for one step, at least 1.
            drafts: whether the ranks' draft model says which; else they are looked up in the text.
        """
        assert most >= 1, "a sequence that may propose nothing has no speculation"
        self._most = most
        self._drafts = drafts
        self._count = min(most, _FIRST_COUNT)
        self._lookup = Lookup()
        self._pause = 1
        self._resumes = 0
        """The length of the sequence from which on it proposes again."""
        self.proposed = 0
        self.accepted = 0
        """Tokens of those that became output."""

    def rests(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens is left alone, whatever they are."""
        return num_tokens < self._resumes

    def propose(self, token_ids: Sequence[int], room: int) -> tuple[int, ...]:
        """Tokens that may follow, at most ``room``; does not count them as proposed."""
        if room <= 0 or self.rests(len(token_ids)):
            return ()
        if self._drafts:
            return (DRAFTED,) * min(self._count, room)
        return self._lookup.find(token_ids, min(self._count, room))

    def adapt(self, proposed: int, accepted: int, num_tokens: int) -> None:
        """Learn from a step which accepted the first ``accepted`` of ``proposed`` tokens, and left the sequence ``num_tokens``
        long."""
        if accepted == 0:
            self._resumes = num_tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        else:
            self._pause = 1
        if accepted == proposed:
            self._count = min(max(self._count, 2 * proposed), self._most)
        elif 2 * accepted < proposed:
            self._count = max(1, self._count // 2)
