"""Second act: ``tessera-finetune tune`` as a child process, followed through the log file it writes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.live import Live

from examples.demo import screen
from examples.demo.children import Child, Children, PartFailed, command, describe_exit

CONFIG = Path("examples/demo.yaml")
PLAIN_INTERVAL_SECONDS = 10.0
MAX_MINUTES = "2.5"
"""On a slow machine training stops here, with a checkpoint of what it has learned so far."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What training left behind."""

    output: Path
    first_loss: float
    last_loss: float
    tokens_per_second: float
    seconds: float


def train(console: Console, children: Children, corpus: Path, output: Path) -> Trained:
    """Train to the end of ``examples/demo.yaml`` and show the loss on the way.

    Raises:
        PartFailed: training ended with an error, or without a single step.
    """
    argv = [*command("tessera-finetune", "finetune"), "tune", str(CONFIG)]
    argv += ["--run.precision", "bf16" if has_bf16_arithmetic() else "fp32", "--run.max_minutes", MAX_MINUTES]
    argv += ["--data.train", str(corpus), "--run.output", str(output), "--log.every", "2", "--save.max_shard_mib", "4"]
    started = time.monotonic()
    child = children.start("tessera-finetune", argv)
    follow = _follow_live if console.is_terminal else _follow_plain
    follow(console, child, output / "log.jsonl", started)
    if (code := child.process.wait()) != 0:
        raise PartFailed(f"training ended with {describe_exit(code)}", child.log)
    steps = list(read_steps(output / "log.jsonl"))
    if not steps:
        raise PartFailed("training ended without a step", child.log)
    speeds = sorted(step["tokens_per_second"] for step in steps)
    return Trained(output, steps[0]["loss"], steps[-1]["loss"], speeds[len(speeds) // 2], time.monotonic() - started)


def has_bf16_arithmetic(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 in hardware; where it does not, fp32 is faster."""
    words = cpuinfo.read_text().split() if cpuinfo.exists() else []
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)


def read_steps(log: Path) -> Iterator[dict[str, float]]:
    """The training steps of a run's JSONL log; a line that is being written is left for the next time."""
    if not log.exists():
        return
    for line in log.read_text().splitlines(keepends=True):
        if line.endswith("\n") and "loss" in (entry := json.loads(line)) and "tokens_per_second" in entry:
            yield entry


def _facts(steps: list[dict[str, float]], elapsed: float) -> str:
    """One line: how far, how good, how fast."""
    if not steps:
        return f"preparing · {elapsed:.0f} s"
    last = steps[-1]
    return f"step {last['step']:.0f} · loss {last['loss']:.2f} · {last['tokens_per_second']:,.0f} tokens/s · {elapsed:.0f} s"


def _follow_live(console: Console, child: Child, log: Path, started: float) -> None:
    """Redraw the curve four times a second until the child ends."""
    with Live(console=console, auto_refresh=False) as live:
        while True:
            ended = child.process.poll() is not None
            steps = list(read_steps(log))
            losses = [step["loss"] for step in steps]
            facts = _facts(steps, time.monotonic() - started)
            status = "" if ended else child.last_line()
            live.update(screen.training_panel(losses, facts, status, console.width), refresh=True)
            if ended:
                return
            time.sleep(0.25)


def _follow_plain(console: Console, child: Child, log: Path, started: float) -> None:
    """One line every ten seconds until the child ends, then the curve."""
    next_line = started + PLAIN_INTERVAL_SECONDS
    said = ""
    while child.process.poll() is None:
        if time.monotonic() >= next_line:
            elapsed, steps, status = time.monotonic() - started, list(read_steps(log)), child.last_line()
            # What takes long is said once, and then that it still goes on.
            screen.detail(console, _facts(steps, elapsed) + ("" if steps or status == said else f" · {status}"))
            said = status
            next_line += PLAIN_INTERVAL_SECONDS
        time.sleep(0.25)
    steps = list(read_steps(log))
    if steps:
        losses = [step["loss"] for step in steps]
        console.print(screen.training_panel(losses, _facts(steps, time.monotonic() - started), "", console.width))
