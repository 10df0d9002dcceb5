"""Draws ``loss.png`` of a run from its log."""

from __future__ import annotations

from pathlib import Path

from finetune.output.log import read_log


def draw_losses(log: Path, picture: Path) -> bool:
    """Draw training and evaluation loss over the steps; ``False``, and no picture, when the log holds no loss."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = read_log(log)
    trained = [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]
    evaluated = [(entry["step"], entry["eval_loss"]) for entry in entries if "eval_loss" in entry]
    if not trained and not evaluated:
        return False
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if trained:
        axes.plot(*zip(*trained, strict=True), label="training", linewidth=1.5)
    if evaluated:
        axes.plot(*zip(*evaluated, strict=True), label="evaluation", marker="o", linewidth=1.5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
    return True
