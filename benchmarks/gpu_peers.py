"""transformers beside a cell of ``benchmarks.gpu``: its ``generate``, and its continuous batching as fast as it is here."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import ContinuousBatchingConfig
from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

from benchmarks.gpu_record import BATCHING, why
from benchmarks.peers import System, TransformersContinuousBatching, TransformersGenerate
from benchmarks.pretrained import Generates, read_model

BATCHING_IN_GRAPHS: Final = f"{BATCHING}, in CUDA graphs"
"""With graphs and asynchronous batching asked for, which it leaves off by itself where it has no flash attention."""

Row = dict[str, Any]


def attention_of(device: str) -> str:
    """The fastest attention that transformers has here: flash-attn's where that is installed, else torch's."""
    if device == "cuda" and is_flash_attn_3_available():
        return "flash_attention_3"
    return "flash_attention_2" if device == "cuda" and is_flash_attn_2_available() else "sdpa"


def read_peer(folder: Path, dtype: str, device: str) -> Generates:
    """The model, with the fastest attention that there is.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    return read_model(folder, dtype, device, attention=attention_of(device))


def by_transformers(model: Generates, prompts: list[list[int]], steps: int, device: str) -> Row:
    """Tokens a second of ``generate`` and of continuous batching, without the prompts: each is also run for one token.

    Where it would leave CUDA graphs off, continuous batching is run with them as well.
    """
    systems: dict[str, Callable[[], System]] = {
        "generate": lambda: TransformersGenerate(model),
        BATCHING: lambda: TransformersContinuousBatching(model, _room(device)),
    }
    if attention_of(device) == "sdpa":
        systems[BATCHING_IN_GRAPHS] = lambda: TransformersContinuousBatching(model, _in_graphs(device))
    return {name: _measured(make, prompts, steps, device) for name, make in systems.items()}


def _in_graphs(device: str) -> ContinuousBatchingConfig:
    asked = _room(device) or ContinuousBatchingConfig()
    asked.use_cuda_graph = asked.use_async_batching = device == "cuda"
    return asked


def _room(device: str) -> ContinuousBatchingConfig | None:
    """On a GPU it chooses by what is free, on the CPU by all that there is."""
    return ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256) if device == "cpu" else None


def _measured(make: Callable[[], System], prompts: list[list[int]], steps: int, device: str) -> float | str | Row:
    try:
        system = make()
        seconds = []
        for tokens in (1, 1, 1 + steps):  # the first warms up
            began = time.perf_counter()
            system.generate(prompts, tokens)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
    except Exception as error:  # a peer that cannot do a cell is no reason to lose the others
        return {"failed": why(error)}
    more = seconds[2] - seconds[1]
    return len(prompts) * steps / more if more > 0 else "not told: the longer run took no longer"
