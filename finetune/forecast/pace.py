"""Seconds of a step, from what a run of the same folder measured, or from a short probe; never guessed from tables alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from finetune.config import TuneConfig
from finetune.machine import inventory

if TYPE_CHECKING:
    import torch

FILE: Final = "pace.json"
_PEAK_TERAFLOPS: Final = (
    ("B300", 2500.0), ("GB300", 2500.0), ("B200", 2250.0), ("GB200", 2500.0), ("H200", 989.0), ("GH200", 989.0),
    ("H100 PCIe", 756.0), ("H100 NVL", 835.0), ("H100", 989.0), ("H800", 989.0), ("H20", 148.0), ("A100", 312.0),
    ("A800", 312.0), ("A40", 149.7), ("A30", 165.0), ("A10G", 70.0), ("A10", 125.0), ("L40S", 362.0), ("L40", 181.0),
    ("L4", 121.0), ("RTX 5090", 209.5), ("RTX 4090", 165.2), ("RTX 4080", 97.5), ("RTX 3090", 71.0), ("RTX A6000", 154.8),
    ("RTX 6000 Ada", 364.2),
)  # fmt: skip
"""Dense bf16 TFLOPS of common GPUs by whole words of their name, longer ones first where one begins with another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a configuration steps, and how that is known."""

    step_seconds: float
    tokens_per_second: float
    source: str
    """Where the figure comes from, for the reader."""


def peak_flops(device: str, ranks: int, dtype: torch.dtype) -> float | None:
    """Operations a second that all ranks' devices do at best: a GPU in bf16, a CPU in ``dtype``, measured; or ``None``."""
    if device == "cpu":
        return _cpu_peak_flops(dtype) * ranks
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    per_device = next((peak for words, peak in _PEAK_TERAFLOPS if re.search(rf"\b{words}\b", name)), None)
    return None if per_device is None else per_device * 1e12 * ranks


def _cpu_peak_flops(dtype: torch.dtype, seconds: float = 0.15) -> float:
    """Best rate of a large product on the threads of this process, which are this rank's part of the machine."""
    import torch

    size = 512
    # No random numbers: a run's own must not move.
    left, right = torch.full((size, size), 0.5, dtype=dtype), torch.full((size, size), 0.25, dtype=dtype)
    best, end = float("inf"), time.perf_counter() + seconds
    while True:  # once at least, however long this process was kept waiting
        began = time.perf_counter()
        left @ right
        now = time.perf_counter()
        best = min(best, now - began)
        if now >= end:
            return 2 * size**3 / best


def shape_of(config: TuneConfig) -> dict[str, Any]:
    """What a step's duration depends on; a stored pace of another shape is not used."""
    return {
        "model": dict(config.model.new) if config.model.new else _folder_of(str(config.model.path)),
        "step_samples": config.step_samples,
        "micro": config.batch.micro,
        "seq_len": config.data.seq_len,
        "ranks": config.run.ranks,
        "stages": config.pipeline.stages,
        "optimizer": config.algorithm,
        "zero": config.zero.stage,
        "offload": [config.offload.optimizer, config.offload.parameters, config.offload.ratio, config.offload.method],
        "activations": asdict(config.activations),
        "lora": None if config.lora is None else asdict(config.lora),
        "packing": config.data.packing,
        "precision": config.run.precision,
        "threads": config.run.threads,
        "processor": inventory.cpu_description(),
    }


def _folder_of(path: str) -> str:
    """The checkpoint that ``model.path`` means, as a run names it, which decides on it once."""
    from checkpoint import CheckpointError
    from finetune.base_model.identity import candidates

    try:
        return str(candidates(Path(path))[0])
    except CheckpointError:
        return path


def keep_pace(output: Path, config: TuneConfig, *, step_seconds: float, tokens_per_second: float) -> None:
    """Remember how fast a run stepped, for the forecasts of its folder."""
    facts = {"shape": shape_of(config), "step_seconds": step_seconds, "tokens_per_second": tokens_per_second}
    (output / FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def kept_pace(config: TuneConfig) -> Pace | None:
    """The pace of an earlier run in this run's folder, if it had the same shape."""
    path = Path(config.run.output) / FILE
    try:
        facts: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if facts["shape"] != json.loads(json.dumps(shape_of(config))):
            return None
        return Pace(
            step_seconds=float(facts["step_seconds"]),
            tokens_per_second=float(facts["tokens_per_second"]),
            source="measured by an earlier run in this folder",
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
