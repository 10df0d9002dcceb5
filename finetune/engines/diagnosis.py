"""Where a value that is not finite came from: the first module of a forward pass, or the first gradient of a backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn

from finetune.model.finite import is_finite


@dataclass(frozen=True, slots=True)
class BadOutput:
    """The first module whose output is not finite."""

    module: int
    """Its place among ``named_modules()``, the same on every rank."""
    largest_input: float
    """Magnitude of the largest number that went in."""


_NOWHERE: Final = 1 << 62
_STAGE_BITS: Final = 32


class _Found(Exception):
    """Ends a forward pass that has shown enough."""


def first_bad_output(model: nn.Module, run: Callable[[], object], *, stop: bool) -> BadOutput | None:
    """Do ``run``, a forward pass through ``model``, and find the first module whose output is not finite.

    Modules are looked at as they return, so it is the innermost one. Its inputs are finite, unless ``run`` began with others: a
    later stage of a pipeline finds what an earlier one has made, see ``first_on_any_rank``.

    Args:
        stop: end the pass there. False where other ranks compute along and would wait.
    """
    found: list[BadOutput] = []

    def watch(number: int) -> Callable[[nn.Module, tuple[object, ...], dict[str, object], object], None]:
        def look(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            if found or all(is_finite(tensor) for tensor in _tensors(output)):
                return
            inputs = [tensor.detach().abs().max() for tensor in _tensors((args, kwargs)) if tensor.numel()]
            found.append(BadOutput(number, float(torch.stack([i.float() for i in inputs]).max()) if inputs else float("nan")))
            if stop:
                raise _Found

        return look

    hooks = [module.register_forward_hook(watch(n), with_kwargs=True) for n, (_, module) in enumerate(model.named_modules())]
    try:
        with torch.no_grad():
            run()
    except _Found:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def first_on_any_rank(mine: BadOutput | None, device: torch.device, *, stage: int = 0) -> BadOutput | None:
    """The first of what all ranks have found, the same on every rank. All of them call it.

    Args:
        stage: this rank's in a pipeline; what an earlier one found was earlier.
    """
    place = _NOWHERE if mine is None else (stage << _STAGE_BITS) + mine.module
    first = torch.tensor(place, device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    largest = torch.tensor(mine.largest_input if mine is not None and place == first else 0.0, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return None if first == _NOWHERE else BadOutput(int(first) % (1 << _STAGE_BITS), float(largest))


def output_in_words(model: nn.Module, found: BadOutput) -> str:
    """For example: ``the output of gpt_neox.layers.3.mlp (GPTNeoXMLP), whose largest input was 4.1e+04``."""
    name, module = list(model.named_modules())[found.module]
    inputs = f"whose largest input was {found.largest_input:.2g}"
    return f"the output of {name or 'the model'} ({type(module).__name__}), {inputs}"


def gradient_in_words(bad: Iterable[str]) -> str | None:
    """Where a gradient went bad, from the names of all parameters whose gradient is bad, in the model's order.

    It is the last of them, which a backward pass meets first; ``None`` if there are none.
    """
    names = list(bad)
    if not names:
        return None
    others = len(names) - 1
    return f"the gradient of {names[-1]}" + (f", and of {others} before it" if others else "")


def _tensors(value: object) -> list[torch.Tensor]:
    """Floating-point tensors anywhere in a module's arguments or answer. Masks hold minus infinity on purpose."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        return [tensor for key, part in value.items() if "mask" not in str(key) for tensor in _tensors(part)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
