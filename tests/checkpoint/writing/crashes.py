"""Kills writers, at every step on disk and at random moments, and looks at what they leave behind.

Run as ``python -m tests.checkpoint.writing.crashes FOLDER``; prints one JSON object. Apart from pytest, since it forks: a fresh
process with one thread forks safely.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from checkpoint import CheckpointError
from checkpoint.disk import durable
from tests.checkpoint.folders import seed_of, written


def killed(work: Callable[[], None], after_seconds: float | None = None) -> bool:
    """Run ``work`` in a child; whether it was killed, by itself or by us after a while."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if after_seconds is not None:
        time.sleep(after_seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the writer failed by itself"
    return os.WIFSIGNALED(status)


def kill_at(number: int) -> Callable[[str], None]:
    """A hook that kills its own process before the step of this number, counted from 0."""
    left = number

    def hook(what: str) -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    return hook


def outcome(root: Path, old: int | None, new: int) -> str:
    """``old``, ``new`` or ``none``: what a reader finds; anything broken or mixed raises."""
    try:
        return "new" if seed_of(root, (new,) if old is None else (old, new)) == new else "old"
    except CheckpointError:
        if old is not None:
            raise
        return "none"


def leftovers_after_next_save(root: Path) -> list[str]:
    """What is not a checkpoint once another writer has come by."""
    written(root, 9, seed=9)
    assert seed_of(root, (9,)) == 9
    return [path.name for path in root.iterdir() if ".tmp-" in path.name or ".old-" in path.name]


def kill_at_every_step(base: Path, *, before: int | None, step: int) -> dict[str, object]:
    """Save ``step`` over a root that holds step ``before``, killed before its first, second, … step on disk."""
    outcomes: list[str] = []
    leftovers: list[str] = []
    number = 0
    while True:
        root = base / str(number)
        if before is not None:
            written(root, before, seed=0)
        if not killed(lambda root=root, number=number: written(root, step, seed=1, before_step=kill_at(number))):
            outcomes.append(outcome(root, None if before is None else 0, 1))
            return {"outcomes": outcomes, "leftovers": leftovers}
        outcomes.append(outcome(root, None if before is None else 0, 1) if root.exists() else "none")
        leftovers += leftovers_after_next_save(root)
        number += 1


def kill_at_random(base: Path, count: int) -> dict[str, object]:
    """One root; writers that save on and on are killed at random moments; what counts is always whole."""
    choose = random.Random(13)
    root = base / "run"
    written(root, 1, seed=0)

    def save_on_and_on() -> None:
        number = 2
        while True:
            written(root, number % 5, seed=number % 5)
            number += 1

    found: list[int] = []
    for _ in range(count):
        assert killed(save_on_and_on, after_seconds=choose.uniform(0.0, 0.05))
        found.append(seed_of(root, (0, 1, 2, 3, 4)))
    return {"found": found, "leftovers": leftovers_after_next_save(root)}


def main(base: Path) -> None:
    result: dict[str, object] = {
        "first save": kill_at_every_step(base / "first", before=None, step=1),
        "next save": kill_at_every_step(base / "next", before=1, step=2),
        "same step": kill_at_every_step(base / "same", before=1, step=1),
        "random": kill_at_random(base / "random", int(os.environ.get("TESSERA_TEST_KILLS", "40"))),
    }
    durable._exchange = lambda one, other: False
    result["same step, set aside"] = kill_at_every_step(base / "aside", before=1, step=1)
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
