"""Measures what each layer of a pipeline costs: forward and backward of one micro-batch, on this rank."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.engines.pipeline.layers import HeadLayer, Layer, lent_memory

_RUNS = 7
_ENOUGH_SECONDS = 3.0


def measure(
    layers: Sequence[Layer],
    *,
    micro: int,
    seq_len: int,
    hidden_size: int,
    vocab_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[float]:
    """Seconds of each layer, the loss counted with the head. Layers of one signature are measured once.

    Only one layer has memory at a time, and only for as long as it is measured.
    """
    seconds: dict[str, float] = {}
    costs = []
    for layer in layers:
        key = layer.signature
        if key not in seconds:
            with lent_memory(layer.parameters(), device):
                _make_ordinary(layer)
                seconds[key] = _fastest(_round(layer, micro, seq_len, hidden_size, vocab_size, device, dtype), device)
                layer.zero_grad(set_to_none=True)
        costs.append(seconds[key])
    return costs


def recall(file: Path, conditions: Mapping[str, Any]) -> list[float] | None:
    """What was measured under these conditions before: a resumed run has the stages it had."""
    for entry in _entries(file):
        if entry["conditions"] == conditions:
            return [float(seconds) for seconds in entry["seconds"]]
    return None


def remember(file: Path, conditions: Mapping[str, Any], seconds: Sequence[float]) -> None:
    """Keep a measurement for ``recall``; whole or not at all."""
    kept = [entry for entry in _entries(file) if entry["conditions"] != conditions]
    kept.append({"conditions": dict(conditions), "seconds": list(seconds)})
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, file)


def _entries(file: Path) -> list[dict[str, Any]]:
    try:
        entries: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
        return [entry for entry in entries if {"conditions", "seconds"} <= entry.keys()]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


@torch.no_grad()
def _make_ordinary(layer: nn.Module) -> None:
    """Values as at the start of training: what is not a number or denormal would be slow."""
    draw = torch.Generator(device=next(layer.parameters()).device).manual_seed(0)
    for parameter in layer.parameters():
        if parameter.dim() >= 2:
            parameter.normal_(std=0.02, generator=draw)
        else:
            parameter.fill_(1.0)


def _round(
    layer: Layer, micro: int, seq_len: int, hidden_size: int, vocab_size: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """One forward and backward pass of ``layer`` alone."""
    draw = torch.Generator(device=device).manual_seed(0)
    ids = torch.randint(0, vocab_size, (micro, seq_len), generator=draw, device=device)
    hidden = torch.randn((micro, seq_len, hidden_size), generator=draw, device=device).to(dtype)
    if isinstance(layer, HeadLayer):
        tokens = math.ceil(ids.numel() * layer.share)
        hidden, ids = hidden.flatten(0, 1)[:tokens], ids.flatten()[:tokens]

    def run() -> None:
        given = ids if layer.kind == "embedding" else hidden.detach().requires_grad_()
        out = layer((given, ids))
        first = out[0] if isinstance(out, tuple) else out
        first.backward(torch.full_like(first, 1e-3))

    return run


def _fastest(run: Callable[[], None], device: torch.device) -> float:
    """Seconds of the fastest of several runs after one that warms up: whatever disturbs can only slow down."""
    times: list[float] = []
    spent = 0.0
    for number in range(1 + _RUNS):
        _wait_for(device)
        began = time.perf_counter()
        run()
        _wait_for(device)
        took = time.perf_counter() - began
        if number > 0:
            times.append(took)
        spent += took
        if len(times) >= 2 and spent > _ENOUGH_SECONDS:
            break
    return min(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
