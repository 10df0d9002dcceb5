"""Rank 0's figures beside the steps: memory, and the share of the devices' peak that the model's operations use."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch

from finetune.config import TuneConfig
from finetune.forecast.pace import keep_pace, peak_flops
from finetune.machine.memory import pages_of
from finetune.output.records import FORECAST, read_json, write_json

_FEWEST_STEPS: Final = 3
"""Steps after the first that a stored pace is made of; the first one also warms up."""


class Gauges:
    """What can be read at any time on one rank.

    Args:
        step_tokens: tokens of one step that are computed, all ranks together, targets or not.
        dtype: what the model computes in.
    """

    def __init__(
        self,
        config: TuneConfig,
        device: torch.device,
        *,
        ranks: int,
        step_tokens: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._output = Path(config.run.output)
        self._device = device
        self._step_tokens = step_tokens
        said = read_json(self._output / FORECAST)
        per_token = None if said is None else said.get("flops_per_token")
        peak = None if per_token is None else peak_flops(device.type, ranks, dtype)
        self._flops_share = None if per_token is None or peak is None else step_tokens * per_token / peak

    def read(self, steps_per_second: float) -> dict[str, float]:
        """``all_tokens_per_second``, padding included; ``mfu`` where the device's peak is known; ``memory_bytes`` of the host's
        memory this rank has; ``device_memory_bytes``.
        """
        figures = {"all_tokens_per_second": self._step_tokens * steps_per_second}
        if self._flops_share is not None:
            figures["mfu"] = self._flops_share * steps_per_second
        pages = pages_of()
        if pages is not None:
            figures["memory_bytes"] = pages.own
        if self._device.type == "cuda":
            figures["device_memory_bytes"] = torch.cuda.memory_reserved(self._device)
        return figures

    def keep(self, config: TuneConfig, durations: Sequence[float]) -> None:
        """At the end: the pace, for later forecasts of this folder, and the device's peak."""
        try:
            if len(durations) > _FEWEST_STEPS:
                seconds = statistics.median(durations[1:])
                keep_pace(self._output, config, step_seconds=seconds, tokens_per_second=self._step_tokens / seconds)
            if self._device.type == "cuda":
                taken = torch.cuda.max_memory_reserved(self._device)
                free, total = torch.cuda.mem_get_info(self._device)
                # The context and the communication library lie outside torch's allocator.
                outside = max(0, total - free - torch.cuda.memory_reserved(self._device))
                peaks = {"peak_bytes": taken + outside, "reserved_bytes": taken}
                write_json(self._output / "logs" / "device.json", peaks)
        except OSError:  # a full disk is told by the save that met it
            pass
