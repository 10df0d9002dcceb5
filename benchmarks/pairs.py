"""Two servers side by side, asked by turns: each in its turn alone, in an order that changes from one turn to the next.

A ratio is that of two neighbouring turns, so that a machine that becomes slower meanwhile slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from benchmarks.guarded import Server, machine, make_model, serving
from benchmarks.open_loop import Load, Outcome, Running

STREAMS: Final = 32
"""Callers at once, and sequences that a server runs."""

T = TypeVar("T")


def by_turns(one: Callable[[], T], other: Callable[[], T], turns: int) -> list[tuple[T, T]]:
    """What a turn of each gives, so many times; the first of a pair is ``one``'s, whichever was asked first."""
    found: list[tuple[T, T]] = []
    for number in range(turns):
        if number % 2:
            second, first = other(), one()
        else:
            first, second = one(), other()
        found.append((first, second))
    return found


def asked(
    stack: contextlib.ExitStack, model: Path, *words: str, seconds: float, new_tokens: int, token: str = "", ca: str = ""
) -> tuple[Server, Load]:
    """A server with these options, until ``stack`` is closed, and the load of a turn, whose numbers are those of ``Load``."""
    server = stack.enter_context(serving(model, "--max-num-seqs", str(STREAMS), "--no-prefix-caching", *words))
    return server, Load(
        address=server.address, seconds=seconds, streams=STREAMS, prompt_tokens=16, new_tokens=new_tokens, token=token, ca=ca
    )


def ended_well(running: Running) -> Outcome:
    """What became of a turn's calls.

    Raises:
        RuntimeError: one of them failed.
    """
    outcome = running.outcome()
    if set(outcome.codes) != {"OK"}:
        raise RuntimeError(f"calls failed: {outcome.codes}")
    return outcome


def model_of(scratch: Path, options: argparse.Namespace) -> Path:
    """The folder of a model of Pythia-160M's shape, or of another width."""
    return make_model(scratch / "model", hidden=options.hidden, layers=12, vocabulary=50_304)


def parser(description: str | None, *, seconds: str, turns: int) -> argparse.ArgumentParser:
    """The options of such a benchmark.

    Args:
        seconds: what ``--seconds`` are, for its help.
        turns: how many there are by default.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seconds", type=float, default=5.0, help=f"{seconds} (5)")
    made.add_argument("--turns", type=int, default=turns, help=f"of each of two servers ({turns})")
    made.add_argument("--tokens", type=int, default=32, help="that each call generates (32)")
    made.add_argument("--hidden", type=int, default=768, help="width of the model (768: Pythia-160M's shape)")
    made.add_argument("--out", type=Path, help="result file")
    return made


def record(out: Path | None, description: str | None, results: Mapping[str, Any], **facts: str) -> None:
    """Write the results to the file, if one is named, after what they are of and what else is to be said of the run."""
    if out is not None:
        head = {"what": (description or "").split("\n")[0], "date": str(datetime.date.today()), "machine": machine()}
        out.write_text(json.dumps({**head, **facts, **results}, indent=2) + "\n")
