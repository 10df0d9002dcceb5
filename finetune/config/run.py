"""Where a run is kept, what is seen of it, and its processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from finetune.config.checks import require


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Loss on held-out text, without gradients."""

    every: int = 100
    """Steps between evaluations; 0 evaluates at the end only."""

    samples: int = 256
    """Samples of one evaluation, at most; 0 takes all of them."""

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            require(getattr(self, name) >= 0, f"eval.{name}", getattr(self, name), "be 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveConfig:
    """What is written while training. Each save is whole or absent."""

    every: int = 500
    """Steps between saves; 0 saves at the end only. The last step is always saved."""

    keep: int = 2
    """Checkpoints and resume states kept, newest first; 0 keeps all."""

    snapshot_every: int = 0
    """Steps between snapshots, weights alone in ``<output>/snapshots``, which are all kept; 0 makes none."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the saved weights: ``auto`` is the training type, ``float32`` the optimizer's own exact weights."""

    max_shard_mib: int = 2048
    """Largest file of weights."""

    resume_state: bool = True
    """Whether moments, position and random states are kept too, so that training can go on exactly."""

    def __post_init__(self) -> None:
        for name in ("every", "keep", "snapshot_every"):
            require(getattr(self, name) >= 0, f"save.{name}", getattr(self, name), "be 0 or more")
        require(self.max_shard_mib >= 1, "save.max_shard_mib", self.max_shard_mib, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is seen of a run: the terminal, ``log.jsonl``, TensorBoard, Weights & Biases, Prometheus, ``loss.png``, a report."""

    every: int = 10
    """Steps between lines of the log (and of the terminal, when it is not interactive)."""

    tensorboard: bool = True
    """Whether TensorBoard events are written to ``<output>/tensorboard``."""

    wandb: str | None = None
    """Project of Weights & Biases that the figures go to as well; needs the package ``wandb``, and its own login."""

    plot: bool = True
    """Whether ``loss.png`` is drawn at the end."""

    report: bool = True
    """Whether ``report.html`` is written at the end: settings, curves, forecast against measurement, saves, sampled text."""

    sample_prompts: tuple[str, ...] = ()
    """Prompts that the trained model completes for the report."""

    metrics_port: int | None = None
    """Port on 127.0.0.1 that answers Prometheus with ``tessera_train_*``; 0 picks a free one and says which. Unset: none."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "log.every", self.every, "be at least 1")
        require(self.wandb is None or bool(self.wandb.strip()), "log.wandb", self.wandb, "name a project")
        port = self.metrics_port
        require(port is None or 0 <= port <= 65535, "log.metrics_port", port, "lie between 0 and 65535")


@dataclass(frozen=True, kw_only=True, slots=True)
class SpikeConfig:
    """The watch for sudden rises of the loss."""

    action: Literal["off", "note", "stop"] = "note"
    """``note`` says so in the terminal, the log and the metrics; ``stop`` also saves and ends the run."""

    window: int = 50
    """Steps before that a loss is compared with; the watch begins when half of them are there."""

    deviations: float = 6.0
    """A spike lies this many deviations above the window's median; a deviation is 1.48 times the median absolute deviation."""

    steps: int = 3
    """Steps in a row that must lie above before it is a spike: a single hard batch is none."""

    def __post_init__(self) -> None:
        require(self.window >= 4, "spike.window", self.window, "be at least 4")
        good = math.isfinite(self.deviations) and self.deviations > 0
        require(good, "spike.deviations", self.deviations, "be greater than 0")
        require(self.steps >= 1, "spike.steps", self.steps, "be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Where a run is kept, and its processes."""

    output: str
    """Folder of the run: checkpoints, resume states, logs."""

    ranks: int = 1
    """Processes that train together on this machine; one per GPU, or any number on CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` is cuda where there is one, else cpu."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Type of weights, activations and gradients; the optimizer always keeps fp32. ``auto``: bf16 on a GPU (fp16, with dynamic
    loss scaling, where it has no bf16), fp32 on CPU. fp16 needs CUDA."""

    seed: int = 0
    """New weights and dropout."""

    resume: Literal["never", "auto"] = "never"
    """``auto`` goes on from the newest save of ``run.output``, or starts when there is none. ``--resume`` is short for it."""

    max_minutes: float | None = None
    """Stop after this time with a save, wherever the schedule is."""

    threads: int | None = None
    """CPU threads per rank; unset: the rank's fair share of the cores this process may use."""

    def __post_init__(self) -> None:
        require(bool(self.output), "run.output", self.output, "name a folder")
        require(self.ranks >= 1, "run.ranks", self.ranks, "be at least 1")
        require(self.seed >= 0, "run.seed", self.seed, "be 0 or more")
        require(self.threads is None or self.threads >= 1, "run.threads", self.threads, "be at least 1")
        require(
            self.max_minutes is None or (math.isfinite(self.max_minutes) and self.max_minutes > 0),
            "run.max_minutes",
            self.max_minutes,
            "be greater than 0",
        )
