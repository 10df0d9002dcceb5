"""``report.html``: one file that tells what a run did; it loads nothing from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from finetune.config import TuneConfig
from finetune.errors import FinetuneError
from finetune.machine import inventory
from finetune.observe.plots import as_svg, panels_of
from finetune.output.folder import CHECKPOINTS, LOG, step_folders
from finetune.output.log import read_log
from finetune.output.records import FORECAST, MEASURED, read_json
from finetune.units import in_gib

FILE: Final = "report.html"
_TEMPLATE: Final = "report.html.jinja"
_SAMPLE_TOKENS: Final = 64

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
    forecast, items = _forecast(output)
    page = (
        _environment()
        .get_template(_TEMPLATE)
        .render(
            title=f"Training run {output.name}",
            subtitle=_subtitle(entries),
            failure=failure,
            result=_result(entries),
            curves=as_svg(panels_of(entries)),
            forecast=forecast,
            items=items,
            samples=_samples(config, output),
            events=_events(entries),
            settings=_settings(output),
        )
    )
    path = output / FILE
    path.write_text(page, encoding="utf-8")
    return path


def _environment() -> Environment:
    """Whatever a template shows is escaped; what it names must have been given."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.tests["number_like"] = lambda cell: cell[:1].isdigit()
    return environment


def _subtitle(entries: Sequence[Mapping[str, Any]]) -> str:
    versions = ", ".join(f"{name} {inventory.version_of(name)}" for name in ("torch", "deepspeed", "transformers"))
    last = max(int(entry["step"]) for entry in entries)
    return f"{last:,} steps, written {datetime.now().astimezone():%Y-%m-%d %H:%M %Z}; {inventory.cpu_description()}; {versions}"


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


def _forecast(output: Path) -> tuple[list[Row], list[Row]]:
    """What was said, seen and there, by resource; and the items that the forecast of host memory is made of."""
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
    items = sorted(said.get("host_items", {}).items(), key=lambda item: -item[1])
    return rows, [(name, f"{in_gib(size)} GiB") for name, size in items]


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


@dataclass(frozen=True, slots=True)
class _Samples:
    """What a checkpoint writes, or why there is nothing."""

    heading: str
    texts: Sequence[tuple[str, str]] = ()
    """Prompt and completion."""


def _samples(config: TuneConfig, output: Path) -> _Samples | None:
    """What the newest checkpoint writes after the prompts asked for; ``None`` if there are none, or no checkpoint."""
    if not config.log.sample_prompts or not step_folders(output / CHECKPOINTS):
        return None
    from finetune.machine.quiet import quiet

    try:
        with quiet():
            from finetune.trained.generate import Completer, Prompt, Sampling

            prompts = [Prompt(text=text, place="log.sample_prompts") for text in config.log.sample_prompts]
            completer = Completer(output)
            texts = list(completer.complete(prompts, Sampling(max_new_tokens=_SAMPLE_TOKENS)))
    except FinetuneError as error:
        return _Samples(f"no samples: {error}")
    shown = [(prompt.shown, text) for prompt, text in zip(prompts, texts, strict=True)]
    return _Samples(f"{completer.folder.name}, likeliest tokens", shown)
