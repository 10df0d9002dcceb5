"""What a sequence has said so far, counted as it goes: penalties ask for it in every step."""

from __future__ import annotations

from array import array
from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Final

_MOST_LATE: Final = 64
"""Tokens that may stand behind those in order before all are put in order again; of many a quarter may."""


class Seen:
    """The different tokens of one sequence, and how often each was generated.

    Follows a list of ids that only grows; what was counted once is not looked at again. Smaller ids stand first, but for the
    latest: their logits lie in this order, and so a processor comes through them in half the time.
    """

    __slots__ = ("_followed", "_ordered", "_places", "ids", "times")

    def __init__(self) -> None:
        self.ids = array("i")
        """int32, one of each token of prompt and output."""
        self.times = array("i")
        """int32, how often each of ``ids`` stands in the output; 0 for those of the prompt alone."""
        self._places: MutableMapping[int, int] = {}
        self._followed = 0
        self._ordered = 0

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what was added since the last call."""
        for position in range(self._followed, len(token_ids)):
            self._count(token_ids[position], position >= num_prompt_tokens)
        self._followed = len(token_ids)
        if len(self.ids) - self._ordered > max(_MOST_LATE, self._ordered // 4):
            self._put_in_order()

    def supposing(self, token_ids: Sequence[int]) -> Seen:
        """What is seen if these are generated next; this one stays what it is."""
        supposed = Seen()
        supposed.ids, supposed.times = self.ids[:], self.times[:]
        supposed._places = ChainMap({}, self._places)  # what is below is only read
        for token in token_ids:
            supposed._count(token, True)
        return supposed

    def _put_in_order(self) -> None:
        counted = sorted(zip(self.ids, self.times, strict=True))
        self.ids, self.times = (array("i", column) for column in zip(*counted, strict=True))
        self._places = {token: place for place, token in enumerate(self.ids)}
        self._ordered = len(counted)

    def _count(self, token: int, generated: bool) -> None:
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.times.append(0)
        self.times[place] += generated
