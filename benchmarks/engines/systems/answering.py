"""The line protocol between the benchmark and an engine: requests come by standard input, answers go by standard output."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """Whatever generates: ids in, ids out."""

    versions: dict[str, str]
    """Of what computes, by name."""

    def generate(self, prompts: list[list[int]], tokens: int, exact: bool, every: float) -> list[list[int]]:
        """Exactly ``tokens`` greedy tokens after each prompt; their ids.

        Args:
            exact: asks for a cache as precise as the model, where by default the engine rounds what it keeps.
            every: seconds from the submission of one prompt to that of the next; 0: all are submitted at once. An engine that
                begins no prompt while it answers others raises ``AtOnce`` where it is more.
        """
        ...

    def close(self) -> None: ...


class AtOnce(Exception):
    """Prompts are wanted one by one."""

    def __init__(self) -> None:
        super().__init__("it takes no prompt while it answers others")


def answer(open_engine: Callable[[dict[str, Any]], Engine]) -> None:
    """Open what the first argument describes, say so, then answer a line for each line until there are no more.

    Whatever else the process prints goes to standard error, so that no library can spoil an answer.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        lines.write(json.dumps(what) + "\n")
        lines.flush()

    try:
        engine = open_engine(json.loads(sys.argv[1]))
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        raise
    say({"versions": engine.versions})
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                began = time.perf_counter()
                ids = engine.generate(
                    request["prompts"], request["tokens"], request.get("exact", False), request.get("every", 0.0)
                )
                say({"seconds": time.perf_counter() - began, "ids": ids})
            except Exception as error:
                say({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.close()
