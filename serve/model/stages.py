"""A model that keeps the layers of one stage: hidden states come from the stage before, and go on to the one behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from serve.model.families import Family
from serve.model.heads import Stage
from serve.model.localise import attention_modules
from serve.model.pretrained import head_of

_BEFORE_LAYERS: Final = frozenset(("word_embeddings_layernorm", "project_in"))
"""What families have between embedding and first layer, by name; all else beside the layers, embeddings but, is behind them."""

Receive = Callable[[tuple[int, ...]], Tensor]
"""Waits for the hidden states [1, T, hidden] of a step from the stage before."""


class Entrance(nn.Module):
    """Stands where the embedding of the ids is: gives what the stage before has made of them."""

    def __init__(self, features: int, receive: Receive) -> None:
        super().__init__()
        self._features, self._receive = features, receive

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states [1, T, hidden] for ids [1, T]."""
        return self._receive((*ids.shape, self._features))


class _AddsNothing(nn.Module):
    """Stands where positions are embedded, which the first stage has added."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._zero = torch.zeros((1, 1, 1), dtype=dtype, device=device)

    def forward(self, *_: object, **__: object) -> Tensor:
        return self._zero


def keep_stage(model: PreTrainedModel, family: Family, stage: Stage, device: torch.device, receive: Receive) -> None:
    """Take out of a model on ``meta`` what other stages compute; its layers keep the numbers that they have in the checkpoint.

    What is left is called as the whole model's base is. On all stages but the last it gives the hidden states behind its last
    layer, which no norm has seen yet.

    Args:
        device: where the stage computes.
        receive: asked in each step, on all stages but the first.
    """
    layers = layers_of(model, family)
    own = stage.layers(len(layers))
    for number in list(layers._modules):
        if not own.begin <= int(number) < own.end:
            del layers._modules[number]
    embedding, head = model.get_input_embeddings(), head_of(model)
    inside = set(layers.modules())
    beside = [
        (path, module)
        for path, module in model.named_modules()
        if module not in inside and next(module.parameters(recurse=False), None) is not None
    ]
    for path, module in beside:
        embeds = module is embedding or isinstance(module, nn.Embedding)
        if embeds or path.rpartition(".")[2] in _BEFORE_LAYERS:
            if stage.is_first:
                continue
            nothing = _AddsNothing(model.dtype, device) if embeds else nn.Identity()
            _replace(model, path, Entrance(int(model.config.hidden_size), receive) if module is embedding else nothing)
        elif not stage.is_last:
            _replace(model, path, nn.Identity())
    assert stage.is_last or head_of(model) is not head, "a head behind the last layer is the last stage's"


def layers_of(model: nn.Module, family: Family) -> nn.ModuleList:
    """The list of a model's layers: the one that has the attention modules."""
    first = attention_modules(model, family)[0]
    path = next(path for path, module in model.named_modules() if module is first)
    layers = model.get_submodule(path.removesuffix("." + family.attention).rpartition(".")[0])
    assert isinstance(layers, nn.ModuleList)
    return layers


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)
