"""Where tables go: a terminal has a width, a file or a program takes lines as long as they are."""

from __future__ import annotations

from rich.console import Console

_UNCUT = 1 << 14


def table_console() -> Console:
    """Standard output, whose tables are cut to nothing less than a terminal's width."""
    console = Console()
    return console if console.is_terminal else Console(width=_UNCUT)
