"""An engine for tests of the benchmark: it counts, and does wrong what its settings say."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.engines.systems.answering import AtOnce, answer


class Counting:
    """After each prompt come the numbers that follow its last one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.versions = {"counting": "1"}
        self._wrong = settings.get("wrong", "")
        if self._wrong == "opens":
            raise ValueError("no such weights")
        print("a library says something")

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float) -> list[list[int]]:
        """See ``Engine``."""
        print("and says more")
        if self._wrong == "ends":
            os._exit(3)
        if self._wrong == "fails" and tokens > 1:
            raise MemoryError("no room")
        if every and self._wrong == "at once":
            raise AtOnce
        return [[prompt[-1] + 1 + place for place in range(tokens - (self._wrong == "short"))] for prompt in prompts]

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    answer(Counting)
