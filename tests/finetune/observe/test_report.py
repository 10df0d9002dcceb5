"""The report, from logs written by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from finetune.config import DataConfig, LogConfig, RunConfig, TokenizerConfig, TuneConfig
from finetune.config.model import ModelConfig
from finetune.observe.report import _Samples, write_report
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
    path = write_report(config_of(output))
    assert path == output / "report.html"
    page = path.read_text()
    for said in ("4.2000", "3.00 GiB", "2.00 GiB", "loss spike", "runs/x, 1.5 s", "MFU, median", "the loss was not finite"):
        assert said in page
    for title in ("loss (nats per token)", "learning rate", "gradient norm", "targets/s"):
        assert f">{title}</text>" in page
    assert "The run ended early" not in page
    assert "Samples" not in page, "none were asked for"
    assert "<script" not in page
    assert set(re.findall(r"""(?:src|href|url)=?["'(]+(.)""", page)) == {"#"}, "every reference is to the page itself"
    assert "host memory 2.00 GiB (forecast 3.00, +50 %)" in (beside(output) or "")


def test_numbers_stand_at_the_right_and_words_at_the_left(tmp_path: Path) -> None:
    write_log(tmp_path / "run")
    path = write_report(config_of(tmp_path / "run"))
    assert path is not None
    assert '<tr><td>training loss</td><td class="number">3.0000</td></tr>' in path.read_text()


def test_whatever_comes_from_the_run_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "<script>alert('&')</script>"
    output = tmp_path / "run <img src=x>"
    write_log(
        output,
        {"step": 20, "saved": hostile, "seconds": 1.5},
        {"step": 19, "skipped": "gradient", "diagnosis": hostile},
    )
    (output / "config.yaml").write_text(hostile)
    (output / FORECAST).write_text(json.dumps({"host_items": {hostile: 1 << 30}}))
    samples = _Samples(hostile, [(hostile, "</span>" + hostile)])
    monkeypatch.setattr("finetune.observe.report._samples", lambda *_: samples)
    path = write_report(config_of(output), failure=hostile)
    assert path is not None
    page = path.read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert page.count("&lt;script&gt;alert(&#39;&amp;&#39;)&lt;/script&gt;") == 8


def test_no_step_no_report(tmp_path: Path) -> None:
    assert write_report(config_of(tmp_path / "run")) is None
