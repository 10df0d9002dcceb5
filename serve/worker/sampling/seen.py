"""What a sequence has said so far, counted as it goes: penalties ask for it in every step."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

_FEW: Final = 16
"""So many new tokens at the most are put in their places one by one."""


class Seen:
    """The different tokens of one sequence, ascending, and how often each was generated.

    Follows a list of ids that only grows; what was counted once is not looked at again. A row's logits lie in the order of
    their ids, so a processor comes to them on its way through the row.
    """

    __slots__ = ("_followed", "ids", "times")

    def __init__(self) -> None:
        self.ids = array("i")
        """int32, one of each token of prompt and output, ascending."""
        self.times = array("i")
        """int32, how often each of ``ids`` stands in the output; 0 for those of the prompt alone."""
        self._followed = 0

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int, count: int | None = None) -> None:
        """Count what was added since the last call, of the first ``count`` ids where that is given."""
        first, count = self._followed, len(token_ids) if count is None else count
        if first == count:
            return
        self._followed = count
        if self._followed - first <= _FEW:
            for position in range(first, self._followed):
                self._count(token_ids[position], position >= num_prompt_tokens)
        else:
            times = dict(zip(self.ids, self.times, strict=True))
            for position in range(first, self._followed):
                token = token_ids[position]
                times[token] = times.get(token, 0) + (position >= num_prompt_tokens)
            self.ids = array("i", sorted(times))
            self.times = array("i", [times[token] for token in self.ids])

    def supposing(self, token_ids: Sequence[int]) -> Seen:
        """What is seen if these are generated next; this one stays what it is."""
        supposed = Seen()
        supposed.ids, supposed.times = self.ids[:], self.times[:]
        for token in token_ids:
            supposed._count(token, True)
        return supposed

    def _count(self, token: int, generated: bool) -> None:
        place = bisect_left(self.ids, token)
        if place == len(self.ids) or self.ids[place] != token:
            self.ids.insert(place, token)
            self.times.insert(place, 0)
        self.times[place] += generated
