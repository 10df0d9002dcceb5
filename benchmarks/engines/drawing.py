"""The plot of a run: for each cell, how many times every peer's speed ours is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot

from finetune.observe.svg import SETTINGS

MARKS: Final = {
    "openvino": ("o", "#0068b5"),
    "llama.cpp": ("s", "#d97706"),
    "ctranslate2": ("^", "#7c3aed"),
    "transformers": ("x", "#64748b"),
}
BAR: Final = 1.10


def draw(record: dict[str, Any], path: Path) -> None:
    """Write an SVG of the cells that are there, one row each; the same record gives the same file."""
    cells = list(record["cells"].items())
    style: Any = {**SETTINGS, "font.size": 9}  # of names, which have a type of their own in matplotlib
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.28 * len(cells)), layout="constrained")
        for peer, (mark, colour) in MARKS.items():
            points = [
                (cell["tessera / peer"][peer], row) for row, (_, cell) in enumerate(cells) if peer in cell["tessera / peer"]
            ]
            if points:
                axes.scatter(*zip(*points, strict=True), marker=mark, color=colour, label=f"beside {peer}", zorder=3)
        axes.axvline(1.0, color="#334155", linewidth=0.8)
        axes.axvline(BAR, color="#334155", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(cells)), [name for name, _ in cells])
        axes.invert_yaxis()
        axes.set_xscale("log", base=2)
        ticks = [0.25, 0.5, 1, 2, 4, 8]
        axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
        axes.set_xlabel("Tessera over gRPC, times the peer's speed (median of paired turns); dotted: 1.10")
        axes.grid(axis="x", alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=len(MARKS), fontsize=8)
        axes.set_title(f"{record['machine']['device']}, {record['date']}", fontsize=9)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
