"""``tessera-top``: a server's throughput, latencies, queue, cache, ranks and tenants, live or once."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.live import Live

from serve.top.reading import NoReading, Reading, Span, read
from serve.top.screen import frame, silence

DEFAULT_URL: Final = "http://127.0.0.1:9400/metrics"
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
    url = _whole(options.url)
    try:
        return _once(url, options.interval) if options.once else _live(url, options.interval)
    except KeyboardInterrupt:
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-top", description="A server in a terminal, from its /metrics alone. Ctrl-C ends it."
    )
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, help=f"of the metrics ({DEFAULT_URL}); the ready line says it")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks, which rates and latencies are of (2)"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print one frame and end")
    return parser


def _whole(url: str) -> str:
    """An address as the ready line has it, of what may be less: ``HOST:PORT``, or without the path."""
    url = url if "://" in url else f"http://{url}"
    return url if url.count("/") > 2 else f"{url}/metrics"


def _once(url: str, interval: float) -> int:
    try:
        before = read(url)
        time.sleep(interval)
        Console().print(frame(Span(before, read(url))))
    except NoReading as error:
        print(f"tessera-top: {error}", file=sys.stderr)
        return 1
    return 0


def _live(url: str, interval: float) -> int:
    before: Reading | None = None
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            try:
                now = read(url)
                live.update(frame(Span(before or now, now)), refresh=True)
                before = now
            except NoReading as error:
                before = None
                live.update(silence(url, str(error)), refresh=True)
            time.sleep(interval)
