"""How many tokens a sequence proposes for a step, by what became of those before."""

from __future__ import annotations

from collections.abc import Sequence

from serve.engine.lookup import Lookup
from serve.engine.plan import DRAFTED

_FIRST_COUNT = 2
_DOUBTED = 3
"""Steps in a row that accepted nothing, after which more must agree for something to be proposed."""
_LONGEST_SEARCH_PAUSE = 4
"""Tokens. A text that was guessed wrong, and then said nothing that it had said before, is looked up again this soon."""
_LONGEST_PAUSE = 32
"""Tokens. A text that is never guessed right pays for a wrong guess this seldom."""


class Speculation:
    """What one sequence proposes: twice as much after all of it was accepted, half after less than half of it was.

    After a step that accepted nothing the sequence is left alone for a token, for two after the next such step, then for
    four, and so on, until something is accepted: where the text does not repeat itself, guessing costs next to nothing. After
    a few such steps three tokens must have been said before, not two, for what followed them to be proposed. Where nothing
    can be proposed after a wrong guess, the sequence is left alone as well: meanwhile steps can be planned ahead.
    """

    __slots__ = ("_count", "_drafts", "_lookup", "_most", "_pause", "_resumes", "_wrong", "accepted", "proposed")

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
        self._wrong = 0
        """Steps since something was accepted that accepted nothing."""
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
        found = self._lookup.find(token_ids, min(self._count, room), least=3 if self._wrong >= _DOUBTED else 2)
        if not found and self._wrong:
            self._rest(len(token_ids), _LONGEST_SEARCH_PAUSE)
        return found

    def adapt(self, proposed: int, accepted: int, num_tokens: int) -> None:
        """Learn from a step which accepted the first ``accepted`` of ``proposed`` tokens, and left the sequence ``num_tokens``
        long."""
        if accepted == 0:
            self._rest(num_tokens, _LONGEST_PAUSE)
            self._wrong += 1
        else:
            self._pause, self._wrong = 1, 0
        if accepted == proposed:
            self._count = min(max(self._count, 2 * proposed), self._most)
        elif 2 * accepted < proposed:
            self._count = max(1, self._count // 2)

    def _rest(self, num_tokens: int, longest: int) -> None:
        """Propose nothing for a while from ``num_tokens`` on, and for twice as long the next time, up to ``longest``."""
        self._resumes = num_tokens + min(self._pause, longest)
        self._pause = max(self._pause, min(2 * self._pause, longest))
