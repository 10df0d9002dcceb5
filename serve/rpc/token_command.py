"""``tessera-serve token NAME``: makes a token, shows it once, and keeps its hash in a file."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from serve.errors import ConfigError
from serve.rpc.tokens import SCOPES, add_token

_NONE = "no limit"
_LIMITS = {
    "requests_per_minute": ("requests to generate and calls to score in a minute", _NONE),
    "tokens_per_minute": ("tokens of prompts and answers in a minute", _NONE),
    "max_running": ("requests in the engine at once", _NONE),
    "max_queued": (
        "requests that wait for one of --max-running to end; one more is refused",
        "the server's --max-queued-requests",
    ),
    "max_priority": ("largest priority of a request, by which it goes before those of all other tenants", "0"),
}
"""What each limit counts, and what holds where it is not given."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Args:
        arguments: what follows ``tessera-serve token``.

    Returns:
        0, or 2 where the file or an argument is at fault.
    """
    given = _parser().parse_args(arguments)
    limits = {name: value for name in _LIMITS if (value := getattr(given, name)) is not None}
    if given.shared_cache:
        limits["shared_cache"] = True
    expires = None
    if given.expires_days is not None:
        expires = datetime.datetime.now(datetime.UTC).replace(microsecond=0) + datetime.timedelta(days=given.expires_days)
    scopes = tuple(scope.strip() for scope in given.scopes.split(","))
    try:
        token = add_token(Path(given.file), given.name, scopes=scopes, expires=expires, given=limits)
    except ConfigError as error:
        print(f"tessera-serve token: {error}", file=sys.stderr)
        return error.exit_code
    print(token)
    print(f"The token of {given.name}, shown this once; {given.file} holds its hash.", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tessera-serve token",
        description="Make a token, print it once, and add its hash to the file that --tokens names.",
        epilog="A server that runs with the file takes the new token without a restart. To take one back, delete its entry.",
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", help="Whose token it is: 1 to 64 of A-Z a-z 0-9 . _ -")
    parser.add_argument("--file", required=True, metavar="FILE", help="Made if there is none, for its owner's eyes alone.")
    parser.add_argument(
        "--scopes", default="generate,score", metavar="LIST", help=f"Some of {','.join(SCOPES)}. (default: generate,score)"
    )
    for name, (meaning, default) in _LIMITS.items():
        help_ = f"Of all tokens of this name together: {meaning}. (default: {default})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help_)
    risk = "how soon an answer comes may tell each what another has asked"
    parser.add_argument(
        "--shared-cache",
        action="store_true",
        help=f"Share cached prompt prefixes with all others who have this too: {risk}. (default: among requests of this name)",
    )
    parser.add_argument("--expires-days", type=_days, metavar="N", help="Days until it stops counting. (default: never)")
    return parser


def _days(text: str) -> int:
    days = int(text)
    if not 1 <= days <= 36_500:
        raise argparse.ArgumentTypeError(f"{days} is no number of days from 1 to 36500")
    return days
