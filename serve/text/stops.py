"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class StopAutomaton:
    """All stop strings of a request as one automaton (Aho and Corasick 1975): one transition per character.

    A state stands for the longest end of the text so far that some stop string begins with; its depth is that end's length,
    so it is also the number of characters that must be held back.
    """

    def __init__(self, stop_strings: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]
        """Per state: the longest stop string that ends here."""
        for stop in stop_strings:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, following in self._next[state].items():
                self._fail[following] = self.step(self._fail[state], character)
                queue.append(following)
            # A state that ends no stop string itself may still end in a shorter one.
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fail[state]


@lru_cache(maxsize=256)
def automaton_for(stop_strings: tuple[str, ...]) -> StopAutomaton:
    """The automaton; one per set of stop strings, shared by the sequences of a request. It is not changed after it is built."""
    return StopAutomaton(stop_strings)


class StopFinder:
    """The text of one sequence, let through once no stop string can begin in it.

    The first stop string to be complete counts; of several that end at the same character, the longest. So the outcome does
    not depend on how the text was cut into pieces.
    """

    def __init__(self, stop_strings: tuple[str, ...], *, include_stop: bool) -> None:
        self._automaton = automaton_for(stop_strings)
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is now certain, and the stop string if one is complete; nothing may be fed after that."""
        automaton, state = self._automaton, self._state
        for position, character in enumerate(text):
            state = automaton.step(state, character)
            stop = automaton.match[state]
            if stop is not None:
                whole = self._held + text[: position + 1]
                self._held = ""
                return (whole if self._include_stop else whole[: len(whole) - len(stop)]), stop
        self._state = state
        whole = self._held + text
        certain = len(whole) - automaton.depth[state]
        self._held = whole[certain:]
        return whole[:certain], None

    def rest(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held, self._state = self._held, "", 0
        return held
