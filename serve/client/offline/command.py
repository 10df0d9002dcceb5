"""``tessera-generate --batch``: its options, and what it says while it runs."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Final

from serve.client.calls import DEFAULT_ADDRESS
from serve.client.connection import connecting_of
from serve.client.offline.run import IN_FLIGHT_AT_EACH, FileReport, generate_file
from serve.client.request import Options

_EXCLUDED: Final = ("prompt", "prompt_ids", "chat", "system", "json", "no_stream", "stats", "request_id")
"""What belongs to one request alone."""


def add_batch_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of offline work."""
    group = parser.add_argument_group(
        "offline work",
        "A file of requests in, a file of answers out. Started again after any end, it goes on where it was. "
        "Options of generation count for lines that do not say.",
    )
    group.add_argument(
        "--batch", metavar="FILE", help="requests, one JSON object a line: prompt, prompt_ids or chat, id, options"
    )
    group.add_argument("--out", metavar="FILE", help="answers, in the order of the requests; with --batch")
    group.add_argument(
        "--in-flight", type=int, metavar="N", help=f"requests at all servers together at most ({IN_FLIGHT_AT_EACH} for each)"
    )
    group.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS", help="how long to wait while no server serves (%(default)g)"
    )
    group.add_argument(
        "--progress", type=float, default=10.0, metavar="SECONDS", help="between two lines of progress (%(default)g)"
    )


def run_batch(arguments: argparse.Namespace, defaults: Options) -> bool:
    """Run it; whether every line was answered without an error.

    Raises:
        ValueError: options exclude each other, or one breaks its rule.
        TesseraError, OSError: as ``generate_file`` says.
    """
    if arguments.batch is None or arguments.out is None:
        raise ValueError("--batch and --out must be given together")
    for name in _EXCLUDED:
        if getattr(arguments, name):
            raise ValueError(f"--batch and {_flag(name)} exclude each other: each line says what it asks for")
    if not arguments.progress > 0 or not arguments.patience > 0:
        raise ValueError("--progress and --patience must be seconds above 0")
    named = arguments.address or os.environ.get("TESSERA_ADDRESS") or DEFAULT_ADDRESS
    addresses = [address.strip() for address in named.split(",")]
    report = generate_file(
        arguments.batch,
        arguments.out,
        addresses=addresses,
        in_flight=arguments.in_flight,
        defaults=defaults,
        timeout=arguments.timeout,
        retries=arguments.retries,
        patience=arguments.patience,
        on_progress=_show,
        progress_seconds=arguments.progress,
        on_change=_show_change,
        **connecting_of(arguments),
    )
    if report.num_failed:
        _say(f'{report.num_failed} of {report.num_lines} lines have an "error" in {arguments.out} instead of an answer')
    return not report.num_failed


def _flag(name: str) -> str:
    return "a prompt" if name == "prompt" else "--" + name.replace("_", "-")


def _show(report: FileReport) -> None:
    new, left = report.num_written - report.num_before, report.num_lines - report.num_written
    share = report.num_written / report.num_lines if report.num_lines else 1.0
    words = [f"{report.num_written} of {report.num_lines} lines ({share:.0%})"]
    if report.num_before and not new:
        words.append(f"{report.num_before} of them from before")
    if report.num_failed:
        words.append(f"{report.num_failed} failed")
    if new and report.seconds:
        words.append(f"{report.num_tokens / report.seconds:.0f} tokens/s")
    if left:
        words.append(f"{report.num_in_flight} in flight")
        if new:
            words.append(f"about {_duration(report.seconds / new * left)} left")
    if report.down:
        words.append(f"without {', '.join(report.down)}")
    _say(", ".join(words))


def _show_change(address: str, is_up: bool) -> None:
    _say(f"{address} serves again" if is_up else f"{address} does not serve; its requests go elsewhere or wait")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _say(text: str) -> None:
    print(f"tessera-generate: {text}", file=sys.stderr, flush=True)
