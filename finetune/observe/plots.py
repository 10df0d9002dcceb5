"""Curves of a run over its steps, drawn by matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from finetune.observe.svg import PAGE_SETTINGS, page_element
from finetune.output.log import read_log

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BLUE, _RED, _AMBER = "#3b82f6", "#dc2626", "#d97706"
"""Told apart on white and on black."""
_FEW_POINTS: Final = 2
"""So many points make no line that is seen, so they are marked."""
_PANEL_INCHES: Final = (5.4, 2.7)

Entries = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line; points that are not finite are left out."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = _BLUE
    dots: bool = False
    """Whether each point is marked: for few points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Curves over the steps, with one axis of values."""

    title: str
    curves: Sequence[Curve]
    marks: Sequence[float] = field(default=())
    """Steps that get a vertical line."""


def panels_of(entries: Entries) -> list[Panel]:
    """What a run's log has to show: loss first, with its spikes marked, then what belongs to it."""
    names = (("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_second", "targets/s"))
    return [_losses(entries), *(Panel(title=name, curves=[_curve(entries, key, name)]) for key, name in names)]


def as_svg(panels: Sequence[Panel]) -> str:
    """The panels in two columns as one SVG element to stand in a page; panels without a point are left out.

    Its text and axes have the colour of the text around it, its ground is the page's. The same panels give the same bytes.
    """
    panels = [panel for panel in map(_finite, panels) if panel.curves]
    if not panels:
        return ""
    import matplotlib
    from matplotlib.figure import Figure

    style: Any = {**PAGE_SETTINGS, "font.size": 9, "path.simplify_threshold": 0.5}
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), layout="constrained")
        for place, panel in enumerate(panels, 1):
            _draw(figure.add_subplot(rows, columns, place), panel)
        return page_element(figure)


def draw_losses(log: Path, picture: Path) -> bool:
    """Draw training and evaluation loss over the steps as PNG; ``False``, and no picture, when the log holds no loss."""
    panel = _finite(_losses(read_log(log)))
    if not panel.curves:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    _draw(figure.subplots(), panel)
    figure.savefig(picture, format="png")
    return True


def _losses(entries: Entries) -> Panel:
    curves = [_curve(entries, "loss", "training"), _curve(entries, "eval_loss", "evaluation", color=_RED, dots=True)]
    spikes = [float(entry["step"]) for entry in entries if "spike" in entry]
    return Panel(title="loss (nats per token)", curves=curves, marks=spikes)


def _curve(entries: Entries, key: str, name: str, *, color: str = _BLUE, dots: bool = False) -> Curve:
    points = [(float(entry["step"]), float(entry[key])) for entry in entries if entry.get(key) is not None]
    return Curve(name=name, points=points, color=color, dots=dots)


def _finite(panel: Panel) -> Panel:
    """The panel without the points that no axis has a place for, and without curves that then have none."""
    curves = []
    for curve in panel.curves:
        points = [(x, y) for x, y in curve.points if math.isfinite(x) and math.isfinite(y)]
        if points:
            curves.append(Curve(name=curve.name, points=points, color=curve.color, dots=curve.dots))
    return Panel(title=panel.title, curves=curves, marks=panel.marks)


def _draw(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        x, y = zip(*curve.points, strict=True)
        marker = "o" if curve.dots or len(x) < _FEW_POINTS else ""
        axes.plot(x, y, label=curve.name, color=curve.color, linewidth=1.5, marker=marker, markersize=4)
    for step in panel.marks:
        axes.axvline(step, color=_AMBER, linestyle="--", linewidth=1)
    axes.set_title(panel.title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    if len(panel.curves) > 1:
        axes.legend(framealpha=0)
