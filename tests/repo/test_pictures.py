"""The pictures of the documents are there, can be read anywhere, and tell nothing of the machine that drew them."""

from __future__ import annotations

import io
import json
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from tests.repo.documents import REPOSITORY, markdown_files

PICTURES = sorted((REPOSITORY / "docs").glob("*.svg"))
NAMED = PICTURES + sorted((REPOSITORY / "docs").glob("*.html"))
NAMESPACES = ("http://www.w3.org/", "https://www.textualize.io")
"""Addresses that are names: nothing is fetched from them. The second is whom rich says it is by."""


@pytest.fixture(scope="module")
def demo() -> dict[str, Any]:
    """What ``docs/demo.py`` has."""
    return runpy.run_path(str(REPOSITORY / "docs/demo.py"))


@pytest.fixture(scope="module")
def dashboards() -> dict[str, Any]:
    """What ``docs/dashboards.py`` has."""
    return runpy.run_path(str(REPOSITORY / "docs/dashboards.py"))


def check_well_formed(picture: str) -> None:
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"


def check_loads_nothing(text: str) -> None:
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]+[^\s\"'<)]*", text)
    assert [address for address in addresses if not address.startswith(NAMESPACES)] == []
    assert re.findall(r"@import|@font-face|<script|\bsrc=|url\((?!#)", text) == []


def absolute_paths(text: str) -> list[str]:
    """Words that begin with a slash and a folder's name, but for those that close a tag."""
    return re.findall(r"(?<![\w.<:/-])/[\w.-]+/[\w./-]*", text)


def test_the_pictures_that_documents_show_are_the_ones_there_are() -> None:
    shown = {
        (page.parent / target).resolve()
        for page in markdown_files()
        for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text())
    }
    assert shown == set(PICTURES)
    readme = (REPOSITORY / "README.md").read_text()
    for name in ("docs/demo.svg", "docs/demo-curves.svg", "docs/demo-report.html"):
        assert f"]({name})" in readme


@pytest.mark.parametrize("file", NAMED, ids=lambda file: file.name)
def test_a_picture_is_whole_loads_nothing_and_names_no_folder_of_a_machine(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".svg":
        check_well_formed(text)
    check_loads_nothing(text)
    assert absolute_paths(text) == []


def test_the_picture_of_the_demo_shows_every_act_of_it() -> None:
    words = "".join(ElementTree.parse(REPOSITORY / "docs/demo.svg").getroot().itertext()).replace("\N{NO-BREAK SPACE}", " ")
    for act in ("Text", "Train", "Shards", "Serve", "Stream", "Stop"):
        assert act in words
    assert "no process is left" in words


def test_a_screen_is_drawn_without_what_it_would_load(demo: dict[str, Any]) -> None:
    console = demo["recording_console"]()
    console.file = io.StringIO()
    console.print("loss", style="bold bright_cyan")
    drawn = demo["screen_of"](console)
    check_well_formed(drawn)
    check_loads_nothing(drawn)
    assert ">loss</text>" in drawn


def test_curves_are_a_picture_with_colours_of_its_own(demo: dict[str, Any], tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    entries = ({"step": step, "loss": 3.0 / step, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9.0} for step in (1, 2, 3))
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    drawn = demo["curves_of"](log)
    check_well_formed(drawn)
    check_loads_nothing(drawn)
    assert "prefers-color-scheme: dark" in drawn


def test_a_folder_of_this_machine_is_found_before_anything_is_written(demo: dict[str, Any]) -> None:
    assert demo["places_in"](f"saved {REPOSITORY}/demo-out/run") != []
    assert demo["places_in"]("saved demo-out/run") == []


def words_of(picture: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("name", ["tessera.json", "training.json"])
def test_the_picture_of_a_dashboard_has_its_panels_and_most_of_them_have_something_to_show(
    dashboards: dict[str, Any], name: str
) -> None:
    panels = json.loads((REPOSITORY / "deploy/grafana" / name).read_text())["panels"]
    picture = (REPOSITORY / "docs" / dashboards["PICTURES"][name]).read_text(encoding="utf-8")
    words = words_of(picture)
    assert [title for title in (panel["title"] for panel in panels) if title not in words] == [], "make dashboard-pictures"
    # Of GPUs there is nothing where there is none, and of guesses and losses where there were none.
    assert words.count("No data") <= sum("GPU" in panel["title"] for panel in panels) + 2
    assert len(picture) <= dashboards["MOST_BYTES"]


def test_a_dashboard_is_drawn_with_what_was_asked_where_the_panel_is(dashboards: dict[str, Any]) -> None:
    asked: list[str] = []

    def ask(expression: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        asked.append(expression)
        if "nothing" in expression:
            return []
        return [({"rank": rank}, [(0.0, float("nan")), (1.0, 3.0), (2.0, 4096.0)]) for rank in "01"]

    def panel(title: str, kind: str, unit: str, expr: str, x: int) -> dict[str, Any]:
        return {
            "title": title, "type": kind, "fieldConfig": {"defaults": {"unit": unit}},
            "gridPos": {"x": x, "y": 0, "w": 8, "h": 7}, "targets": [{"expr": expr, "legendFormat": "rank {{rank}}"}],
        }  # fmt: skip

    kinds = (
        panel("Memory", "timeseries", "bytes", 'a{model_name=~"$model",instance=~"$instance"}', 0),
        panel("Now", "stat", "bytes", "sum(rate(b[$__rate_interval]))", 8),
        panel("Nobody", "timeseries", "s", "nothing", 16),
    )
    drawn = dashboards["drawn"]({"panels": list(kinds)}, ask, 2.0)
    assert drawn == dashboards["drawn"]({"panels": list(kinds)}, ask, 2.0), "the same answers are the same bytes"
    check_well_formed(drawn)
    check_loads_nothing(drawn)
    assert asked[:3] == ['a{model_name=~".*",instance=~".*"}', "sum(rate(b[15s]))", "nothing"]
    words = words_of(drawn)
    for word in ("Memory", "rank 0", "rank 1", "4 KiB", "Now", "Nobody", "No data"):
        assert word in words


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (0.0, "s", "0 s"), (0.0123, "s", "12.3 ms"), (4e-5, "s", "40 µs"), (90.0, "s", "1.5 min"), (2.5e9, "hertz", "2.5 GHz"),
        (3.0 * 2**30, "bytes", "3 GiB"), (0.256, "percentunit", "25.6%"), (1.0, "bool_yes_no", "Yes"),
        (12_500.0, "none", "12.5K"), (7.0, "reqps", "7 req/s"), (2e-4, "sci", "2.00e-04"),
    ],
)  # fmt: skip
def test_values_are_told_in_their_unit(dashboards: dict[str, Any], value: float, unit: str, said: str) -> None:
    assert dashboards["told"](value, unit) == said
