"""Where a text has said before what it says now, and what followed then."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_LONGEST = 4
"""Tokens that are compared at most: whoever agrees in so many is taken at once."""
_MOST_LOOKS = 32
"""Earlier places that are looked at, the latest first; in a text of one token only, all of them would be alike."""


class Lookup:
    """An index of the pairs of one list of token ids, which only grows. Each token is indexed once.

    Prompt lookup (Saxena 2023), over the chains of earlier places by which LZ77 compressors find what repeats.
    """

    __slots__ = ("_before", "_latest")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        """The last place at which each pair ends."""
        self._before = array("q")
        """For each place, the one before it at which the same pair ends; -1 where there is none."""

    def find(self, token_ids: Sequence[int], count: int, least: int = 2) -> tuple[int, ...]:
        """The ``count`` tokens that may come next; none where the last ``least`` tokens never stood together before.

        They are those that followed the longest equal run of tokens, of ``least`` to four, and of these the latest. Where they
        reach the end of the text they go on with themselves: a text that goes round in a circle is expected to stay there.
        """
        self._follow(token_ids)
        last = len(token_ids) - 1
        best, best_length = -1, least - 1
        place, looks = self._before[last] if last > 0 else -1, 0
        while place >= 0 and best_length < _LONGEST and looks < _MOST_LOOKS:
            length = 2
            while length < _LONGEST and length <= place and token_ids[place - length] == token_ids[last - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place, looks = self._before[place], looks + 1
        if best < 0:
            return ()
        found = list(token_ids[best + 1 : best + 1 + count])
        period = last - best
        while len(found) < count:
            found.append(found[len(found) - period])
        return tuple(found)

    def _follow(self, token_ids: Sequence[int]) -> None:
        latest, before = self._latest, self._before
        for place in range(len(before), len(token_ids)):
            pair = (token_ids[place - 1], token_ids[place]) if place else (-1, token_ids[0])
            before.append(latest.get(pair, -1))
            latest[pair] = place
