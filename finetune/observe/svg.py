"""How matplotlib draws an SVG of ours, for curves of runs and pictures of documents: the same figure gives the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK: Final = "#0a0b0c"
"""Axes and text, until the page's own colour stands in its place."""
_INKED: Final = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")

SETTINGS: Final[Mapping[str, Any]] = {  # as a mapping of every name that matplotlib knows it has a type of its own
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tessera",
}
"""matplotlib's settings for any SVG, to draw and save it with."""
PAGE_SETTINGS: Final[Mapping[str, Any]] = {**SETTINGS, **dict.fromkeys(_INKED, _INK), "font.family": "sans-serif"}
"""Those for one that ``page_element`` makes."""


def page_element(figure: Figure) -> str:
    """A figure that was drawn with ``PAGE_SETTINGS``, which still hold, as one SVG element to stand in a page.

    Its text and axes have the colour of the text around it, its ground is the page's.
    """
    file = io.StringIO()
    unsaid = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=unsaid)
    _, begin, body = file.getvalue().partition("<svg ")  # what is before it belongs to a file of its own
    return (begin + body).replace(_INK, "currentColor")
