"""What a run shows: a bar in a terminal, plain lines elsewhere, ``log.jsonl``, TensorBoard events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from finetune.config import LogConfig
from finetune.folders import LOG
from finetune.types import StepOutcome


class _Figures(ProgressColumn):
    """Loss and speed of the newest steps."""

    def render(self, task: Task) -> Text:
        loss, speed = task.fields.get("loss"), task.fields.get("speed")
        if loss is None or speed is None:
            return Text("starting …", style="dim")
        return Text.assemble("loss ", (f"{loss:.3f}", "bold cyan"), f" {speed:,.0f} tokens/s")


class RunProgress:
    """Shows and records the steps of one run; only rank 0 has one. Use as a context manager."""

    def __init__(self, console: Console, output: Path, config: LogConfig, *, steps: int, done: int) -> None:
        self._console = console
        self._every = config.every
        self._steps = steps
        self._log_path = output / LOG
        _forget_after(self._log_path, done)
        self._log = self._log_path.open("a", encoding="utf-8")
        self._events = _events(output / "tensorboard", done) if config.tensorboard else None
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Figures(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True),
            TextColumn("left", style="dim"),
            console=console,
            disable=not console.is_terminal,
            refresh_per_second=4,
            redirect_stdout=False,  # what libraries print belongs in the rank's log
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("train", total=steps, completed=done)
        self._window: list[StepOutcome] = []
        self._window_began = self._began = time.monotonic()
        self._first_step = done

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        self._log.close()
        if self._events is not None:
            self._events.close()

    def step(self, step: int, outcome: StepOutcome, rate: float, tokens: int) -> None:
        """Record one step: ``step`` steps are done, ``tokens`` target tokens were taken in all."""
        self._window.append(outcome)
        if outcome.skipped:
            self.note(f"step {step}: the {outcome.skipped} is not a finite number; skipped on all ranks", style="yellow")
            self._write({"step": step, "skipped": outcome.skipped}, {})
        good = [seen for seen in self._window if not seen.skipped]
        elapsed = max(time.monotonic() - self._window_began, 1e-9)
        speed = sum(seen.num_targets for seen in self._window) / elapsed
        loss = sum(seen.loss for seen in good) / len(good) if good else None
        if loss is not None:
            self._bar.update(self._task, completed=step, loss=loss, speed=speed)
        if step % self._every and step != self._steps:
            return
        if loss is not None:
            figures = {"loss": loss, "lr": rate, "grad_norm": good[-1].grad_norm, "tokens_per_second": speed}
            self._write({"step": step, **figures, "tokens": tokens}, {f"train/{key}": value for key, value in figures.items()})
            if not self._console.is_terminal:
                self._line(step, f"loss {loss:.4f}  lr {rate:.2e}  {speed:,.0f} tokens/s  {self._left(step)} left")
        self._window.clear()
        self._window_began = time.monotonic()

    def evaluation(self, step: int, loss: float) -> None:
        """Record the loss on held-out text."""
        self._write({"step": step, "eval_loss": loss}, {"eval/loss": loss})
        self._line(step, f"evaluation loss {loss:.4f}")
        self._window_began = time.monotonic() if not self._window else self._window_began

    def saved(self, step: int, path: Path, seconds: float) -> None:
        """Record a save."""
        self._write({"step": step, "saved": str(path), "seconds": round(seconds, 3)}, {})
        self._line(step, f"saved {path} in {seconds:.1f} s")

    def note(self, text: str, style: str = "dim") -> None:
        """A line for the reader."""
        self._console.print(f"[{style}]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def _line(self, step: int, text: str) -> None:
        self._console.print(f"step {step}/{self._steps}  {escape(text)}", highlight=False, soft_wrap=True)

    def _left(self, step: int) -> str:
        per_step = (time.monotonic() - self._began) / max(1, step - self._first_step)
        seconds = round(per_step * (self._steps - step))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def _write(self, line: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        """Append one line, flushed: a reader that follows the file sees whole lines soon after they happen."""
        stamped = {**line, "seconds_since_start": round(time.monotonic() - self._began, 3)}
        self._log.write(json.dumps(stamped) + "\n")
        self._log.flush()
        if self._events is not None:
            for name, value in scalars.items():
                self._events.add_scalar(name, value, line["step"])


def _events(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1 if done else None, flush_secs=30)


def _forget_after(log: Path, step: int) -> None:
    """Drop lines of steps that a resumed run takes again, and a line cut short by a kill."""
    if not log.is_file():
        return
    kept = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and entry.get("step", 0) <= step:
            kept.append(line + "\n")
    log.write_text("".join(kept), encoding="utf-8")


def read_log(log: Path) -> list[dict[str, Any]]:
    """All whole lines of a run's log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
