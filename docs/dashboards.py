"""Draws the dashboards of ``deploy/grafana``: ``docs/dashboard-training.svg`` and ``docs/dashboard-serving.svg``.

``make dashboard-pictures`` runs it: a small GPT is trained on this Python's library, then served on two ranks to callers of
several kinds, while a Prometheus on loopback scrapes both (Debian's package ``prometheus``; no service starts). Each panel's
queries are asked of it, and drawn where the panel is, with its title, unit and legends. It is no Grafana that draws: what is to
be seen is what the queries answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import shutil
import socket
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))  # the packages as they lie here, installed or not

from examples.demo import corpus, training  # noqa: E402
from examples.demo.children import Children, command, wait_for_line  # noqa: E402
from finetune.observe.svg import PAGE_SETTINGS, page_element  # noqa: E402
from serve.client import AsyncClient, TesseraError  # noqa: E402

DOCS, GRAFANA = REPOSITORY / "docs", REPOSITORY / "deploy/grafana"
PICTURES = {"training.json": "dashboard-training.svg", "tessera.json": "dashboard-serving.svg"}
MOST_BYTES = 400_000
CHOSEN = {"$model": ".*", "$instance": ".*", "$__rate_interval": "15s"}
TRAINING_MINUTES, SERVING_SECONDS = "1.5", 90.0
INCHES, HIGH, ROOM = 0.6, 0.42, (0.55, 0.62)
"""One of Grafana's units across, and down; what a panel leaves free at its left and below it for numbers and legend."""
STYLE = "svg { color: #374151 } @media (prefers-color-scheme: dark) { svg { color: #d1d5db } }"
COLOURS = ("#16a34a", "#d97706", "#3b82f6", "#dc2626", "#9333ea", "#0891b2", "#ca8a04", "#be185d")
PROMPTS = ("def read_config(path):\n", "class Connection:\n", "    def close(self):\n", "import os\nimport sys\n")


@dataclass(frozen=True)
class Series:
    """One curve: its legend, and its points in seconds since the picture's beginning."""

    legend: str
    points: tuple[tuple[float, float], ...]


Ask = Callable[[str], Sequence[tuple[dict[str, str], Sequence[tuple[float, float]]]]]
"""An expression's series: labels, and points of time and value."""


def main() -> None:
    if shutil.which("prometheus") is None:
        sys.exit("the dashboards' queries are asked of Debian's prometheus: apt-get install prometheus")
    out = Path("demo-out/dashboards")
    shutil.rmtree(out, ignore_errors=True)
    with Children(out / "logs") as children:
        run, server, prometheus = (free_address() for _ in range(3))
        watch(children, out, {"run:9401": run, "server:9400": server}, prometheus)
        began = time.time()
        train(children, out, run)
        made = {"training.json": drawn_from(prometheus, "training.json", began)}
        began = time.time()
        serve(children, out, server)
        made["tessera.json"] = drawn_from(prometheus, "tessera.json", began)
    for name, picture in made.items():
        if len(picture) > MOST_BYTES:
            sys.exit(f"{PICTURES[name]} would have {len(picture)} bytes, more than {MOST_BYTES}; nothing was written")
    for name, picture in made.items():
        (DOCS / PICTURES[name]).write_text(picture, encoding="utf-8")


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def watch(children: Children, out: Path, targets: dict[str, str], address: str) -> None:
    """Start a Prometheus that scrapes each address every second, under another name; wait until it answers."""
    static = [{"targets": [at], "labels": {"instance": name}} for name, at in targets.items()]
    scrape = {"job_name": "tessera", "static_configs": static}
    config = out / "prometheus.yml"
    config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}))  # JSON is YAML too
    words = [f"--config.file={config}", f"--storage.tsdb.path={out / 'data'}", f"--web.listen-address={address}"]
    child = children.start("prometheus", ["prometheus", *words, "--log.level=warn"])
    while True:
        child.require_alive()
        with contextlib.suppress(OSError):
            answer(address, "/-/ready")
            return
        time.sleep(0.1)


def train(children: Children, out: Path, address: str) -> None:
    """Train the demo's model, with its metrics at this address."""
    text = corpus.gather(out / "text")
    words = [*command("tessera-finetune", "finetune"), "tune", str(training.CONFIG), "--run.max_minutes", TRAINING_MINUTES]
    words += ["--data.train", str(text.folder), "--run.output", str(out / "run"), "--log.metrics_port", address.split(":")[1]]
    words += [
        "--run.precision",
        "bf16" if training.has_bf16_arithmetic() else "fp32",
        "--log.every",
        "1",
        "--save.every",
        "100",
    ]
    child = children.start("tessera-finetune", words)
    if child.process.wait() != 0:
        sys.exit(f"the run failed: {child.log}")


def serve(children: Children, out: Path, address: str) -> None:
    """Serve it to callers for a while."""
    words = [*command("tessera-serve", "serve"), "--model", str(out / "run" / "checkpoints"), "--tensor-parallel-size", "2"]
    words += ["--port", "0", "--metrics-port", address.split(":")[1], "--kv-cache-gib", "0.02", "--max-num-seqs", "8"]
    child = children.start("tessera-serve", words)
    facts = dict(pair.split("=", 1) for pair in wait_for_line(child, "tessera ready ", 240.0).split() if "=" in pair)
    asyncio.run(load(facts["grpc"]))


async def load(address: str) -> None:
    """Six callers, and eighteen more in the middle third."""
    ends = time.monotonic() + SERVING_SECONDS
    async with AsyncClient(address, timeout=60.0) as client, asyncio.TaskGroup() as callers:
        for number in range(6):
            callers.create_task(call(client, number, 0.0, ends))
        for number in range(6, 24):
            callers.create_task(call(client, number, SERVING_SECONDS / 3, ends - SERVING_SECONDS / 3))


async def call(client: AsyncClient, number: int, after: float, ends: float) -> None:
    """One caller: prompts that begin alike, answers of several lengths, some given up and now and then a mistake."""
    await asyncio.sleep(after)
    turn = 0
    while time.monotonic() < ends:
        turn += 1
        prompt = PROMPTS[number % 4] * (1 + turn % 5) + f"# {turn}\n"
        stream = client.stream(prompt, max_new_tokens=16 + 48 * (turn % 4), temperature=0.7, seed=turn)
        async with stream:
            seen = 0
            async for _ in stream:
                seen += 1
                if turn % 11 == 10 and seen == 6:
                    break
        if turn % 7 == 6:
            with contextlib.suppress(TesseraError):
                await client.generate(prompt, max_new_tokens=1_000_000)
        await asyncio.sleep(0.05)


def answer(address: str, path: str, **words: str) -> str:
    """What Prometheus answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business with loopback
    query = f"?{urllib.parse.urlencode(words)}" if words else ""
    with opener.open(f"http://{address}{path}{query}", timeout=30) as reply:
        text: str = reply.read().decode()
    return text


def drawn_from(prometheus: str, name: str, began: float) -> str:
    """A dashboard of the time since then."""
    span = time.time() - began
    told = {"start": f"{began:.3f}", "end": f"{began + span:.3f}", "step": f"{max(1.0, span / 70):.3f}"}

    def ask(expression: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        found = json.loads(answer(prometheus, "/api/v1/query_range", query=expression, **told))["data"]["result"]
        return [(one["metric"], [(float(at) - began, float(value)) for at, value in one["values"]]) for one in found]

    return drawn(json.loads((GRAFANA / name).read_text(encoding="utf-8")), ask, span)


def drawn(dashboard: dict[str, Any], ask: Ask, span: float) -> str:
    """A dashboard as one SVG, each panel where it says that it is."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 24 * INCHES, rows * HIGH + 0.3  # legends of the last row
    style: Any = {**PAGE_SETTINGS, "font.size": 8, "axes.prop_cycle": cycler(color=COLOURS)}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height))
        for panel in panels:
            place = panel["gridPos"]
            left, below = place["x"] * INCHES + ROOM[0], height - (place["y"] + place["h"]) * HIGH + ROOM[1]
            w, h = place["w"] * INCHES - ROOM[0] - 0.15, place["h"] * HIGH - ROOM[1] - 0.35
            if panel["type"] == "stat":
                left, below, w, h = left - ROOM[0] + 0.1, below - ROOM[1] + 0.15, w + 0.4, h + ROOM[1] - 0.15
            axes = figure.add_axes((left / width, below / height, w / width, h / height))
            (number if panel["type"] == "stat" else curves)(axes, panel, series_of(panel, ask), span)
        picture = page_element(figure)
    picture = picture.replace(">", f"><style>{STYLE}</style>", 1)
    # A hundredth of a point is enough.
    picture = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), picture)
    return "\n".join(line.rstrip() for line in picture.splitlines()) + "\n"


def series_of(panel: dict[str, Any], ask: Ask) -> list[Series]:
    """What a panel's queries answer, but for what is no number."""
    found = []
    for target in panel["targets"]:
        expression = re.sub(r"\$\w+", lambda match: CHOSEN[match[0]], target["expr"])
        for labels, values in ask(expression):
            legend = legend_of(target["legendFormat"], labels)
            points = tuple((at, value) for at, value in values if math.isfinite(value))
            if points:
                found.append(Series(legend, points))
    return found


def legend_of(form: str, labels: dict[str, str]) -> str:
    """A legend with the values of labels in the places of their names."""
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), form)


def number(axes: Any, panel: dict[str, Any], series: Sequence[Series], span: float) -> None:
    """The last value, in large figures."""
    axes.set_axis_off()
    axes.set_title(panel["title"], loc="left", fontsize=8, fontweight="bold")
    said = told(series[0].points[-1][1], unit_of(panel)) if series else "No data"
    axes.text(0.5, 0.45, said, ha="center", va="center", fontsize=22, color=COLOURS[0])


def curves(axes: Any, panel: dict[str, Any], series: Sequence[Series], span: float) -> None:
    """Values over time, from 0 up as the panel says."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_title(panel["title"], loc="left", fontsize=8, fontweight="bold")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.set_xlim(0.0, span)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7, length=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{int(at) // 60}:{int(at) % 60:02}"))
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: told(value, unit_of(panel))))
    if not series:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "No data", ha="center", va="center", transform=axes.transAxes)
        return
    for each in series:
        at, values = zip(*each.points, strict=True)
        axes.plot(at, values, label=each.legend or "value", linewidth=1.1, marker="" if len(at) > 1 else "o", markersize=3)
    highest = max(value for each in series for _, value in each.points)
    axes.set_ylim(0.0, 1.05 * highest if highest > 0 else 1.0)
    if unit_of(panel) == "bytes" and highest > 0:
        fifth = 2.0 ** math.ceil(math.log2(highest / 5))
        axes.set_yticks([fifth * place for place in range(6) if fifth * place <= 1.05 * highest])
    if any(each.legend for each in series):
        longest = max(len(each.legend) for each in series)
        columns = 4 if longest < 14 else 3 if longest < 20 else 2
        axes.legend(
            loc="upper left", bbox_to_anchor=(-0.02, -0.12), ncols=columns, fontsize=6.5, frameon=False, handlelength=1.2
        )


def unit_of(panel: dict[str, Any]) -> str:
    unit: str = panel["fieldConfig"]["defaults"]["unit"]
    return unit


def told(value: float, unit: str) -> str:
    """A value as Grafana tells one of this unit."""
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "sci":
        return f"{value:.2e}"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{1000 * value:.3g} ms" if abs(value) >= 1e-3 else f"{1e6 * value:.3g} µs"
    if unit == "s" and abs(value) >= 60:
        return f"{value / 60:.3g} min"
    base = 1024.0 if unit == "bytes" else 1000.0
    steps = ("", "Ki", "Mi", "Gi", "Ti") if unit == "bytes" else ("", "K", "M", "G", "T")
    power = min(4, max(0, int(math.log(abs(value), base)))) if value else 0
    word = {"bytes": "B", "reqps": " req/s", "s": " s", "celsius": " °C", "watt": " W", "hertz": " Hz"}.get(unit, "")
    small = f"{value / base**power:.3g}"
    return f"{small} {steps[power]}{word.strip()}" if unit in ("bytes", "watt", "hertz") else f"{small}{steps[power]}{word}"


if __name__ == "__main__":
    main()
