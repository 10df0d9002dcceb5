"""What a sequence has said so far, counted as it goes: penalties ask for it in every step."""

from __future__ import annotations

from array import array
from collections import ChainMap
from collections.abc import MutableMapping, Sequence


class Seen:
    """The different tokens of one sequence, in the order of their first appearance, and how often each was generated.

    Follows a list of ids that only grows; what was counted once is not looked at again.
    """

    __slots__ = ("_followed", "_places", "ids", "times")

    def __init__(self) -> None:
        self.ids = array("i")
        """int32, one of each token of prompt and output."""
        self.times = array("i")
        """int32, how often each of ``ids`` stands in the output; 0 for those of the prompt alone."""
        self._places: MutableMapping[int, int] = {}
        self._followed = 0

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Count what was added since the last call."""
        for position in range(self._followed, len(token_ids)):
            self._count(token_ids[position], position >= num_prompt_tokens)
        self._followed = len(token_ids)

    def supposing(self, token_ids: Sequence[int]) -> Seen:
        """What is seen if these are generated next; this one stays what it is."""
        supposed = Seen()
        supposed.ids, supposed.times = self.ids[:], self.times[:]
        supposed._places = ChainMap({}, self._places)  # what is below is only read
        for token in token_ids:
            supposed._count(token, True)
        return supposed

    def _count(self, token: int, generated: bool) -> None:
        place = self._places.setdefault(token, len(self.ids))
        if place == len(self.ids):
            self.ids.append(token)
            self.times.append(0)
        self.times[place] += generated
