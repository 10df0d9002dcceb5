"""Names for the parts of a model in what a profiler records: operations tell what was computed, not where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

_ABSENT: Final = object()


class Labels:
    """Has each module of a model record its name around its forward, from ``put`` until ``take_off``; else nothing.

    Belongs to the thread that computes.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._models = models
        self._before: list[tuple[nn.Module, str, object]] = []

    def put(self) -> None:
        """Label from now on: each module's forward is wrapped."""
        for model in self._models:
            for path, module in model.named_modules():
                self._label(module, "forward", module.forward, module, path)
                for name, child in module.named_children():
                    # What calls a child past its wrapper keeps its bare forward: see ``serve.model.lean``.
                    direct = module.__dict__.get(name)
                    if callable(direct) and not isinstance(direct, nn.Module) and not isinstance(child, nn.Dropout):
                        self._label(module, name, direct, child, f"{path}.{name}" if path else name)

    def take_off(self) -> None:
        """End; every module is as it was."""
        for module, name, value in reversed(self._before):
            if value is _ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = value
        self._before.clear()

    def _label(self, holder: nn.Module, name: str, call: Callable[..., Any], module: nn.Module, path: str) -> None:
        self._before.append((holder, name, holder.__dict__.get(name, _ABSENT)))
        holder.__dict__[name] = _labelled(call, f"{type(module).__name__} {path}".rstrip())


def _labelled(call: Callable[..., Any], label: str) -> Callable[..., Any]:
    def labelled(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(label):
            return call(*args, **kwargs)

    return labelled
