"""Times what a training step is made of, as one of the ranks. Run as a process of its own by ``finetune.forecast.measure``."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import distributed
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.machine.process import die_with_parent
from finetune.model.dtypes import DTYPES

_BUDGET_SECONDS: Final = 0.08
"""Of each measurement in a round."""
_ROUNDS: Final = 5
_SIZES: Final = (32, 128, 384, 1024)


class _Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def measure(dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    """The fields of ``measure.Speeds``: medians over rounds, so that what else runs for a moment does not spoil one figure."""
    rounds = [_round(dtype, ranks) for _ in range(_ROUNDS)]
    found: dict[str, Any] = {
        name: None if value is None else statistics.median(one[name] for one in rounds)
        for name, value in rounds[0].items()
        if name != "products"
    }
    products = {size: statistics.median(one["products"][size] for one in rounds) for size in _SIZES}
    return {"products": products, **found}


def _round(dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    several = ranks > 1
    products = {}
    for size in _SIZES:
        left, right = torch.full((size, size), 0.5, dtype=dtype), torch.full((size, size), 0.25, dtype=dtype)
        # One as in the forward pass, two as in the backward pass.
        products[size] = 6.0 * size**3 / _seconds(lambda a=left, b=right: (a @ b.t(), a @ b, a.t() @ b), several)
    return {
        "products": products,
        "attention": _attention(dtype, several),
        "plain_bytes": _plain(dtype, several),
        "costly_bytes": _costly(dtype, several),
        "update_bytes": _update(several),
        "call_seconds": _call(several),
        "reduce_bytes": _between(distributed.all_reduce, several) if several else None,
        "gather_bytes": _between(lambda part: _gather(part, ranks), several) if several else None,
    }


def _seconds(call: Callable[[], object], several: bool, times: int | None = None) -> float:
    """Mean duration, interruptions by others included as a step has them; all ranks begin together.

    Args:
        times: how often to call where all ranks must do so equally often.
    """
    call()
    if several:
        distributed.barrier()
    count, began = 0, time.perf_counter()
    while count < (times or 1) or (times is None and time.perf_counter() - began < _BUDGET_SECONDS):
        call()
        count += 1
    return (time.perf_counter() - began) / count


def _attention(dtype: torch.dtype, several: bool) -> float:
    batch, heads, length, size = 2, 8, 256, 64
    shape = (batch, heads, length, size)
    query, key, value = (torch.full(shape, 0.1, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.full(shape, 0.1, dtype=dtype)

    def both() -> object:
        answer = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(answer, (query, key, value), gradient)

    return (1 + 2.5) * 4 * batch * heads * length * length * size / 2 / _seconds(both, several)


def _plain(dtype: torch.dtype, several: bool) -> float:
    one, other = torch.full((512, 2048), 0.5, dtype=dtype), torch.full((512, 2048), 0.25, dtype=dtype)
    return 3.0 * one.numel() * one.itemsize / _seconds(lambda: one + other, several)


def _costly(dtype: torch.dtype, several: bool) -> float:
    rows = torch.full((512, 1024), 0.5, dtype=dtype, requires_grad=True)
    weight = torch.ones(1024, dtype=dtype, requires_grad=True)
    gradient = torch.full((512, 1024), 0.1, dtype=dtype)

    def both() -> object:
        answer = functional.gelu(functional.layer_norm(rows, (1024,), weight))
        return torch.autograd.grad(answer, (rows, weight), gradient)

    # Two passes forward of two tensors each, two back of three.
    return 10.0 * rows.numel() * rows.itemsize / _seconds(both, several)


def _update(several: bool) -> float:
    weight = torch.nn.Parameter(torch.full((4 << 20,), 0.5))
    weight.grad = torch.full_like(weight, 0.1)
    optimizer = torch.optim.AdamW([weight], fused=True)
    return 28.0 * weight.numel() / _seconds(optimizer.step, several)


def _call(several: bool) -> float:
    one = torch.full((4, 8), 0.5, requires_grad=True)
    layer = torch.nn.Linear(8, 8)

    def chain() -> object:
        answer = one
        for _ in range(8):
            answer = layer(answer).view(2, 2, 8).transpose(1, 2).contiguous().view(4, 8) * 0.5 + one
        return torch.autograd.grad(answer.sum(), (one, *layer.parameters()))

    with _Calls() as calls:
        chain()
    return _seconds(chain, several) / calls.count


def _between(call: Callable[[torch.Tensor], object], several: bool) -> float:
    part = torch.full((4 << 20,), 0.5)
    return part.numel() * part.itemsize / _seconds(lambda: call(part), several, times=2)


def _gather(whole: torch.Tensor, ranks: int) -> None:
    size = whole.numel() // ranks
    distributed.all_gather_into_tensor(whole[: size * ranks], torch.full((size,), 0.5))


def main() -> None:
    """Print the figures of rank 0 as one JSON object."""
    die_with_parent(int(os.environ["TESSERA_PARENT"]))
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if ranks > 1:
        distributed.init_process_group("gloo")
    found = measure(DTYPES[sys.argv[1]], ranks)
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
