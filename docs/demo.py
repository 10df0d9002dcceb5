"""Runs the demo and keeps what it showed: ``docs/demo.svg``, its screen; ``docs/demo-report.html`` and ``demo-curves.svg``.

``make demo-pictures`` runs it. All of it is what was printed and written, with the figures of that run; on a terminal the loss
and the completions move. None of the files loads anything, or tells where this machine keeps what.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the packages as they lie here, installed or not

from rich.console import Console  # noqa: E402

from examples.demo.__main__ import play  # noqa: E402
from examples.demo.children import Children  # noqa: E402
from finetune.observe.plots import as_svg, panels_of  # noqa: E402
from finetune.output.log import read_log  # noqa: E402

DOCS = REPOSITORY / "docs"
COLUMNS = 120
STYLE = "svg { color: #4b5563 } @media (prefers-color-scheme: dark) { svg { color: #d1d5db } }"
"""Of the curves, which take the colour of the text around them: in a picture there is none."""


def main() -> None:
    out = Path("demo-out")
    for name in ("text", "run", "logs"):
        shutil.rmtree(out / name, ignore_errors=True)
    console = recording_console()
    with Children(out / "logs") as children:
        play(console, children, out)
    made = {
        "demo.svg": screen_of(console),
        "demo-curves.svg": curves_of(out / "run" / "log.jsonl"),
        # The log names saves by their whole path.
        "demo-report.html": (out / "run" / "report.html").read_text(encoding="utf-8").replace(f"{REPOSITORY}/", ""),
    }
    for name, text in made.items():
        if found := places_in(text):
            sys.exit(f"{name} would tell of {found[0]} on this machine; nothing was written")
    for name, text in made.items():
        (DOCS / name).write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def recording_console() -> Console:
    """A console that shows what a log would have, and remembers it in colour."""
    return Console(record=True, force_terminal=False, highlight=False, width=COLUMNS)


def screen_of(console: Console) -> str:
    """What was shown, as rich draws a terminal. The fonts that it would fetch are left out; the reader's own do."""
    drawn = console.export_svg(title="make demo", unique_id="demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)


def curves_of(log: Path) -> str:
    """The curves of a run's report in a picture of their own, for light and dark pages."""
    return as_svg(panels_of(read_log(log))).replace(">", f"><style>{STYLE}</style>", 1)


def places_in(text: str) -> list[str]:
    """This machine's own folders that a text names."""
    own = {str(REPOSITORY), str(Path.home()), sys.prefix, sys.base_prefix} - {"/", "/usr"}
    return sorted(folder for folder in own if folder in text)


if __name__ == "__main__":
    main()
