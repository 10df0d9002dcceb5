"""How the demo looks: numbered acts, a loss curve, completions side by side, a table. Plain text where there is no terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

BARS = " ▁▂▃▄▅▆▇█"
ACCENT = "bright_cyan"


@dataclass(slots=True)
class Completion:
    """One panel: a prompt and what the model made of it so far."""

    prompt: str
    text: str = ""
    num_tokens: int = 0
    first_token_seconds: float | None = None
    done: bool = False


def make_console() -> Console:
    """The terminal as it is; 120 columns without one, so that a log is readable."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=120)


def panel_height(console: Console) -> int:
    """Lines of code a panel shows: what a terminal has room for, or enough for a log."""
    return min(26, max(10, console.height - 8)) if console.is_terminal else 26


def act(console: Console, number: int, title: str, text: str) -> None:
    """One numbered line of the story."""
    line = Text.assemble((f" {number} ", f"bold black on {ACCENT}"), "  ", (f"{title:<8}", "bold"), text)
    console.print(line)


def detail(console: Console, text: str) -> None:
    """A line that belongs to the act above it."""
    console.print(Text(f"{'':13}{text}", style="dim"))


def loss_curve(losses: Sequence[float], width: int, height: int) -> Text:
    """A block chart, newest on the right; each column is the mean of the steps it stands for."""
    columns = _means(losses, width)
    low, high = min(columns), max(columns)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    levels = [1 + round((value - low) * scale) for value in columns]
    chart = Text()
    for row in reversed(range(height)):
        label = f"{high:6.2f} ┤" if row == height - 1 else f"{low:6.2f} ┤" if row == 0 else f"{'':6} │"
        chart.append(label, style="dim")
        chart.append("".join(BARS[min(8, max(0, level - row * 8))] for level in levels), style=ACCENT)
        chart.append("\n")
    chart.rstrip()
    return chart


def _means(values: Sequence[float], count: int) -> list[float]:
    """``count`` columns at most, each the mean of an equal share of the values."""
    if len(values) <= count:
        return list(values)
    edges = [len(values) * i // count for i in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def training_panel(losses: Sequence[float], facts: str, status: str, width: int) -> Panel:
    """The curve so far over one line of figures; before the first step, what is being prepared."""
    body: RenderableType = loss_curve(losses, min(width - 16, 90), 6) if losses else Text("")
    return Panel(
        Group(body, Text(facts), Text(status, style="dim", no_wrap=True, overflow="ellipsis")), title="loss", width=width
    )


def completions(panels: Sequence[Completion], width: int, height: int) -> Table:
    """Panels of equal width side by side; each shows the newest ``height`` lines."""
    grid = Table.grid()
    each = width // len(panels)
    for _ in panels:
        grid.add_column(width=each)
    grid.add_row(*(_completion_panel(completion, each, height) for completion in panels))
    return grid


def _completion_panel(completion: Completion, width: int, height: int) -> Panel:
    cursor = "" if completion.done else "▌"
    lines = _wrap(completion.prompt + completion.text + cursor, width - 4)[-height:]
    first = "" if completion.first_token_seconds is None else f" · first after {completion.first_token_seconds * 1000:.0f} ms"
    return Panel(
        Syntax("\n".join(lines), "python", theme="ansi_dark", background_color="default"),
        width=width,
        height=height + 2,
        title=Text(completion.prompt.strip().splitlines()[0], style="bold"),
        subtitle=f"{completion.num_tokens} tokens{first}",
        border_style="green" if completion.done else ACCENT,
    )


def _wrap(code: str, width: int) -> list[str]:
    """Lines of at most ``width`` columns, cut between words where there are any, so that the newest ones can be counted."""
    lines = code.expandtabs(4).splitlines()
    return [part for line in lines for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]]


def figures(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and values, as the closing table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(f"{'':11}{name}", Text(value, style="bold"))
    return table
