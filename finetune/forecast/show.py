"""A forecast for the reader: three lines before a run, a table for ``plan``, a line beside the measurement at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from finetune.config import TuneConfig
from finetune.forecast.advice import Advice
from finetune.forecast.estimate import Forecast
from finetune.units import in_gib


def summary(found: Forecast) -> list[str]:
    """Two or three lines: memory and disk against what there is, time if it is known."""
    hardware, layout = found.hardware, found.layout
    ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    lines = [
        f"needs {in_gib(found.host_bytes)} of {in_gib(hardware.ram_bytes)} GiB host memory ({ranks}, {found.need.host_phase})"
    ]
    if found.device_bytes:
        room = "an unknown amount of" if hardware.gpu_bytes is None else f"{in_gib(hardware.gpu_bytes)} GiB"
        lines[0] += f", {in_gib(found.device_bytes)} of {room} device memory a rank ({found.need.device_phase})"
    if found.nvme_bytes:
        lines.append(f"needs {_of(found.nvme_bytes, hardware.nvme_bytes)} on the NVMe path")
    kept = "two saves" if found.saves is None else f"{found.saves} save{'s' if found.saves > 1 else ''}"
    lines.append(
        f"needs {_of(found.disk_bytes, hardware.disk_bytes)} on the disk for {kept} and the data: checkpoints of "
        f"{in_gib(found.checkpoint_bytes)} GiB"
        + (f", resume states of {in_gib(found.resume_bytes)} GiB" if found.resume_bytes else ", no resume states")
    )
    if found.pace is not None:
        pace = found.pace
        lines.append(f"about {pace.step_seconds:.2f} s a step, {pace.tokens_per_second:,.0f} tokens/s ({pace.source})")
    return lines


def _of(needed: int, room: int | None) -> str:
    return f"{in_gib(needed)} of {'?' if room is None else in_gib(room)} GiB"


def show_plan(found: Forecast, config: TuneConfig, advice: Sequence[Advice], console: Console) -> None:
    """The whole forecast as tables, what does not fit, and what to change."""
    facts, layout = found.facts, found.layout
    frozen = f", {facts.trained:,} of them trained" if facts.frozen else ""
    where = f"ZeRO-{layout.stage}" + (f", {layout.pipeline} pipeline stages" if layout.pipeline > 1 else "")
    console.print(
        f"{facts.total:,} parameters{frozen}; {where}; {layout.ranks} rank{'s' if layout.ranks > 1 else ''} on "
        f"{layout.device}; micro-batches of {config.batch.micro} x {config.data.seq_len} tokens, "
        f"{config.step_samples} samples a step",
        highlight=False,
        soft_wrap=True,
    )
    if found.device_bytes:
        _items(console, f"device memory of one rank, {found.need.device_phase}", found.need.device, found.hardware.gpu_bytes)
    title = (
        f"host memory of all {layout.ranks} ranks, {found.need.host_phase}"
        if layout.ranks > 1
        else (f"host memory, {found.need.host_phase}")
    )
    _items(console, title, found.host_items, found.hardware.ram_bytes)
    disk = {"one checkpoint": found.checkpoint_bytes, "one resume state": found.resume_bytes}
    _items(console, "disk", disk, None, total=False)
    for line in summary(found)[1:]:
        console.print(line, highlight=False, soft_wrap=True)
    if found.pace is None:
        measurable = found.hardware.device == "cpu" and not found.hardware.described
        offer = "plan --measure measures this machine, and " if measurable else ""
        console.print(
            f"seconds a step: not calibrated; {offer}a run in this folder remembers its own", highlight=False, soft_wrap=True
        )
    shortages = found.shortages()
    if not shortages:
        console.print("[green]fits[/]")
        return
    for shortage in shortages:
        console.print(f"[red]does not fit[/]: {escape(shortage)}", highlight=False, soft_wrap=True)
    show_advice(advice, console)


def show_advice(advice: Sequence[Advice], console: Console) -> None:
    """What to change, as lines of the run's file."""
    if not advice:
        console.print(
            "no change of this run's settings makes it fit: take a smaller model, shorter samples, more ranks or memory"
        )
        return
    console.print("any one of these makes it fit:", highlight=False)
    for option in advice:
        need = f"then {in_gib(option.forecast.host_bytes)} GiB host memory"
        if option.forecast.device_bytes:
            need = f"then {in_gib(option.forecast.device_bytes)} GiB device memory a rank, {need[5:]}"
        console.print()
        for line in option.as_yaml().splitlines():
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
        console.print(f"  [dim]# {escape(need)}[/]", highlight=False, soft_wrap=True)


def _items(console: Console, title: str, items: Mapping[str, int], room: int | None, *, total: bool = True) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, show_edge=False, box=None)
    table.add_column()
    table.add_column(justify="right")
    for name, size in sorted(items.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{in_gib(size)} GiB")
    if total:
        table.add_row("in all", f"{in_gib(sum(items.values()))} GiB" + ("" if room is None else f" of {in_gib(room)} GiB"))
    console.print(table)
