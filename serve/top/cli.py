"""``tessera-top``: a server's throughput, latencies, queue, cache, ranks and tenants, live or once."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.live import Live

from serve.top.reaching import Place, add_arguments
from serve.top.reading import NoReading, Reading, Span, read
from serve.top.screen import frame, silence

SHORTEST_SECONDS: Final = 0.1


def main(argv: Sequence[str] | None = None) -> int:
    """Show a server until it is interrupted, or once.

    Returns:
        0 when all was shown; 1 where nothing answers, of ``--once`` alone; 2 for usage.
    """
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        if not options.interval >= SHORTEST_SECONDS:
            parser.error(f"--interval is {options.interval}; it must be at least {SHORTEST_SECONDS} s")
    except SystemExit as end:  # argparse has said what is wrong
        return int(end.code or 0)
    try:
        place = Place.of(options, os.environ)
    except ValueError as error:
        print(f"tessera-top: {error}", file=sys.stderr)
        return 2
    try:
        return _once(place, options.interval) if options.once else _live(place, options.interval)
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-top", description="A server in a terminal, from its /metrics alone. Ctrl-C ends it."
    )
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks, which rates and latencies are of (2)"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one frame and end")
    add_arguments(parser)
    return parser


def _once(place: Place, interval: float) -> int:
    try:
        before = read(place)
        time.sleep(interval)
        Console().print(frame(Span(before, read(place))))
    except NoReading as error:
        print(f"tessera-top: {error}", file=sys.stderr)
        return 1
    return 0


def _live(place: Place, interval: float) -> int:
    before: Reading | None = None
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = read(place)
                live.update(frame(Span(before or now, now)), refresh=True)
                before = now
            except NoReading as error:
                before = None
                live.update(silence(place.url, str(error)), refresh=True)
            time.sleep(interval)
