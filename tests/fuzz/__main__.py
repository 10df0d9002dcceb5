"""``make fuzz``: every reader of others' bytes takes what is mutated, for some seconds each.

A reader gives a value or its own error, within a second and within memory; anything else is a find, which is printed with what
repeats it: ``python -m tests.fuzz TARGET --seed SEED --only NUMBER``.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import TARGETS, Target

MOST_SECONDS, MOST_SECONDS_PER_BYTE = 1.0, 20e-6
"""Of CPU, for one input. PyYAML takes 13 microseconds for a byte on a slow core: ten thousand lines of settings nearly a
second, and twice as many twice as long."""
MOST_BYTES = 256 << 20
"""That the process may grow by over all inputs of a target."""


def run(
    target: Target, seed: int, seconds: float = math.inf, only: int | None = None, most: int | None = None
) -> tuple[Counter[str], list[str]]:
    """How the inputs of a target ended, and what was found.

    Args:
        only: the number of the one input to be read.
        most: inputs, where not time is to decide.
    """
    ends, found = Counter[str](), []
    before = peak_bytes(anew=True)
    until, number = time.monotonic() + seconds, -1 if only is None else only - 1
    while time.monotonic() < until and not found and number + 1 != most:
        number += 1
        draw = random.Random(f"{seed}/{number}")
        data = mutated(draw.choice(target.seeds), target.seeds, draw)
        begun = time.thread_time()
        try:
            ends[target.read(data)] += 1
        except Exception:
            found.append(f"input {number}: {traceback.format_exc()}")
        taken = time.thread_time() - begun
        if taken > MOST_SECONDS + MOST_SECONDS_PER_BYTE * len(data):
            found.append(f"input {number}, {len(data)} bytes, took {taken:.1f} s")
        if only is not None:
            break
    grown = peak_bytes() - before
    if grown > MOST_BYTES:
        found.append(f"the process grew by {grown >> 20} MiB")
    return ends, found


def peak_bytes(*, anew: bool = False) -> int:
    """The most that this process held of memory; ``anew``: from now on, whatever it held before."""
    if anew:
        Path("/proc/self/clear_refs").write_text("5")
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; none: all")
    parser.add_argument("--seconds", type=float, default=30.0, help="for each target (30)")
    parser.add_argument("--seed", type=int, default=None, help="of what is drawn; by the clock otherwise")
    parser.add_argument("--only", type=int, default=None, metavar="NUMBER", help="one input of the seed")
    given = parser.parse_args(arguments)
    unknown = set(given.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"there is no target {sorted(unknown)[0]!r}")
    seed = given.seed if given.seed is not None else time.time_ns() % 1_000_000
    failed = False
    for name in given.targets or TARGETS:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ends, found = run(TARGETS[name](folder), seed, given.seconds, given.only)
        print(json.dumps({"target": name, "seed": seed, "inputs": ends.total(), **ends, "found": len(found)}), flush=True)
        for each in found:
            print(f"{name}, seed {seed}: {each}", file=sys.stderr)
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
