"""``report.html``: one file that tells what a run did; it loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any, Final

from finetune.config import TuneConfig
from finetune.errors import FinetuneError
from finetune.machine import inventory
from finetune.observe.curves import Curve, Picture
from finetune.output.folder import CHECKPOINTS, LOG, step_folders
from finetune.output.log import read_log
from finetune.output.records import FORECAST, MEASURED, read_json
from finetune.units import in_gib

FILE: Final = "report.html"
_BLUE, _RED = "#2563eb", "#dc2626"
_SAMPLE_TOKENS: Final = 64
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2937; background: #fff; max-width: 1120px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem } .dim { color: #6b7280 }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem }
svg { width: 100%; height: auto; border: 1px solid #e5e7eb; border-radius: 6px } svg text { font-size: 11px; fill: #4b5563 }
svg .title { font-size: 13px; font-weight: 600; fill: #111827 } .grid { stroke: #e5e7eb }
.mark { stroke: #f59e0b; stroke-dasharray: 3 3 }
table { border-collapse: collapse } td, th { padding: .25rem 1rem .25rem 0; text-align: left; border-bottom: 1px solid #e5e7eb }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f3f4f6; padding: .8rem; border-radius: 6px; overflow-x: auto; white-space: pre-wrap }
.failure { background: #fef2f2; border-left: 4px solid #dc2626; padding: .6rem 1rem; margin: 1rem 0 }
.prompt { color: #6b7280 } .completion { color: #111827; font-weight: 500 }
@media (prefers-color-scheme: dark) { body { background: #111827; color: #e5e7eb } pre { background: #1f2937 }
svg { background: #f9fafb } .completion { color: #f9fafb } .failure { background: #450a0a } }
"""

Row = Sequence[str]


def write_report(config: TuneConfig, *, failure: str | None = None) -> Path | None:
    """Write ``<output>/report.html`` from what the run left behind; ``None`` if it never took a step.

    Args:
        failure: why the run ended before its time.
    """
    output = Path(config.run.output)
    log = output / LOG
    entries = read_log(log) if log.is_file() else []
    if not any("loss" in entry for entry in entries):
        return None
    title = f"Training run {output.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(_subtitle(entries))}</p>',
        "" if failure is None else f'<div class="failure"><b>The run ended early.</b> {escape(failure)}</div>',
        _section("Result", _table(_result(entries))),
        _section("Curves", f'<div class="curves">{"".join(_pictures(entries))}</div>'),
        _section("Forecast and measurement", _forecast(output)),
        _section("Samples", _samples(config, output)),
        _section("Events", _table(_events(entries), head=("step", "event", ""))),
        _section("Settings", f"<details open><summary>config.yaml</summary><pre>{escape(_settings(output))}</pre></details>"),
    ]
    page = (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        + "\n".join(filter(None, parts))
        + "\n</body></html>\n"
    )
    path = output / FILE
    path.write_text(page, encoding="utf-8")
    return path


def _subtitle(entries: Sequence[Mapping[str, Any]]) -> str:
    versions = ", ".join(f"{name} {inventory.version_of(name)}" for name in ("torch", "deepspeed", "transformers"))
    last = max(int(entry["step"]) for entry in entries)
    return f"{last:,} steps, written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; {inventory.cpu_description()}; {versions}"


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(rows: Iterable[Row], head: Row = ()) -> str:
    lines = ["".join(f"<td{_align(cell)}>{escape(cell)}</td>" for cell in row) for row in rows]
    if not lines:
        return ""
    top = f"<tr>{''.join(f'<th>{escape(cell)}</th>' for cell in head)}</tr>" if head else ""
    return f"<table>{top}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _align(cell: str) -> str:
    return ' class="number"' if cell[:1].isdigit() or cell[:2] in ("+0", "-0") else ""


def _result(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    trained = [entry for entry in entries if "loss" in entry]
    evaluated = [entry for entry in entries if "eval_loss" in entry]
    last = trained[-1]
    rows: list[Row] = [("steps", f"{last['step']:,}"), ("training loss", f"{last['loss']:.4f}")]
    if evaluated:
        best = min(evaluated, key=lambda entry: float(entry["eval_loss"]))
        rows.append(("evaluation loss", f"{evaluated[-1]['eval_loss']:.4f}"))
        rows.append(("best evaluation loss", f"{best['eval_loss']:.4f} at step {best['step']:,}"))
    rows.append(("target tokens", f"{last['tokens']:,}"))
    for key, name in (("all_tokens_per_second", "tokens/s, median"), ("tokens_per_second", "targets/s, median")):
        speeds = sorted(float(entry[key]) for entry in trained if key in entry)
        if speeds:
            rows.append((name, f"{speeds[len(speeds) // 2]:,.0f}"))
    uses = sorted(float(entry["mfu"]) for entry in trained if "mfu" in entry)
    if uses:
        rows.append(("MFU, median", f"{uses[len(uses) // 2]:.1%}"))
    skipped = sum("skipped" in entry for entry in entries)
    if skipped:
        rows.append(("skipped steps", f"{skipped:,}"))
    return rows


def _pictures(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    def points(key: str) -> list[tuple[float, float]]:
        return [(float(entry["step"]), float(entry[key])) for entry in entries if entry.get(key) is not None]

    spikes = [float(entry["step"]) for entry in entries if "spike" in entry]
    loss = [
        Curve(name="training", points=points("loss"), color=_BLUE),
        Curve(name="evaluation", points=points("eval_loss"), color=_RED, dots=True),
    ]
    pictures = [Picture(title="loss (nats per token)", curves=loss, marks=spikes)]
    names = (("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tokens_per_second", "targets/s"))
    for key, title in names:
        pictures.append(Picture(title=title, curves=[Curve(name=title, points=points(key), color=_BLUE)]))
    return [picture.as_svg() for picture in pictures]


def _forecast(output: Path) -> str:
    said, seen = read_json(output / FORECAST) or {}, read_json(output / MEASURED) or {}
    rows: list[Row] = []
    room = said.get("hardware", {})
    kinds = (
        ("host memory, all ranks", "host_bytes", room.get("ram_bytes")),
        ("device memory, one rank", "device_bytes", room.get("gpu_bytes")),
        ("disk", "disk_bytes", room.get("disk_bytes")),
    )
    for what, key, capacity in kinds:
        if said.get(key) or seen.get(key):
            cells = (said.get(key), seen.get(key), capacity)
            rows.append((what, *("–" if not cell else f"{in_gib(cell)} GiB" for cell in cells)))
    table = _table(rows, head=("", "forecast", "measured", "there was"))
    items = sorted(said.get("host_items", {}).items(), key=lambda item: -item[1])
    detail = _table((name, f"{in_gib(size)} GiB") for name, size in items)
    return table + (f"<details><summary>host memory by item, as forecast</summary>{detail}</details>" if detail else "")


def _events(entries: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for entry in entries:
        step = f"{entry['step']:,}"
        if "saved" in entry:
            rows.append((step, "saved", f"{entry['saved']}, {entry['seconds']:.1f} s"))
        elif "spike" in entry:
            rows.append((step, "loss spike", f"{entry['spike']:.4f} since step {entry['since']}, usually {entry['usual']:.4f}"))
        elif "skipped" in entry:
            cause = "the scaled gradient" if entry["skipped"] == "scale" else f"the {entry['skipped']}"
            where = f": {entry['diagnosis']}" if "diagnosis" in entry else ""
            rows.append((step, "skipped", f"{cause} was not finite{where}"))
    return rows


def _settings(output: Path) -> str:
    try:
        return (output / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        return ""


def _samples(config: TuneConfig, output: Path) -> str:
    """What the newest checkpoint writes after the prompts asked for."""
    if not config.log.sample_prompts or not step_folders(output / CHECKPOINTS):
        return ""
    from finetune.machine.quiet import quiet

    try:
        with quiet():
            from finetune.trained.generate import Completer, Prompt, Sampling

            prompts = [Prompt(text=text, place="log.sample_prompts") for text in config.log.sample_prompts]
            completer = Completer(output)
            texts = list(completer.complete(prompts, Sampling(max_new_tokens=_SAMPLE_TOKENS)))
    except FinetuneError as error:
        return f'<p class="dim">no samples: {escape(str(error))}</p>'
    shown = (
        f'<pre><span class="prompt">{escape(prompt.shown)}</span><span class="completion">{escape(text)}</span></pre>'
        for prompt, text in zip(prompts, texts, strict=True)
    )
    return f'<p class="dim">{escape(completer.folder.name)}, likeliest tokens</p>{"".join(shown)}'
