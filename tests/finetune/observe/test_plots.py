"""Curves: what is drawn of a log, and the SVG that stands in a page."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from finetune.observe.plots import Curve, Panel, as_svg, draw_losses, panels_of

SVG = "{http://www.w3.org/2000/svg}"


def test_a_panel_has_what_the_log_has_and_marks_the_spikes() -> None:
    log = [
        {"step": 1, "loss": 4.0, "lr": 0.1},
        {"step": 2, "skipped": "loss"},
        {"step": 2, "eval_loss": 3.5},
        {"step": 3, "loss": 9.0, "lr": 0.2, "grad_norm": None},
        {"step": 3, "spike": 9.0},
    ]
    losses, rate, norm, speed = panels_of(log)
    assert [list(curve.points) for curve in losses.curves] == [[(1.0, 4.0), (3.0, 9.0)], [(2.0, 3.5)]]
    assert losses.marks == [3.0]
    assert list(rate.curves[0].points) == [(1.0, 0.1), (3.0, 0.2)]
    assert not norm.curves[0].points
    assert not speed.curves[0].points


def test_an_svg_is_well_formed_keeps_its_peak_and_takes_the_colour_of_the_page() -> None:
    points = [(float(step), 1.0 + step % 2) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[5] = (5.0, math.nan)
    svg = as_svg([Panel(title="loss < 3", curves=[Curve(name="a", points=points, color="#123456")], marks=[100.0])])
    root = ElementTree.fromstring(svg)
    (line,) = (path for path in root.iter(f"{SVG}path") if "#123456" in path.attrib.get("style", ""))
    heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", line.attrib["d"])]
    assert len(heights) < 5000, "points that nobody sees apart are left out"
    assert sorted(heights)[1] - min(heights) > 100, "one point stands above all others"
    assert "loss < 3" in [text.text for text in root.iter(f"{SVG}text")]
    assert "currentColor" in svg
    assert "nan" not in svg


def test_the_same_curves_give_the_same_bytes() -> None:
    panels = [Panel(title="t", curves=[Curve(name="a", points=[(1.0, 2.0), (2.0, 1.0)])])]
    assert as_svg(panels) == as_svg(panels)


def test_one_point_is_seen_and_no_point_is_no_picture() -> None:
    one = Panel(title="t", curves=[Curve(name="a", points=[(1.0, 2.0)], color="#123456")])
    none = Panel(title="nothing", curves=[Curve(name="a", points=[(1.0, math.inf)])])
    assert re.search(r"<use [^>]*#123456", as_svg([one, none]))
    assert "nothing" not in as_svg([one, none])
    assert as_svg([none]) == ""


@pytest.mark.parametrize("entry", [{"lr": 1.0}, {"loss": math.nan}])
def test_a_log_without_a_loss_gives_no_png(tmp_path: Path, entry: dict[str, float]) -> None:
    (tmp_path / "log").write_text(json.dumps({"step": 1, **entry}) + "\n")
    assert not draw_losses(tmp_path / "log", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_matplotlib_is_imported_when_something_is_drawn_and_not_before() -> None:
    code = "import sys, finetune.observe.plots; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
