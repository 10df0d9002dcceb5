"""Takes Python's part out of a step: at few tokens the calls between the kernels cost as much as the kernels."""

from __future__ import annotations

from torch import Tensor, nn


def call_leaves_directly(model: nn.Module) -> None:
    """Let the modules of a model's layers reach their children without ``nn.Module``'s attribute search and call wrapper.

    A child without children of its own is called as its bare ``forward``, dropout (these models never train) as nothing at
    all. Call it last: hooks that are put on such a child afterwards do not run.
    """
    for layers in model.modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        for module in layers.modules():
            if isinstance(module, nn.ModuleList):
                continue
            for name, child in module.named_children():
                # An instance's own attributes are found before nn.Module's search for submodules begins.
                module.__dict__[name] = _shortest(child)


def _shortest(module: nn.Module) -> object:
    if isinstance(module, nn.Dropout | nn.Identity):
        return _unchanged
    if next(module.children(), None) is not None or module._forward_hooks or module._forward_pre_hooks:
        return module
    return module.forward


def _unchanged(x: Tensor) -> Tensor:
    return x
