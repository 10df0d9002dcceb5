"""What a run shows while it lasts: a bar in a terminal, plain lines elsewhere, and the same figures wherever they are kept."""

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

from finetune.config import TuneConfig
from finetune.engines.protocol import StepOutcome
from finetune.observe.gauges import Gauges
from finetune.observe.metrics import TrainMetrics
from finetune.observe.sinks import Sinks
from finetune.observe.spikes import Spike
from finetune.output.folder import LOG
from finetune.output.log import forget_after
from finetune.units import in_gib


class _Figures(ProgressColumn):
    """Loss, gradient, speed and memory of the newest steps; what a narrow terminal cuts off counts least."""

    def render(self, task: Task) -> Text:
        loss, norm, figures = (task.fields.get(name) for name in ("loss", "norm", "figures"))
        if loss is None or norm is None or figures is None:
            return Text("starting …", style="dim")
        text = Text.assemble("loss ", (f"{loss:.3f}", "bold cyan"), f" norm {norm:.2g} {speed_in_words(figures)}")
        if "mfu" in figures:
            text.append(f" MFU {figures['mfu']:.0%}", style="dim")
        memory = figures.get("device_memory_bytes", figures.get("memory_bytes"))
        if memory is not None:
            text.append(f" {in_gib(memory)} GiB", style="dim")
        return text


class RunProgress:
    """Shows and records the steps of one run; only rank 0 has one. Use as a context manager.

    Args:
        gauges: what is measured beside the steps themselves.
    """

    def __init__(self, console: Console, config: TuneConfig, gauges: Gauges, *, steps: int, done: int) -> None:
        self._console = console
        self._config = config
        self._every = config.log.every
        self._steps = steps
        self._gauges = gauges
        output = Path(config.run.output)
        self._log_path = output / LOG
        forget_after(self._log_path, done)
        self._metrics = TrainMetrics(model_name=output.resolve().name)
        self._metrics.began(step=done, steps=steps)
        self._endpoint = None if config.log.metrics_port is None else self._metrics.listen(config.log.metrics_port)
        self._log = self._log_path.open("a", encoding="utf-8")
        self._sinks = Sinks(config, done=done)
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
        self._seconds: list[float] = []
        """Durations of the window's steps, without evaluations and saves between them."""
        self._durations: list[float] = []
        """Durations of all steps of this process, the same way."""
        self._began = self._last = time.monotonic()
        self._first_step = done

    def __enter__(self) -> Self:
        if self._endpoint is not None:
            self._console.print(f"metrics: {self._endpoint.url}", highlight=False)
        self._bar.start()
        self._last = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()
        self._gauges.keep(self._config, self._durations)
        self._log.close()
        self._sinks.close()
        if self._endpoint is not None:
            self._endpoint.close()

    def step(self, step: int, outcome: StepOutcome, rate: float, tokens: int) -> None:
        """Record one step: ``step`` steps are done, ``tokens`` target tokens were taken in all."""
        seconds = self._lap()
        self._window.append(outcome)
        self._seconds.append(seconds)
        self._durations.append(seconds)
        if outcome.skipped:
            self.note(f"step {step}: {skip_in_words(outcome)}; skipped on all ranks", style="yellow")
            where = {} if outcome.diagnosis is None else {"diagnosis": outcome.diagnosis}
            self._write({"step": step, "skipped": outcome.skipped, **where}, {})
            self._metrics.skipped(step, outcome.skipped)
        else:
            self._metrics.stepped(
                step,
                loss=outcome.loss,
                rate=rate,
                grad_norm=outcome.grad_norm,
                tokens=outcome.num_targets,
                seconds=seconds,
            )
        good = [seen for seen in self._window if not seen.skipped]
        loss = sum(seen.loss for seen in good) / len(good) if good else None
        due = step % self._every == 0 or step == self._steps
        figures = self._figures() if due or self._console.is_terminal else {}
        if loss is not None and figures:
            self._bar.update(
                self._task,
                completed=step,
                loss=loss,
                norm=good[-1].grad_norm,
                figures=figures,
            )
        if not due:
            return
        if loss is not None:
            whole = {"loss": loss, "lr": rate, "grad_norm": good[-1].grad_norm, **figures}
            self._write(
                {"step": step, **whole, "tokens": tokens, "seconds_left": round(self._seconds_left(step))},
                {f"train/{key}": value for key, value in whole.items()},
            )
            self._metrics.interval(figures)
            if not self._console.is_terminal:
                norm = f"norm {good[-1].grad_norm:.3g}"
                self._line(step, f"loss {loss:.4f}  lr {rate:.2e}  {norm}  {_in_words(figures)}  {self._left(step)} left")
        self._window.clear()
        self._seconds.clear()

    def evaluation(self, step: int, loss: float) -> None:
        """Record the loss on held-out text."""
        self._write({"step": step, "eval_loss": loss}, {"eval/loss": loss})
        self._metrics.evaluated(loss)
        self._line(step, f"evaluation loss {loss:.4f}")
        self._lap()

    def saved(self, step: int, path: Path, seconds: float) -> None:
        """Record a checkpoint that was saved to ``path`` in so many seconds."""
        self._write({"step": step, "saved": str(path), "seconds": round(seconds, 3)}, {})
        self._metrics.saved(seconds)
        self._line(step, f"saved {path} in {seconds:.1f} s")
        self._lap()

    def spike(self, spike: Spike, last_good: Path | None) -> None:
        """Record a rise of the loss, and the last save before it."""
        good = "none was saved before it" if last_good is None else f"last checkpoint before it: {last_good}"
        self._write({"step": spike.step, "spike": spike.loss, "usual": spike.usual, "since": spike.first_step}, {})
        self._metrics.spiked()
        self.note(f"{spike}; {good}", style="yellow")

    def note(self, text: str, style: str = "dim") -> None:
        """A line for the reader."""
        self._console.print(f"[{style}]{escape(text)}[/]", highlight=False, soft_wrap=True)

    def _lap(self) -> float:
        """Seconds since the last call."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        return max(seconds, 1e-9)

    def _figures(self) -> dict[str, float]:
        """Speed and memory over the window's steps."""
        elapsed = sum(self._seconds)
        targets = sum(seen.num_targets for seen in self._window)
        figures = {"tokens_per_second": targets / elapsed, "step_seconds": elapsed / len(self._seconds)}
        return {**figures, **self._gauges.read(len(self._seconds) / elapsed)}

    def _line(self, step: int, text: str) -> None:
        self._console.print(f"step {step}/{self._steps}  {escape(text)}", highlight=False, soft_wrap=True)

    def _seconds_left(self, step: int) -> float:
        per_step = (time.monotonic() - self._began) / max(1, step - self._first_step)
        return per_step * (self._steps - step)

    def _left(self, step: int) -> str:
        minutes, seconds = divmod(round(self._seconds_left(step)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"

    def _write(self, line: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        """Append one line, flushed: a reader that follows the file sees whole lines soon after they happen."""
        stamped = {**line, "seconds_since_start": round(time.monotonic() - self._began, 3)}
        self._log.write(json.dumps(stamped) + "\n")
        self._log.flush()
        self._sinks.write(line["step"], scalars)


def skip_in_words(outcome: StepOutcome) -> str:
    """Why a step was skipped, and where that began if it is known."""
    where = "" if outcome.diagnosis is None else f"; it began with {outcome.diagnosis}"
    if outcome.skipped == "scale":
        return f"a gradient overflowed fp16, so the loss is scaled by half as much from now on{where}"
    return f"the {outcome.skipped} is not a finite number{where}"


def speed_in_words(figures: Mapping[str, float]) -> str:
    """All tokens a second, and those of them that are targets."""
    return f"{figures['all_tokens_per_second']:,.0f} tokens/s ({figures['tokens_per_second']:,.0f} targets)"


def _in_words(figures: Mapping[str, float]) -> str:
    parts = [speed_in_words(figures)]
    if "mfu" in figures:
        parts.append(f"MFU {figures['mfu']:.1%}")
    if "device_memory_bytes" in figures:
        parts.append(f"{in_gib(figures['device_memory_bytes'])} GiB device")
    elif "memory_bytes" in figures:
        parts.append(f"{in_gib(figures['memory_bytes'])} GiB")
    return "  ".join(parts)
