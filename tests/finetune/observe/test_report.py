"""Curves and the report, from logs written by hand."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from finetune.config import DataConfig, LogConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.config.model import ModelConfig
from finetune.observe.curves import Curve, Picture
from finetune.observe.report import write_report
from finetune.output.records import FORECAST, MEASURED, beside


def config_of(output: Path) -> TuneConfig:
    return TuneConfig(
        run=RunConfig(output=str(output)),
        data=DataConfig(train=("x",)),
        model=ModelConfig(new={"model_type": "gpt2"}),
        tokenizer=TokenizerConfig(path="x"),
        log=LogConfig(),
    )


def write_log(output: Path, *more: dict[str, Any]) -> None:
    output.mkdir(parents=True)
    line = {"lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 500.0, "mfu": 0.25, "seconds_since_start": 1.0}
    entries = [{"step": step, "loss": 5 - step / 10, "tokens": 64 * step, **line} for step in range(1, 21)]
    (output / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in [*entries, *more]))
    (output / "config.yaml").write_text("run: {output: <b>here</b>}\n")


def test_a_picture_is_well_formed_and_keeps_its_peak() -> None:
    points = [(float(step), 1.0) for step in range(10_000)]
    points[4321] = (4321.0, 99.0)
    points[5] = (5.0, float("nan"))
    picture = Picture(title="loss < 3", curves=[Curve(name="a", points=points, color="#000")], marks=[100.0]).as_svg()
    root = ElementTree.fromstring(picture)
    (line,) = root.iter("{http://www.w3.org/2000/svg}polyline")
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert len(heights) < 1500
    assert min(heights) < 35, "the highest point is at the top"
    assert "nan" not in picture


def test_a_picture_of_one_point_and_of_none() -> None:
    assert "circle" in Picture(title="t", curves=[Curve(name="a", points=[(1.0, 2.0)], color="#000")]).as_svg()
    assert Picture(title="t", curves=[Curve(name="a", points=[(1.0, float("inf"))], color="#000")]).as_svg() == ""


def test_the_report_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    output = tmp_path / "run"
    write_log(
        output,
        {"step": 10, "eval_loss": 4.2},
        {"step": 12, "spike": 9.0, "usual": 4.0, "since": 11},
        {"step": 20, "saved": "runs/x", "seconds": 1.5},
        {"step": 13, "skipped": "loss"},
    )
    (output / FORECAST).write_text(
        json.dumps({"host_bytes": 3 << 30, "disk_bytes": 1 << 30, "host_items": {"weights": 1 << 30}})
    )
    (output / MEASURED).write_text(json.dumps({"host_bytes": 2 << 30, "disk_bytes": 1 << 29}))
    path = write_report(config_of(output), failure="the disk is <full>")
    assert path == output / "report.html"
    page = path.read_text()
    assert page.count("<svg") == 4
    for said in ("4.2000", "3.00 GiB", "2.00 GiB", "loss spike", "runs/x, 1.5 s", "MFU, median", "the disk is &lt;full&gt;"):
        assert said in page
    assert "<b>here</b>" not in page, "what comes from the run is escaped"
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="', page) == []
    assert "host memory 2.00 GiB (forecast 3.00, +50 %)" in (beside(output) or "")


def test_no_step_no_report(tmp_path: Path) -> None:
    assert write_report(config_of(tmp_path / "run")) is None
