"""Times what a training step computes, as one of the ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import distributed
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from finetune.forecast.work import Tally, Work

_BUDGET_SECONDS: Final = 0.08
"""How long each measurement of a round may take."""
_ROUNDS: Final = 5
_ENOUGH_SECONDS: Final = 12.0
"""No further round begins after so long: products that slow, as those of bf16 are on many processors, are spoilt by little."""
_SIZES: Final = (32, 128, 384, 1024)
_HEAD_SIZES: Final = (32, 128)
_KEYS: Final = (128, 256, 1024)
"""Short rows are dear in bf16: what orders their keys for the products is spread over few pairs."""


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it unannotated
    """Adds up operations as the forecast does (``work``)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.tally = Tally()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.tally.see(func, args, made)
        return made


def measure(dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    """The fields of ``speeds.Speeds``: medians over rounds, so that what else runs for a moment does not spoil one figure."""
    began, rounds = time.perf_counter(), [_round(dtype, ranks)]
    while len(rounds) < _ROUNDS and _soonest(time.perf_counter() - began, ranks) < _ENOUGH_SECONDS:
        rounds.append(_round(dtype, ranks))
    return {name: _medians([one[name] for one in rounds]) for name in rounds[0]}


def _medians(values: list[Any]) -> Any:
    """The median of figures, or of each figure in mappings of them; ``None`` where nothing was measured."""
    if isinstance(values[0], dict):
        return {key: _medians([value[key] for value in values]) for key in values[0]}
    return None if values[0] is None else statistics.median(values)


def _soonest(seconds: float, ranks: int) -> float:
    """The least of what the ranks' clocks say, the same on all."""
    least = torch.tensor(seconds, dtype=torch.float64)
    if ranks > 1:
        distributed.all_reduce(least, distributed.ReduceOp.MIN)
    return least.item()


def _three_products(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One as in the forward pass, two as in the backward pass."""
    return left @ right.t(), left @ right, left.t() @ right


def _round(dtype: torch.dtype, ranks: int) -> dict[str, Any]:
    several = ranks > 1
    products = {}
    for size in _SIZES:
        left, right = torch.full((size, size), 0.5, dtype=dtype), torch.full((size, size), 0.25, dtype=dtype)
        products[size] = 6.0 * size**3 / _seconds(partial(_three_products, left, right), several)
    call = _call(several)
    plain = _plain(dtype, several, call)
    return {
        "products": products,
        "attention": {size: {keys: _attention(dtype, size, keys, several) for keys in _KEYS} for size in _HEAD_SIZES},
        "plain_bytes": plain,
        "costly_bytes": _costly(dtype, several, call, plain),
        "drawn": _drawn(dtype, several),
        "call_seconds": call,
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


def _attention(dtype: torch.dtype, size: int, keys: int, several: bool) -> float:
    shape = (max(_KEYS) // keys, 4, keys, size)
    query, key, value = (torch.full(shape, 0.1, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.full(shape, 0.1, dtype=dtype)

    def both() -> object:
        answer = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return torch.autograd.grad(answer, (query, key, value), gradient)

    seconds, work = _timed(both, several)
    return work.attention[size][keys] / seconds


def _timed(act: Callable[[], object], several: bool) -> tuple[float, Work]:
    """Seconds of something done once, and what it is made of."""
    with _Counted() as counted:
        act()
    return _seconds(act, several), counted.tally.work(tensors=0)


def _plain(dtype: torch.dtype, several: bool, call: float) -> float:
    """Results are held as those of a forward pass are, so most of them lie in no cache, and some on new pages."""
    one, other = torch.full((256, 1024), 0.5, dtype=dtype), torch.full((256, 1024), 0.25, dtype=dtype)

    def act() -> object:
        held = [one]
        for _ in range(8):
            product = held[-1] * other
            turned = product.view(2, 128, 8, 128).transpose(1, 2).contiguous()
            held += [product, turned, torch.cat((turned.view(256, 1024)[:, 512:], product[:, :512]), 1), product + one]
        return held

    seconds, work = _timed(act, several)
    return work.plain_bytes / _rest(seconds, work.calls * call)


def _costly(dtype: torch.dtype, several: bool, call: float, plain: float) -> float:
    rows = torch.full((256, 1024), 0.5, dtype=dtype, requires_grad=True)
    weight = torch.ones(1024, dtype=dtype, requires_grad=True)
    gradient = torch.full((256, 1024), 0.1, dtype=dtype)

    def act() -> object:
        held = rows
        for _ in range(2):
            held = functional.layer_norm(functional.gelu(held), (1024,), weight)
            held = functional.silu(held) + torch.tanh(held) * held.pow(2)
            held = torch.softmax(held, -1)
        return torch.autograd.grad(held, (rows, weight), gradient)

    seconds, work = _timed(act, several)
    return work.costly_bytes / _rest(seconds, work.calls * call + work.plain_bytes / plain)


def _rest(seconds: float, known: float) -> float:
    """What is left of ``seconds``: not less than a part of it, where what is known was measured too slow."""
    return max(seconds - known, seconds / 4)


def _drawn(dtype: torch.dtype, several: bool) -> float:
    rows = torch.empty((256, 1024), dtype=dtype)
    return rows.numel() / _seconds(lambda: rows.bernoulli_(0.9), several)


def _call(several: bool) -> float:
    one = torch.full((4, 8), 0.5, requires_grad=True)
    layer = torch.nn.Linear(8, 8)

    def chain() -> object:
        answer = one
        for _ in range(8):
            answer = layer(answer).view(2, 2, 8).transpose(1, 2).contiguous().view(4, 8) * 0.5 + one
        return torch.autograd.grad(answer.sum(), (one, *layer.parameters()))

    seconds, work = _timed(chain, several)
    return seconds / work.calls


def _between(call: Callable[[torch.Tensor], object], several: bool) -> float:
    part = torch.full((4 << 20,), 0.5)
    return part.numel() * part.itemsize / _seconds(lambda: call(part), several, times=2)


def _gather(whole: torch.Tensor, ranks: int) -> None:
    size = whole.numel() // ranks
    distributed.all_gather_into_tensor(whole[: size * ranks], torch.full((size,), 0.5))
